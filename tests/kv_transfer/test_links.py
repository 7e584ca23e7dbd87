"""Pulls from device to device, over Gloo between CPUs, of real processes and real streams: what arrives, and that
nothing arrives later."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from functools import partial

import pytest

from pdserve.proto.v1 import transfer_pb2
from tests.kv_transfer.device_peer import BATCH_SIZE, HURRY_S, LAYOUT, DevicePeer, device_peer
from tests.kv_transfer.peer import EVENT_GRACE_S
from tests.patience import HANG_S
from tests.shared import shared
from tests.workers import wait_until

SOURCE_IDS = [3, 17, 4, 30, 9, 8, 21, 0, 12, 13]
"""Two batches and a part of one."""
TARGET_IDS = [1, 2, 31, 5, 6, 29, 7, 10, 11, 14]
SENTINEL = 0xA5


def quiet(peer: DevicePeer) -> Iterator[DevicePeer]:
    """Yield a peer whose messages the test must all expect."""
    yield peer
    peer.expect_no_more()


@pytest.fixture(name="source")
def fixture_source(request: pytest.FixtureRequest) -> Iterator[DevicePeer]:
    yield from quiet(shared(request, partial(device_peer, 1)))


@pytest.fixture(name="target")
def fixture_target(request: pytest.FixtureRequest) -> Iterator[DevicePeer]:
    yield from quiet(shared(request, partial(device_peer, 2)))


def hand_off(source: DevicePeer, target: DevicePeer, transport: str = "nccl") -> None:
    """A whole handoff, which must arrive."""
    pull(source, target, source.offer(SOURCE_IDS, num_first=3), transport)


def pull(source: DevicePeer, target: DevicePeer, handle: bytes, transport: str = "nccl") -> None:
    """Pull what the source has offered, which must arrive."""
    target.pull(source, handle, TARGET_IDS)
    done = target.expect_done(transport=transport)
    assert done.first_token.token == 7
    assert target.ask("blocks", TARGET_IDS) == source.ask("blocks", SOURCE_IDS)
    source.expect("lease_opened")
    source.expect("released")


def fall_back(source: DevicePeer, target: DevicePeer) -> None:
    """Two handoffs through the host, the first after an attempt from device to device."""
    handle = source.offer(SOURCE_IDS)
    target.pull(source, handle, TARGET_IDS)
    target.expect_done(transport="memfd")
    for event in ("lease_opened", "lease_lost", "lease_opened", "released"):
        source.expect(event)
    hand_off(source, target, "memfd")


def hold_second_batch(source: DevicePeer, target: DevicePeer) -> bytes:
    """Begin a handoff and stop it when its second batch is about to be sent; returns the handle."""
    handle = source.offer(SOURCE_IDS)
    source.command("hold", SOURCE_IDS[BATCH_SIZE])
    target.pull(source, handle, TARGET_IDS)
    source.expect("lease_opened")
    source.expect("held")
    return handle


def fill(target: DevicePeer, value: int = SENTINEL) -> None:
    target.command("fill", value)


def check_nothing_is_written(target: DevicePeer) -> None:
    """Check that nothing has been written since `fill`, and soon."""
    time.sleep(EVENT_GRACE_S)
    assert {*b"".join(target.ask("blocks", range(32)))} == {SENTINEL}


def abort(target: DevicePeer) -> None:
    target.send(abort_pull=transfer_pb2.AbortPull(pull_id=1))


def test_blocks_that_are_lent_come_through_a_link(source: DevicePeer, target: DevicePeer) -> None:
    fill(target)
    target.pull(source, b"", TARGET_IDS, prefix=[bytes([number]) * 16 for number in range(len(TARGET_IDS))])
    lend = source.expect("lend")
    source.expect("lease_opened")
    source.lend(lend.handle, SOURCE_IDS[:7])
    assert target.expect_done().num_tokens == 7 * LAYOUT.block_size
    assert target.ask("blocks", TARGET_IDS[:7]) == source.ask("blocks", SOURCE_IDS[:7])
    assert source.expect("released").handle == lend.handle


def test_blocks_arrive_from_device_to_device_in_one_group(source: DevicePeer, target: DevicePeer) -> None:
    for _ in range(2):
        fill(target, 0)
        hand_off(source, target)
    assert set(b"".join(target.ask("staged_blocks", TARGET_IDS))) == {0}, "blocks were copied through the host"
    assert source.ask("threads") == 1
    assert target.ask("threads") == 1


def test_cached_blocks_are_not_fetched(source: DevicePeer, target: DevicePeer) -> None:
    fill(target)
    handle = source.offer(SOURCE_IDS, num_first=3)
    target.pull(source, handle, TARGET_IDS[5:], num_cached=5)
    assert target.expect_done().bytes == 5 * len(source.ask("blocks", [0])[0])
    assert target.ask("blocks", TARGET_IDS[5:]) == source.ask("blocks", SOURCE_IDS[5:])
    assert set(b"".join(target.ask("blocks", TARGET_IDS[:5]))) == {SENTINEL}
    source.expect("lease_opened")
    source.expect("released")


def test_a_block_that_was_reused_during_its_copy_fails_the_pull_alone(source: DevicePeer, target: DevicePeer) -> None:
    fill(target)
    hold_second_batch(source, target)
    source.command("reuse", SOURCE_IDS[BATCH_SIZE + 1])
    source.command("let_go")
    done = target.expect_done("verify")
    assert "was reused" in done.message
    source.expect("lease_lost")
    second = target.ask("blocks", TARGET_IDS[BATCH_SIZE : 2 * BATCH_SIZE])
    assert set(b"".join(second)) == {SENTINEL}, "unverified blocks were written"
    assert (source.ask("threads"), target.ask("threads")) == (1, 1), "the group is lost"


def test_bytes_are_older_than_the_generation_that_comes_with_them(source: DevicePeer, target: DevicePeer) -> None:
    held = slice(BATCH_SIZE, 2 * BATCH_SIZE)
    content = source.ask("blocks", SOURCE_IDS[held])
    hold_second_batch(source, target)
    source.command("scramble", 9)
    source.command("let_go")
    target.expect_done()
    assert target.ask("blocks", TARGET_IDS[held]) == content
    source.expect("released")


@pytest.mark.parametrize("end", ["aborted", "withdrawn"])
def test_what_arrives_of_an_abandoned_copy_is_not_written(source: DevicePeer, target: DevicePeer, end: str) -> None:
    handle = hold_second_batch(source, target)
    if end == "aborted":
        abort(target)
        target.expect_done("aborted")
        source.expect("lease_lost")
    else:
        source.send(withdraw=transfer_pb2.Withdraw(handle=handle))
        done = target.expect_done("aborted")
        assert "withdrew" in done.message
    fill(target)
    source.command("let_go")
    check_nothing_is_written(target)
    hand_off(source, target)


def test_pulls_that_wait_for_their_turn_outlive_one_that_is_aborted(source: DevicePeer, target: DevicePeer) -> None:
    hold_second_batch(source, target)
    other = source.offer([2, 5])
    target.pull(source, other, [20, 22], pull_id=2)
    source.expect("lease_opened")
    time.sleep(EVENT_GRACE_S)  # until it waits
    abort(target)
    assert target.expect_done("aborted").pull_id == 1
    source.expect("lease_lost")
    source.command("let_go")
    assert target.expect_done().pull_id == 2
    assert target.ask("blocks", [20, 22]) == source.ask("blocks", [2, 5])
    source.expect("released")


def test_a_stopped_and_then_a_killed_source_fail_their_pulls_alone(source: DevicePeer, target: DevicePeer) -> None:
    with device_peer(3) as other:
        hand_off(other, target)
        target.command("patience", HURRY_S)
        hold_second_batch(other, target)
        other.signal(signal.SIGSTOP)
        target.expect_done("copy")
        target.command("patience", HANG_S)
        fill(target)
        other.signal(signal.SIGCONT)
        other.command("let_go")
        other.expect("lease_lost")
        check_nothing_is_written(target)
        hand_off(other, target)
        num_links = source.ask("threads")
        hand_off(source, other)
        hold_second_batch(other, target)
        other.signal(signal.SIGKILL)
        target.expect_done("copy")
        fill(target)
        check_nothing_is_written(target)
    wait_until(lambda: source.ask("threads") == num_links, "the end of the killed worker's idle link")
    hand_off(source, target)


def test_another_worker_pulls_what_a_killed_one_was_pulling(source: DevicePeer, target: DevicePeer) -> None:
    with device_peer(5) as other:
        handle = hold_second_batch(source, other)
        other.signal(signal.SIGKILL)
        source.expect("lease_lost")
    source.command("let_go")
    pull(source, target, handle)


def test_pools_of_one_device_hand_off_through_the_host(target: DevicePeer) -> None:
    with device_peer(6, device=target.device) as source:
        hand_off(source, target, "memfd")


def test_a_group_that_cannot_be_made_is_replaced_by_another_transport(target: DevicePeer) -> None:
    with device_peer(8, interface="none-such") as source:
        fall_back(source, target)
        assert target.ask("threads") <= 2


@pytest.fixture(name="ranks")
def fixture_ranks(request: pytest.FixtureRequest) -> Iterator[DevicePeer]:
    """An engine of two ranks."""
    yield from quiet(shared(request, partial(device_peer, 9, num_ranks=2)))


def test_blocks_arrive_on_every_rank_and_from_every_rank(
    source: DevicePeer, ranks: DevicePeer, target: DevicePeer
) -> None:
    for _ in range(2):
        ranks.command("scramble", 10)
        hand_off(source, ranks)
        target.command("scramble", 11)
        hand_off(ranks, target)


def test_every_rank_refuses_blocks_that_were_reused(source: DevicePeer, ranks: DevicePeer) -> None:
    fill(ranks)
    handle = source.offer(SOURCE_IDS)
    source.command("reuse", SOURCE_IDS[BATCH_SIZE])
    ranks.pull(source, handle, TARGET_IDS)
    ranks.expect_done("verify")
    assert ranks.ask("blocks", TARGET_IDS[:BATCH_SIZE]) == source.ask("blocks", SOURCE_IDS[:BATCH_SIZE])
    assert {*b"".join(ranks.ask("blocks", TARGET_IDS[BATCH_SIZE : 2 * BATCH_SIZE]))} == {SENTINEL}
    source.expect("lease_opened")
    source.expect("lease_lost")


def test_a_pull_ends_once_every_rank_writes_no_more(source: DevicePeer, ranks: DevicePeer) -> None:
    hold_second_batch(source, ranks)
    ranks.signal_follower(signal.SIGSTOP)
    abort(ranks)
    source.expect("lease_lost")
    ranks.expect_nothing()
    ranks.signal_follower(signal.SIGCONT)
    ranks.expect_done("aborted")
    fill(ranks)
    source.command("let_go")
    check_nothing_is_written(ranks)
    hand_off(source, ranks)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_of_either_worker_fails_the_pull_alone(
    source: DevicePeer, target: DevicePeer, number: signal.Signals
) -> None:
    with device_peer(12, num_ranks=2) as second, device_peer(13, num_ranks=2) as third:
        hand_off(source, third)
        hand_off(second, third)
        hold_second_batch(second, third)
        second.command("patience", HURRY_S)
        second.signal_follower(number)
        third.expect_done("copy")
        fill(third)
        second.process.join(HANG_S)
        assert second.process.exitcode == 1
        check_nothing_is_written(third)
        handle = hold_second_batch(source, third)
        third.command("patience", HURRY_S)
        third.signal_follower(number)
        source.expect("lease_lost")
        third.process.join(HANG_S)
        assert third.process.exitcode == 1
    source.command("let_go")
    pull(source, target, handle)
