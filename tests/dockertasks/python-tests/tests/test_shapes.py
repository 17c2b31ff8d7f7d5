import csv
import sys
import unittest
from pathlib import Path

sys.path.insert(0, "/app")


class Areas(unittest.TestCase):
    def test_areas(self):
        from shapes import area

        for width, height, expected in csv.reader((Path(__file__).parent / "data" / "areas.csv").open()):
            self.assertEqual(area(int(width), int(height)), int(expected))
