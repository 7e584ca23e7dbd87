"""Cached blocks that one transfer process lends to another."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from pdserve.contracts.request import MAX_PREFIX_BLOCKS
from pdserve.proto.v1 import transfer_pb2
from tests.kv_transfer.peer import Peer, running_peer
from tests.shared import shared

HASHES = [bytes([number]) * 16 for number in range(4)]


@pytest.fixture(name="source")
def fixture_source(request: pytest.FixtureRequest) -> Peer:
    return shared(request, partial(running_peer, seed=5))


def asked(source: Peer) -> transfer_pb2.Lend:
    lend = source.expect("lend").lend
    source.expect("lease_opened")
    return lend


@pytest.mark.parametrize("transport", ["memfd", "tcp"])
def test_the_blocks_that_are_lent_arrive_and_the_loan_ends(source: Peer, transport: str) -> None:
    with running_peer(seed=6, transport=transport) as target:
        before = target.block(4)
        target.pull(source.process.address, b"", [1, 2, 3, 4], prefix=HASHES)
        lend = asked(source)
        assert list(lend.prefix) == HASHES
        source.lend(lend.handle, [7, 5, 6])
        done = target.expect_done()
        assert (done.num_tokens, done.transport) == (3 * target.layout.block_size, transport)
        assert not done.HasField("first_token")
        assert [target.block(block_id) for block_id in (1, 2, 3)] == [source.block(block_id) for block_id in (7, 5, 6)]
        assert target.block(4) == before
        assert source.expect("released").released.handle == lend.handle


def test_as_many_blocks_may_be_asked_for_as_the_router_names(source: Peer) -> None:
    hashes = [number.to_bytes(16, "little") for number in range(MAX_PREFIX_BLOCKS)]
    with running_peer(layout=replace(source.layout, num_blocks=MAX_PREFIX_BLOCKS)) as target:
        target.pull(source.process.address, b"", range(MAX_PREFIX_BLOCKS), prefix=hashes)
        lend = asked(source)
        assert list(lend.prefix) == hashes
        source.lend(lend.handle, [7])
        assert target.expect_done().num_tokens == target.layout.block_size
        source.expect("released")


def test_a_worker_that_caches_nothing_lends_nothing(source: Peer) -> None:
    with running_peer(seed=6) as target:
        target.pull(source.process.address, b"", [1], prefix=HASHES[:1])
        source.lend(asked(source).handle, [])
        assert target.expect_done().num_tokens == 0
        source.expect("released")


def test_a_block_that_was_reused_meanwhile_is_refused(source: Peer) -> None:
    with running_peer(seed=6) as target:
        target.pull(source.process.address, b"", [1], prefix=HASHES[:1])
        handle = asked(source).handle
        source.memory.generations[5] += 1
        grant = transfer_pb2.OfferedGrant(handle=handle)
        grant.grant.block_ids.append(5)
        grant.grant.generations.append(source.memory.generations[5] - 1)
        grant.grant.final, grant.grant.num_tokens = True, source.layout.block_size
        source.process.send(transfer_pb2.EngineToTransfer(grant=grant))
        target.expect_done("verify")
        source.expect("released")


def test_more_blocks_than_were_asked_for_are_refused(source: Peer) -> None:
    with running_peer(seed=6) as target:
        target.pull(source.process.address, b"", [1], prefix=HASHES[:1])
        source.lend(asked(source).handle, [5, 6])
        target.expect_done("grant")
        source.expect("released")


def test_a_pull_ends_at_its_deadline_and_the_loan_with_it(source: Peer) -> None:
    with running_peer(seed=6) as target:
        target.pull(source.process.address, b"", [1], prefix=HASHES[:1], deadline_s=0.2)
        lend = asked(source)
        done = target.expect("pull_done").pull_done
        assert done.failure_stage in ("deadline", "aborted")
        source.expect("released")
        source.lend(lend.handle, [5])  # too late
        target.pull(source.process.address, lend.handle, [1], pull_id=2)
        target.expect_done("refused")


def test_a_loan_is_withdrawn(source: Peer) -> None:
    with running_peer(seed=6) as target:
        target.pull(source.process.address, b"", [1], prefix=HASHES[:1])
        source.withdraw(asked(source).handle)
        target.expect_done("aborted")
        source.expect("released")
