"""How clients of this project verify an HTTPS server. `pdserve chat` and the load generators call it."""

from __future__ import annotations

import ipaddress
import ssl
from urllib.parse import urlsplit


def server_tls(url: str) -> ssl.SSLContext | None:
    """Context for ``url``, which trusts the system's certificates or those of ``SSL_CERT_FILE``, and anything on this
    machine, whose certificate is for other names; ``None`` for plain HTTP."""
    if urlsplit(url).scheme != "https":
        return None
    context = ssl.create_default_context()
    if is_own(url):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def is_own(url: str) -> bool:
    """Whether ``url`` is of this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
