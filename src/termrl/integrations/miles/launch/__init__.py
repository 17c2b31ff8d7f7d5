"""Launching miles: from a profile (one TOML file per model) to its processes, and their end.

``profile`` and ``flags`` hold the settings, ``command`` makes the exact command lines of them, ``preflight`` checks all
that they need, ``launching`` runs them here or as jobs of a Ray cluster, ``slurm`` writes the batch script that starts
one, ``process`` ends what was started, by its recorded id.
"""
