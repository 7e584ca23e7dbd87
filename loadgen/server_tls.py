"""How clients of this project verify an HTTPS server. `pdserve chat` and the load generators call it."""

from __future__ import annotations

import ssl
from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import urlsplit


def server_tls(url: str) -> ssl.SSLContext | None:
    """Context for ``url``, which trusts the system's certificates or those of ``SSL_CERT_FILE``, and anything on this
    machine, whose certificate is for other names; ``None`` for plain HTTP."""
    if urlsplit(url).scheme != "https":
        return None
    context = ssl.create_default_context()
    host = urlsplit(url).hostname or ""
    with suppress(ValueError):  # another name
        if host == "localhost" or ip_address(host).is_loopback:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
