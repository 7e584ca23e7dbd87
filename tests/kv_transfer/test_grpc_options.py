"""A peer that is stopped, or whose cable is cut, is noticed though its connection stays open."""

from __future__ import annotations

import os
import signal
import time

from tests.kv_transfer.peer import running_peer

NOTICE_S = 12.0


def test_a_stopped_source_is_noticed() -> None:
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


def test_a_stopped_puller_loses_its_lease() -> None:
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
