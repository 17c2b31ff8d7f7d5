"""The environment server: tasks behind OpenEnv's WebSocket, on openenv's own server classes.

``config`` holds the settings, ``admission`` the slots, ``session`` one client's environment with its deadlines,
``wire`` its face towards openenv, ``app`` openenv's server over it, ``gate`` what stands between socket and app,
``security`` who may come in, ``metrics`` the figures, ``running`` all of it together.
"""
