"""Environments: reset to a task, step, close.

``protocol`` holds tbench2's wire models and the interface, ``terminal`` the environment in this process and its
factory, ``sessions`` the commands that run in the background.
"""
