"""The families of first-steps, by name. To add one: write a builder and list it in its level's module."""

from __future__ import annotations

from termrl.tasks.generate.family import Family
from termrl.tasks.generate.level1 import LEVEL_1
from termrl.tasks.generate.level2 import LEVEL_2
from termrl.tasks.generate.level3 import LEVEL_3

FAMILIES: dict[str, Family] = {family.name: family for family in (*LEVEL_1, *LEVEL_2, *LEVEL_3)}
LEVELS: tuple[int, ...] = tuple(sorted({family.level for family in FAMILIES.values()}))
