"""Data streams for tests: a connected pair, and a source's side of the handshake written by hand."""

from __future__ import annotations

import hmac
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from pdserve.kv_transfer.data_stream import DataStream

MAGIC = b"pdserve-kv-data2"


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


@contextmanager
def stream_pair() -> Iterator[tuple[DataStream, DataStream]]:
    """Two ends of a data stream, inside an event loop."""
    near, far = (DataStream(sock) for sock in socket_pair())
    try:
        yield near, far
    finally:
        near.close()
        far.close()


def receive_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        chunk = sock.recv(num_bytes - len(received))
        assert chunk, f"the peer closed after {len(received)} bytes of {num_bytes}"
        received += chunk
    return received


def token_proof(token: str, *fields: bytes) -> bytes:
    return hmac.digest(token.encode(), b"".join(struct.pack(">I", len(field)) + field for field in fields), "sha256")


def answer_puller(sock: socket.socket, token: str) -> None:
    """A source's side of the handshake."""
    hello = receive_exactly(sock, 16 + 16 + 32)
    assert hello[:16] == MAGIC
    nonce = os.urandom(32)
    fields = hello[16:32], hello[32:], nonce
    sock.sendall(nonce + token_proof(token, b"source", *fields))
    assert receive_exactly(sock, 32) == token_proof(token, b"puller", *fields)
