"""Pulls by copies out of the pool of another process, of real processes: what arrives, and that nothing arrives later.
Pools are in memory of the host."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import pytest

from pdserve.kv_transfer.ipc_pulls import IpcSource
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.proto.v1 import kv_pb2, transfer_pb2
from tests.kv_transfer.device_peer import LAYOUT, DevicePeer, device_peer
from tests.kv_transfer.test_links import (
    SOURCE_IDS,
    TARGET_IDS,
    check_nothing_is_written,
    fall_back,
    fill,
    hand_off,
    quiet,
)
from tests.shared import shared
from tests.workers import wait_until


@pytest.fixture(name="source")
def fixture_source(request: pytest.FixtureRequest) -> Iterator[DevicePeer]:
    yield from quiet(shared(request, partial(device_peer, 1, device="cuda_ipc")))


@pytest.fixture(name="target")
def fixture_target(request: pytest.FixtureRequest) -> Iterator[DevicePeer]:
    yield from quiet(shared(request, partial(device_peer, 2, device="cuda_ipc")))


@pytest.fixture(name="memory")
def fixture_memory() -> Iterator[PoolMemory]:
    with closing(PoolMemory.create(LAYOUT)) as memory:
        yield memory


def hold_first_copy(source: DevicePeer, target: DevicePeer) -> None:
    """Begin a handoff of two grants, and stop it before its first block is copied."""
    handle = source.offer(SOURCE_IDS, num_first=3)
    target.command("hold", -1)
    target.pull(source, handle, TARGET_IDS)
    source.expect("lease_opened")
    target.expect("held")


def test_blocks_arrive_straight_from_the_other_pool(source: DevicePeer, target: DevicePeer) -> None:
    for _ in range(2):
        fill(target, 0)
        hand_off(source, target, "cuda_ipc")
    staged = source.ask("staged_blocks", SOURCE_IDS) + target.ask("staged_blocks", TARGET_IDS)
    assert set(b"".join(staged)) == {0}, "blocks were copied through the host"
    assert target.ask("num_opened") == 1


def test_a_block_that_is_reused_before_its_copy_ends_fails_the_pull(source: DevicePeer, target: DevicePeer) -> None:
    hold_first_copy(source, target)
    source.command("reuse", SOURCE_IDS[1])
    source.ask("threads")
    target.command("let_go")
    assert "block 1 was reused" in target.expect_done("verify").message
    source.expect("lease_lost")
    hand_off(source, target, "cuda_ipc")


def test_the_end_of_a_pull_waits_for_its_copy_and_none_follows(source: DevicePeer, target: DevicePeer) -> None:
    hold_first_copy(source, target)
    target.send(abort_pull=transfer_pb2.AbortPull(pull_id=1))
    source.expect("lease_lost")
    target.expect_nothing()
    target.command("let_go")
    target.expect_done("aborted")
    fill(target)
    check_nothing_is_written(target)
    hand_off(source, target, "cuda_ipc")


def test_a_source_that_is_killed_or_stops_fails_its_pulls_alone(source: DevicePeer, target: DevicePeer) -> None:
    with device_peer(3, device="cuda_ipc") as other:
        hand_off(other, target, "cuda_ipc")
        handle = other.offer(SOURCE_IDS[:3], is_complete=False)
        other.signal(signal.SIGSTOP)
        target.pull(other, handle, TARGET_IDS, deadline_s=2.0)
        target.expect_done("deadline")
        other.signal(signal.SIGCONT)
        other.expect("lease_opened")
        other.expect("lease_lost")
        hold_first_copy(other, target)
        other.signal(signal.SIGKILL)
        other.process.join()
        target.command("let_go")
        assert "UNAVAILABLE" in target.expect_done("copy").message
        fill(target)
        check_nothing_is_written(target)
    wait_until(lambda: target.ask("num_opened") == 1, "the end of the killed worker's pool")
    hand_off(source, target, "cuda_ipc")


def test_a_source_is_up_as_long_as_all_its_ranks(memory: PoolMemory) -> None:
    ranks = [kv_pb2.RankPool(file_path=memory.path)] * 2
    assert IpcSource(1, memory.inode, ranks, ()).is_up()
    ranks[1] = kv_pb2.RankPool(file_path="/proc/0/fd/0")
    assert not IpcSource(1, memory.inode, ranks, ()).is_up()


def test_a_pool_that_cannot_be_opened_is_copied_through_the_host(target: DevicePeer) -> None:
    with device_peer(4, device="cuda_ipc", handle="/proc/0/fd/0") as source:
        fall_back(source, target)
        hand_off(target, source, "cuda_ipc")
