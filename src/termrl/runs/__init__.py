"""Runs: what a training run leaves on disk.

``store`` is the run folder (config, episodes, tokens, metrics, summary), ``metrics`` the names and sums of one
step's figures, ``summary`` those of the whole run.
"""
