"""Frames on a socket pair."""

from __future__ import annotations

import asyncio
import socket

import pytest

from pdserve.proto.framing import encode_frame, read_frame, receive_frame

PAYLOADS = [b"", b"a", bytes(range(256)) * 400]


def test_frames_arrive_whole_and_in_order() -> None:
    left, right = socket.socketpair()
    with left, right:
        for payload in PAYLOADS:
            left.sendall(encode_frame(payload))
        assert [receive_frame(right) for _ in PAYLOADS] == PAYLOADS


@pytest.mark.parametrize("num_sent", [0, 3, 6])
def test_a_closed_pipe_ends_the_frames(num_sent: int) -> None:
    left, right = socket.socketpair()
    with right:
        left.sendall(encode_frame(b"half of it")[:num_sent])
        left.close()
        assert receive_frame(right) is None


def test_the_same_frames_on_an_event_loop() -> None:
    async def read_all() -> list[bytes | None]:
        reader = asyncio.StreamReader()
        reader.feed_data(b"".join(encode_frame(payload) for payload in PAYLOADS) + b"\x09\x00")
        reader.feed_eof()
        return [await read_frame(reader) for _ in range(len(PAYLOADS) + 1)]

    assert asyncio.run(read_all()) == [*PAYLOADS, None]
