"""Capture: the session server that owns every token.

``segments`` is what a trainer gets, ``ledger`` the tokens of one session, ``render`` text to tokens (``chatml``: the
kinds of ChatML), ``upstreams`` what an engine must offer, ``sglang`` one of them, ``chat`` the wire format, ``app`` the
sessions and routes, ``server`` runs them.
"""
