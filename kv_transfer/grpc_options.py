"""Channel and server options of every gRPC connection inside a cluster: liveness, message sizes, no proxies.

Keep-alive pings run on both sides, so that a cut cable or a stopped process is noticed in about four seconds while a
call stands, which TCP alone would not notice for many minutes.
"""

from __future__ import annotations

KEEPALIVE_TIME_MS = 2000
KEEPALIVE_TIMEOUT_MS = 2000
CONNECT_ATTEMPT_MS = 2000

_COMMON: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # Seen: without this a stopped process, whose kernel still acknowledges bytes, is noticed after a minute only.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
)


def channel_options(max_receive_bytes: int) -> tuple[tuple[str, int], ...]:
    """Options of a client channel that accepts messages of up to ``max_receive_bytes``."""
    return (
        *_COMMON,
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),  # a restarted peer is not met with the old connection's backoff
        ("grpc.min_reconnect_backoff_ms", CONNECT_ATTEMPT_MS),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", max_receive_bytes),
    )


def server_options(max_receive_bytes: int) -> tuple[tuple[str, int], ...]:
    """Options of a server that accepts messages of up to ``max_receive_bytes`` and clients' keep-alive pings."""
    return (
        *_COMMON,
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", max_receive_bytes),
    )
