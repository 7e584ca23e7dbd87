"""Frames on a socket between a process and its child: a 32-bit little-endian length, then as many bytes."""

from __future__ import annotations

import asyncio
import socket
import struct

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")


def encode_frame(payload: bytes) -> bytes:
    assert len(payload) <= MAX_FRAME_BYTES, len(payload)
    return _LENGTH.pack(len(payload)) + payload


def receive_frame(sock: socket.socket) -> bytes | None:
    """Block for the next frame's payload; ``None`` once the peer has closed.

    Raises:
        BlockingIOError: the socket's timeout has passed.
    """
    header = _receive_exactly(sock, _LENGTH.size)
    return None if header is None else _receive_exactly(sock, _payload_length(header))


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """Read the next frame's payload; ``None`` once the peer has closed."""
    try:
        return await reader.readexactly(_payload_length(await reader.readexactly(_LENGTH.size)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _payload_length(header: bytes) -> int:
    (length,) = _LENGTH.unpack(header)
    assert length <= MAX_FRAME_BYTES, length
    return int(length)


def _receive_exactly(sock: socket.socket, num_bytes: int) -> bytes | None:
    received = bytearray()
    while len(received) < num_bytes:
        try:
            chunk = sock.recv(num_bytes - len(received))
        except ConnectionError:
            return None
        if not chunk:
            return None
        received += chunk
    return bytes(received)
