"""Which hosts are this machine."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only this machine answers at ``host``: ``localhost`` or a loopback address.

    No other name is, not even below ``.localhost``: a resolver may give anything for it.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
