"""Detection of a peer that is stopped or whose cable is cut, although its connection stays open."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import time
from contextlib import suppress

import grpc
import pytest

from pdserve.kv_transfer import transfer_client
from pdserve.proto.rpc import listen, server_options
from tests.kv_transfer.peer import running_peer
from tests.patience import HANG_S

NOTICE_S = 12.0


def test_a_stopped_source_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_client, "SILENCE_S", 2 * HANG_S)  # only the peer notices
    with running_peer() as source, running_peer(seed=1) as target:
        handle = source.offer()
        source.grant(handle, [1], final=False)
        target.pull(source.process.address, handle, [1, 2])
        source.expect("lease_opened")
        target.wait_for_block(1, source.block(1))
        os.kill(source.process.pid, signal.SIGSTOP)
        start_s = time.monotonic()
        target.expect_done("grant")
        assert time.monotonic() - start_s < NOTICE_S
        os.kill(source.process.pid, signal.SIGCONT)


def test_a_stopped_puller_loses_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_client, "SILENCE_S", 2 * HANG_S)  # only the peer notices
    with running_peer() as source, running_peer(seed=1) as target:
        handle = source.offer()
        target.pull(source.process.address, handle, [1])
        source.expect("lease_opened")
        os.kill(target.process.pid, signal.SIGSTOP)
        start_s = time.monotonic()
        source.expect("lease_lost")
        assert time.monotonic() - start_s < NOTICE_S
        os.kill(target.process.pid, signal.SIGCONT)


def test_a_quiet_source_is_waited_for() -> None:
    with running_peer() as source, running_peer(seed=1) as target:
        handle = source.offer()
        target.pull(source.process.address, handle, [1])
        source.expect("lease_opened")
        time.sleep(5)
        assert target.messages.empty()
        source.grant(handle, [1])
        target.expect_done()
        source.expect("released")


def two_free_ports() -> tuple[int, int]:
    """Adjacent ports that the system gives to nobody by itself."""
    for first in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as one, socket.socket() as other, suppress(OSError):
            one.bind(("127.0.0.1", first))
            other.bind(("127.0.0.1", first + 1))
            return first, first + 1
    raise AssertionError("no two adjacent ports are free")


def test_servers_share_a_range_of_ports_until_every_one_is_taken() -> None:
    ports = first, _ = two_free_ports()

    async def listen_twice() -> None:
        servers = [grpc.aio.server(options=server_options(1 << 20)) for _ in range(3)]
        addresses = [listen(server, "127.0.0.1", None, ports) for server in servers[:2]]
        assert addresses == [f"127.0.0.1:{port}" for port in ports]
        with pytest.raises(ValueError, match=f"any port from {first} to {first + 1} of 127.0.0.1; widen ports"):
            listen(servers[2], "127.0.0.1", None, ports)
        for server in servers:
            await server.stop(None)

    asyncio.run(listen_twice())
