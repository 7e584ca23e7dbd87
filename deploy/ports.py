"""Free and taken TCP ports."""

from __future__ import annotations

import contextlib
import socket

import psutil


def free_port(host: str = "127.0.0.1") -> int:
    """A port of ``host`` that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def listen_error(host: str, port: int) -> OSError | None:
    """Why a server cannot listen on ``host:port``; ``None`` if it can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None


def listener_of(port: int) -> str:
    """The process that listens on ``port`` of this host, for a message; empty if it cannot be known."""
    for connection in psutil.net_connections("tcp"):
        is_it = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
        if is_it and connection.pid:
            with contextlib.suppress(psutil.Error):
                return f"{psutil.Process(connection.pid).name()} (process {connection.pid})"
    return ""
