"""Sandboxes: one machine for one episode.

``base`` holds the nouns, ``bubblewrap`` the backend for this machine, ``output`` bounded capture, ``sweep`` the
removal of what a killed process left behind.
"""
