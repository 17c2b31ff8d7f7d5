"""Rollouts: groups of episodes of one task, scheduled over sandboxes and the engine."""
