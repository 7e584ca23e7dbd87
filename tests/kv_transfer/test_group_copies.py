"""Both halves of a link in one process, over Gloo."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from pdserve.contracts.kv_layout import KvLayout
from pdserve.kv_transfer import group_copies
from pdserve.kv_transfer.group_copies import GroupCopies
from pdserve.kv_transfer.handshake import shard_message
from pdserve.kv_transfer.resharding import reshard
from pdserve.proto.v1 import transfer_pb2
from tests.kv_transfer.peer import EVENT_GRACE_S
from tests.kv_transfer.test_resharding import NUM_LAYERS, shards
from tests.patience import HANG_S

NUM_BLOCKS, BATCH_SIZE = 12, 2
LAYOUT = KvLayout(
    num_blocks=NUM_BLOCKS, num_kv_heads=2, num_layers=NUM_LAYERS, block_size=4, head_dim=16, dtype="int8",
    model_hash="model",
)  # fmt: skip
Degrees = tuple[int, int]
"""Tensor-parallel ranks, and pipeline stages."""
GENERATIONS = range(100, 100 + NUM_BLOCKS)


Ranks = Sequence[GroupCopies]


@contextmanager
def linked(source: Ranks, target: Ranks) -> Iterator[SimpleQueue[transfer_pb2.LinkEvent]]:
    """Open both halves of a link between the ranks of two workers; yields their events other than keys."""
    events: SimpleQueue[transfer_pb2.LinkEvent] = SimpleQueue()
    are_open = threading.Event()
    groups = [
        transfer_pb2.Group(source_rank=piece.source_rank, target_rank=rank, shard=shard_message(piece.shard))
        for rank, pieces in enumerate(reshard(source[0].shards, target[0].shards))
        for piece in pieces
    ]
    with ExitStack() as stack:
        for worker, peer in ((source, target), (target, source)):

            def send(message: transfer_pb2.EngineToTransfer, peer: Ranks = peer) -> None:
                event = message.link_event
                if event.HasField("key"):
                    assert are_open.wait(HANG_S)
                    order_all(peer, key=event.key)
                else:
                    events.put(event)

            for rank in worker:
                rank.start(send)
                stack.callback(rank.close)
        for worker in (source, target):
            order_all(worker, open=transfer_pb2.OpenLink(is_source=worker is source, groups=groups))
        are_open.set()
        yield events


def order_all(worker: Ranks, **body: Any) -> None:
    for rank in worker:
        rank.handle(transfer_pb2.LinkOrder(**body))


def copy_all(source: Ranks, target: Ranks) -> None:
    """Order a copy of every block, the last to the first block."""
    order_all(source, send=transfer_pb2.GroupSend(block_ids=range(NUM_BLOCKS)))
    order_all(target, fetch=transfer_pb2.GroupFetch(block_ids=reversed(range(NUM_BLOCKS)), generations=GENERATIONS))


def filled_worker(degrees: tuple[int, int], seed: int) -> tuple[list[GroupCopies], list[torch.Tensor]]:
    """Ranks of a worker over a pool of random values and scales, and the pool of each."""
    shape = LAYOUT.shape
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)
    scales = torch.rand(shape[:-1], generator=generator)
    all_shards = shards(degrees, LAYOUT.num_kv_heads)
    pools = []
    for heads, layers in all_shards:
        of_rank = [each[:, heads.start : heads.stop, layers.start : layers.stop] for each in (values, scales)]
        as_bytes = [each.contiguous().view(torch.uint8).view(NUM_BLOCKS, len(heads), -1) for each in of_rank]
        pools.append(torch.cat(as_bytes, dim=2).view(NUM_BLOCKS, -1))
    return [
        GroupCopies(pool, GENERATIONS, LAYOUT, shards=all_shards, rank=rank) for rank, pool in enumerate(pools)
    ], pools


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(group_copies, "BUFFER_BYTES", BATCH_SIZE * LAYOUT.block_bytes)


@pytest.mark.parametrize(
    ("source_degrees", "target_degrees"),
    [
        ((1, 1), (1, 1)),
        ((1, 1), (4, 1)),  # two ranks hold each head
        ((4, 1), (2, 1)),
        ((2, 2), (2, 3)),
        ((4, 3), (1, 2)),
    ],
)
def test_every_rank_gets_its_part_of_every_block(source_degrees: Degrees, target_degrees: Degrees) -> None:
    """In several batches of each group, which take turns in two buffers."""
    source, _ = filled_worker(source_degrees, seed=1)
    target, target_pools = filled_worker(target_degrees, seed=2)
    num_groups = sum(map(len, reshard(source[0].shards, target[0].shards)))
    with linked(source, target) as events:
        for _ in range(2):
            copy_all(source, target)
            for _ in range(num_groups):
                event = events.get(timeout=HANG_S)
                assert list(event.fetched.generations) == list(GENERATIONS), event
    _, expected = filled_worker(target_degrees, seed=1)
    assert all(torch.equal(pool, blocks.flip(0)) for pool, blocks in zip(target_pools, expected, strict=True))


def test_an_engine_with_too_many_links_loses_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_copies, "MAX_HALVES", 0)
    (source, _), (target, _) = filled_worker((1, 1), seed=1), filled_worker((1, 1), seed=2)
    with linked(source, target) as events:
        assert events.get(timeout=HANG_S).lost == "0 links exist"


class GatedPool:
    """A view of a pool whose last block is written only once the gate opens."""

    def __init__(self, pool: torch.Tensor) -> None:
        self._pool = pool
        self.is_reached, self.gate = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def __len__(self) -> int:
        return len(self._pool)

    def __getitem__(self, block_id: int) -> torch.Tensor:
        if block_id == NUM_BLOCKS - 1:
            self.is_reached.set()
            assert self.gate.wait(HANG_S)
        return self._pool[block_id]


def test_a_link_is_closed_once_the_batch_that_is_being_written_has_been(monkeypatch: pytest.MonkeyPatch) -> None:
    source, (from_pool,) = filled_worker((1, 1), seed=1)
    target, (to_pool,) = filled_worker((1, 1), seed=2)
    before = to_pool.clone()
    (pool,) = target[0].part(target[0].shards[0])
    gated: Any = GatedPool(pool)
    monkeypatch.setattr(target[0], "part", lambda shard: [gated])
    with linked(source, target):
        copy_all(source, target)
        assert gated.is_reached.wait(HANG_S)
        closing = threading.Thread(target=target[0].close)
        closing.start()
        closing.join(EVENT_GRACE_S)
        assert closing.is_alive()
        gated.gate.set()
        closing.join(HANG_S)
        time.sleep(EVENT_GRACE_S)
        assert torch.equal(to_pool[-BATCH_SIZE:], from_pool[:BATCH_SIZE].flip(0))
        assert torch.equal(to_pool[:-BATCH_SIZE], before[:-BATCH_SIZE])
