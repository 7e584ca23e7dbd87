"""Pulls between real transfer processes, over both transports."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from pdserve.proto.v1 import transfer_pb2, worker_pb2
from tests.kv_transfer.peer import EPOCH, EVENT_GRACE_S, LAYOUT, Peer, quiet, running_peer
from tests.patience import HANG_S
from tests.shared import shared

TRANSPORTS = ["memfd", "tcp"]


@pytest.fixture(name="source")
def fixture_source(request: pytest.FixtureRequest) -> Iterator[Peer]:
    yield from quiet(shared(request, partial(running_peer, seed=1)))


def target_of(request: pytest.FixtureRequest, transport: str) -> Peer:
    return shared(request, partial(running_peer, seed=2, transport=transport), of=transport)


@pytest.fixture(name="targets")
def fixture_targets(request: pytest.FixtureRequest) -> dict[str, Peer]:
    return {transport: target_of(request, transport) for transport in TRANSPORTS}


@pytest.fixture(name="target", params=TRANSPORTS)
def fixture_target(request: pytest.FixtureRequest) -> Iterator[Peer]:
    yield from quiet(target_of(request, request.param))


def _expect_released(source: Peer, handle: bytes) -> None:
    assert source.expect("lease_opened").lease_opened.handle == handle
    assert source.expect("released").released.handle == handle


def _expect_lost(source: Peer, handle: bytes) -> None:
    assert source.expect("lease_opened").lease_opened.handle == handle
    assert source.expect("lease_lost").lease_lost.handle == handle


def test_blocks_arrive_and_nothing_else_changes(source: Peer, target: Peer, request: pytest.FixtureRequest) -> None:
    handle = source.offer()
    source.grant(handle, [63, 0, 17], token=99)
    expected = [target.block(block_id) for block_id in range(LAYOUT.num_blocks)]
    for source_id, target_id in ((63, 5), (0, 62), (17, 6)):
        expected[target_id] = source.block(source_id)
    target.pull(source.process.address, handle, [5, 62, 6])
    done = target.expect_done()
    assert [target.block(block_id) for block_id in range(LAYOUT.num_blocks)] == expected
    assert (done.first_token.token, done.num_tokens, done.bytes) == (99, 11, 3 * LAYOUT.block_bytes)
    assert f"target[{done.transport}]" in request.node.name or done.transport in request.node.name
    _expect_released(source, handle)


@pytest.mark.parametrize(("transport", "dtype"), [("memfd", "int8"), ("tcp", "float8_e4m3fn")])
def test_quantised_blocks_come_with_their_scales(transport: str, dtype: str) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    assert layout.block_bytes == 2 * 3 * 2 * 4 * (8 + 4)
    with (
        running_peer(layout=layout, seed=1) as source,
        running_peer(layout=layout, seed=2, transport=transport) as target,
    ):
        handle = source.offer()
        source.grant(handle, [63, 0, 17])
        expected = [target.block(block_id) for block_id in range(layout.num_blocks)]
        for source_id, target_id in ((63, 5), (0, 63), (17, 6)):
            expected[target_id] = source.block(source_id)
        target.pull(source.process.address, handle, [5, 63, 6])
        done = target.expect_done()
        assert (done.transport, done.bytes) == (transport, 3 * layout.block_bytes)
        assert [target.block(block_id) for block_id in range(layout.num_blocks)] == expected


def test_grants_after_the_open(source: Peer, target: Peer) -> None:
    handle = source.offer()
    target.pull(source.process.address, handle, [1, 2, 3, 4])
    source.expect("lease_opened")
    source.grant(handle, [10], final=False)
    source.grant(handle, [11, 12], first_index=1, final=False)
    source.grant(handle, [], first_index=3, final=False)
    time.sleep(EVENT_GRACE_S)
    assert target.messages.empty()
    source.grant(handle, [13], first_index=3)
    assert target.expect_done().num_tokens == 15
    assert [target.block(i) for i in (1, 2, 3, 4)] == [source.block(i) for i in (10, 11, 12, 13)]
    source.expect("released")


def test_grants_before_and_after_the_open(source: Peer, target: Peer) -> None:
    handle = source.offer()
    source.grant(handle, [20, 21], final=False)
    target.pull(source.process.address, handle, [7, 8, 9])
    source.expect("lease_opened")
    source.grant(handle, [22], first_index=2)
    target.expect_done()
    assert [target.block(i) for i in (7, 8, 9)] == [source.block(i) for i in (20, 21, 22)]
    source.expect("released")


def test_cached_blocks_are_not_fetched(source: Peer, target: Peer) -> None:
    handle = source.offer()
    source.grant(handle, [30, 31], final=False)
    source.grant(handle, [32, 33], first_index=2)
    before = [target.block(block_id) for block_id in range(LAYOUT.num_blocks)]
    target.pull(source.process.address, handle, [40], num_cached_blocks=3)
    assert target.expect_done().bytes == LAYOUT.block_bytes
    before[40] = source.block(33)
    assert [target.block(block_id) for block_id in range(LAYOUT.num_blocks)] == before
    _expect_released(source, handle)


def test_everything_cached(source: Peer, target: Peer) -> None:
    handle = source.offer()
    source.grant(handle, [30, 31], token=5)
    target.pull(source.process.address, handle, [], num_cached_blocks=2)
    done = target.expect_done()
    assert (done.bytes, done.first_token.token) == (0, 5)
    _expect_released(source, handle)


def test_a_request_that_ends_with_its_first_token_moves_no_blocks(source: Peer, target: Peer) -> None:
    handle = source.offer()
    source.grant(handle, [1, 2], token=3, finish=worker_pb2.FINISH_REASON_STOP)
    before = bytes(target.memory.blocks)
    target.pull(source.process.address, handle, [11, 12])
    done = target.expect_done()
    assert done.first_token.finish == worker_pb2.FINISH_REASON_STOP
    assert bytes(target.memory.blocks) == before
    _expect_released(source, handle)


def test_a_reused_block_is_never_reported_good(source: Peer, target: Peer) -> None:
    handle = source.offer()
    source.grant(handle, [50, 51])
    source.memory.generations[51] += 1
    target.pull(source.process.address, handle, [13, 14])
    done = target.expect_done("verify")
    assert "reused" in done.message
    assert done.transport in TRANSPORTS
    _expect_lost(source, handle)
    source.withdraw(handle)


@pytest.mark.parametrize("num_reserved", [1, 3])
def test_a_wrong_number_of_targets_fails(source: Peer, target: Peer, num_reserved: int) -> None:
    handle = source.offer()
    source.grant(handle, [1, 2])
    target.pull(source.process.address, handle, list(range(num_reserved)))
    target.expect_done("grant")
    _expect_lost(source, handle)
    source.withdraw(handle)


@pytest.mark.parametrize("block_ids", [[1, 64], [2, 2], [2**32 - 1]])
def test_impossible_targets_are_refused(source: Peer, target: Peer, block_ids: list[int]) -> None:
    target.pull(source.process.address, b"any", block_ids)
    assert "target blocks" in target.expect_done("refused").message


def test_restarted_worker_and_unknown_handle_are_refused(source: Peer, target: Peer) -> None:
    handle = source.offer()
    target.pull(source.process.address, handle, [1], epoch=EPOCH + 1)
    assert "epoch" in target.expect_done("refused").message
    target.pull(source.process.address, os.urandom(16), [1])
    assert "no such prompt" in target.expect_done("refused").message
    source.withdraw(handle)


def test_released_prompts_are_forgotten(source: Peer, target: Peer) -> None:
    handle = source.offer()
    source.grant(handle, [4])
    target.pull(source.process.address, handle, [1])
    target.expect_done()
    _expect_released(source, handle)
    target.pull(source.process.address, handle, [1])
    target.expect_done("refused")


def test_a_newer_puller_takes_the_prompt_over(source: Peer, targets: dict[str, Peer]) -> None:
    first, second = targets["memfd"], targets["tcp"]
    handle = source.offer()
    first.pull(source.process.address, handle, [1])
    source.expect("lease_opened")
    second.pull(source.process.address, handle, [1])
    assert "another worker" in first.expect_done("aborted").message
    source.expect("lease_opened")
    source.grant(handle, [2])
    second.expect_done()
    source.expect("released")


def test_abort_stops_writing_and_leaves_the_prompt_to_another(source: Peer, target: Peer) -> None:
    handle = source.offer()
    source.grant(handle, [20], final=False)
    target.pull(source.process.address, handle, [1, 2])
    source.expect("lease_opened")
    target.wait_for_block(1, source.block(20))
    target.abort()
    target.expect_done("aborted")
    assert source.expect("lease_lost").lease_lost.handle == handle
    before = bytes(target.memory.blocks)
    source.grant(handle, [21], first_index=1)
    time.sleep(EVENT_GRACE_S)
    assert bytes(target.memory.blocks) == before
    target.pull(source.process.address, handle, [3, 4])
    target.expect_done()
    assert [target.block(3), target.block(4)] == [source.block(20), source.block(21)]
    _expect_released(source, handle)


def test_an_abort_right_behind_its_order_is_answered(targets: dict[str, Peer]) -> None:
    target = targets["memfd"]
    for pull_id in range(20):
        target.pull("127.0.0.1:1", b"nobody", [1], pull_id=pull_id)
        target.abort(pull_id)
    assert sorted(target.expect("pull_done").pull_done.pull_id for _ in range(20)) == list(range(20))


def test_abort_of_an_ended_pull_is_ignored(source: Peer, target: Peer) -> None:
    target.pull(source.process.address, b"unknown", [1])
    target.expect_done("refused")
    target.abort()
    time.sleep(EVENT_GRACE_S)
    assert target.messages.empty()


def test_withdraw_breaks_the_pull(source: Peer, target: Peer) -> None:
    handle = source.offer()
    source.grant(handle, [44], final=False)
    target.pull(source.process.address, handle, [1, 2])
    source.expect("lease_opened")
    target.wait_for_block(1, source.block(44))
    source.withdraw(handle)
    assert "withdrew" in target.expect_done("aborted").message
    target.pull(source.process.address, handle, [1, 2])
    target.expect_done("refused")
    assert source.messages.empty()


def test_deadline(source: Peer, target: Peer) -> None:
    handle = source.offer()
    target.pull(source.process.address, handle, [1], deadline_s=1.0)
    target.expect_done("deadline")
    _expect_lost(source, handle)
    source.withdraw(handle)


def test_emulated_duration_counts_from_the_final_grant(source: Peer, target: Peer) -> None:
    handle = source.offer()
    source.grant(handle, [1])
    target.pull(source.process.address, handle, [1], min_duration_s=0.4)
    assert target.expect_done().seconds >= 0.4
    _expect_released(source, handle)


def test_malformed_grants_of_the_engine_withdraw_the_prompt(source: Peer, target: Peer) -> None:
    handle = source.offer()
    target.pull(source.process.address, handle, [1])
    source.expect("lease_opened")
    source.grant(handle, [1], first_index=5, final=False)
    target.expect_done("aborted")


def test_a_wrong_cluster_token_is_refused(source: Peer) -> None:
    with running_peer(token="guess") as stranger:
        handle = source.offer()
        source.grant(handle, [1])
        stranger.pull(source.process.address, handle, [1])
        assert "token" in stranger.expect_done("refused").message
        source.withdraw(handle)


def test_another_model_is_refused_by_name(source: Peer) -> None:
    with running_peer(layout=replace(LAYOUT, model_hash="other weights")) as stranger:
        handle = source.offer()
        stranger.pull(source.process.address, handle, [1])
        assert "model_hash" in stranger.expect_done("refused").message
        source.withdraw(handle)


def _num_fds(peer: Peer) -> int:
    return len(os.listdir(f"/proc/{peer.process.pid}/fd"))


def _wait_for_fds(peer: Peer, most: int) -> None:
    deadline_s = time.monotonic() + HANG_S
    while _num_fds(peer) > most:
        assert time.monotonic() < deadline_s, sorted(
            os.readlink(link) for link in Path(f"/proc/{peer.process.pid}/fd").iterdir()
        )
        time.sleep(0.05)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_random_pulls_end_exactly_once_and_leave_nothing(transport: str) -> None:
    rng = random.Random(transport)
    layout = replace(LAYOUT, num_blocks=600)
    num_pulls = 200
    with (
        running_peer(layout=layout, seed=1) as source,
        running_peer(layout=layout, seed=2, transport=transport) as peer,
    ):
        fds_before = [_num_fds(source), _num_fds(peer)]
        sources: dict[int, list[int]] = {}
        targets: dict[int, list[int]] = {}
        for pull_id in range(num_pulls):
            num_blocks = rng.randint(1, 3)
            sources[pull_id] = rng.sample(range(layout.num_blocks), num_blocks)
            targets[pull_id] = [pull_id * 3 + i for i in range(num_blocks)]
            handle = source.offer()
            split = rng.randint(0, num_blocks)
            source.grant(handle, sources[pull_id][:split], final=False)
            is_late = rng.random() < 0.5
            if not is_late:
                source.grant(handle, sources[pull_id][split:], first_index=split)
            peer.pull(source.process.address, handle, targets[pull_id], pull_id=pull_id)
            if rng.random() < 0.3:
                peer.abort(rng.randint(0, pull_id))
            if rng.random() < 0.1:
                source.withdraw(handle)
            elif is_late:
                source.grant(handle, sources[pull_id][split:], first_index=split)
        ended: dict[int, transfer_pb2.PullDone] = {}
        for _ in range(num_pulls):
            done = peer.expect("pull_done").pull_done
            assert done.pull_id not in ended
            ended[done.pull_id] = done
        succeeded = [pull_id for pull_id, done in ended.items() if not done.failure_stage]
        for pull_id in succeeded:
            assert [peer.block(i) for i in targets[pull_id]] == [source.block(i) for i in sources[pull_id]]
        assert len(succeeded) > num_pulls // 3
        assert {done.failure_stage for done in ended.values()} <= {"", "aborted", "refused"}
        _wait_for_fds(source, fds_before[0] + 1)
        _wait_for_fds(peer, fds_before[1] + 2)
        time.sleep(EVENT_GRACE_S)
        assert peer.messages.empty()
