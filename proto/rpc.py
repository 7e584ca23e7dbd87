"""gRPC between the members of a cluster: TLS, and the options of every channel and server.

Keep-alive pings run on both sides, so that a cut cable or a stopped process is detected in about four seconds during
a call; TCP alone would take many minutes. Used by transfer processes, workers' services and the router's sessions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import grpc

from pdserve.contracts.worker_config import TlsFiles

KEEPALIVE_TIME_MS = 2000
KEEPALIVE_TIMEOUT_MS = 2000
CONNECT_ATTEMPT_MS = 2000

TLS_NAME = "pdserve"
"""Name in every certificate, instead of each host's address."""
_COMMON: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # Observed: without this a stopped process, whose kernel still acknowledges bytes, is detected only after a minute.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
)


def channel_options(max_receive_bytes: int) -> tuple[tuple[str, int], ...]:
    """Options of a client channel that accepts messages of up to ``max_receive_bytes``."""
    return (
        *_COMMON,
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),  # a restarted peer does not inherit the old connection's backoff
        ("grpc.min_reconnect_backoff_ms", CONNECT_ATTEMPT_MS),
        ("grpc.max_receive_message_length", max_receive_bytes),
    )


def server_options(max_receive_bytes: int) -> tuple[tuple[str, int], ...]:
    """Options of a server that accepts messages of up to ``max_receive_bytes`` and clients' keep-alive pings."""
    return (
        *_COMMON,
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
        ("grpc.max_receive_message_length", max_receive_bytes),
    )


def open_channel(address: str, options: Sequence[tuple[str, int]], tls: TlsFiles | None) -> grpc.aio.Channel:
    """Open a channel to a cluster member; with ``tls`` each side proves that the cluster's authority knows it.

    Raises:
        ValueError: a file of ``tls`` cannot be read.
    """
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    ca, certificate, key = read_tls_files(tls)
    credentials = grpc.ssl_channel_credentials(ca, key, certificate)
    named = (*options, ("grpc.ssl_target_name_override", TLS_NAME), ("grpc.default_authority", TLS_NAME))
    return grpc.aio.secure_channel(address, credentials, options=named)


def listen(server: grpc.aio.Server, host: str, tls: TlsFiles | None, ports: tuple[int, int] = (0, 0)) -> str:
    """Let a server listen on a free port of ``host``; returns its address.

    Args:
        ports: first and last port to try; (0, 0) takes any.

    Raises:
        ValueError: a file of ``tls`` cannot be read; or every port is taken, or the address is not one of this host.
    """
    host = f"[{host}]" if ":" in host else host
    credentials = None
    if tls is not None:
        ca, certificate, key = read_tls_files(tls)
        credentials = grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)
    for port in range(ports[0], ports[1] + 1):
        address = f"{host}:{port}"
        with contextlib.suppress(RuntimeError):  # taken
            taken = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
            return f"{host}:{taken}"
    first, last = ports
    raise ValueError(f"cannot listen on any port from {first} to {last} of {host}; widen ports in the deployment file")


def read_tls_files(tls: TlsFiles) -> tuple[bytes, bytes, bytes]:
    """Contents of authority, certificate and key.

    Raises:
        ValueError: a file cannot be read.
    """
    try:
        return Path(tls.ca).read_bytes(), Path(tls.certificate).read_bytes(), Path(tls.key).read_bytes()
    except OSError as error:
        raise ValueError(f"security.tls: cannot read {error.filename}: {error.strerror}") from error
