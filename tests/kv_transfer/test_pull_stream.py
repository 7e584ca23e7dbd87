from __future__ import annotations

import asyncio
import socket
import time

import pytest

from pdserve.kv_transfer.pull_stream import PullStream
from pdserve.kv_transfer.transports import PullError
from pdserve.proto.v1 import kv_pb2


async def _open_and_close(address: str) -> None:
    stream = PullStream(address=address, cluster_token="", max_message_bytes=1 << 20)
    try:
        await stream.open(kv_pb2.PullOpen())
    finally:
        await stream.close(release=False)


def test_nobody_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(PullError) as caught:
            asyncio.run(_open_and_close(f"127.0.0.1:{unused.getsockname()[1]}"))
    assert caught.value.stage == "connect"


def test_a_listener_that_never_answers_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start_s = time.monotonic()
        with pytest.raises(PullError) as caught:
            asyncio.run(_open_and_close(f"127.0.0.1:{silent.getsockname()[1]}"))
    assert caught.value.stage == "connect"
    assert time.monotonic() - start_s < 15
