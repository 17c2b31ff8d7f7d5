"""Capture: the session server that owns every token.

``segments`` is what a trainer gets, ``ledger`` the tokens of one session, ``render`` text to tokens, ``upstreams``
what an engine must offer, ``server`` the OpenAI-compatible HTTP.
"""
