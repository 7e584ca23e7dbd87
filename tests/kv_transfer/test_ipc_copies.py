"""Copies between the ranks of two workers of any degrees, in one process: what arrives, and where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import product

import pytest
import torch

from pdserve.contracts.kv_layout import KvLayout
from pdserve.kv_transfer.handshake import shard_message
from pdserve.kv_transfer.ipc_copies import IpcCopies
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.kv_transfer.resharding import KvShard
from pdserve.proto.v1 import transfer_pb2

LAYOUT = KvLayout(
    num_blocks=5, num_kv_heads=2, num_layers=4, block_size=4, head_dim=4, dtype="float32", model_hash="model"
)
ONE_RANK = [KvShard(range(2), range(4))]
TWO_RANKS = [KvShard(range(1), range(4)), KvShard(range(1, 2), range(4))]
FOUR_RANKS = [KvShard(range(head, head + 1), range(4)) for head in (0, 0, 1, 1)]
TWO_STAGES = [KvShard(range(2), range(2)), KvShard(range(2), range(2, 4))]
SOURCE_IDS, TARGET_IDS = [4, 0, 3], [1, 2, 0]


@pytest.fixture(name="memory")
def fixture_memory() -> Iterator[PoolMemory]:
    with closing(PoolMemory.create(LAYOUT)) as memory:
        yield memory


def pool_of(layout: KvLayout, shard: KvShard) -> torch.Tensor:
    own = replace(layout, num_kv_heads=len(shard.heads), num_layers=len(shard.layers))
    return torch.randint(256, (own.num_blocks, own.block_bytes), dtype=torch.uint8)


def content(layout: KvLayout, shard: KvShard, pool: torch.Tensor) -> dict[tuple[int, int, int], bytes]:
    """Values and scales of each (block, head, layer), in the places that `pdserve.contracts.kv_layout` names."""
    num_layers, value_bytes = len(shard.layers), 2 * layout.block_size * layout.head_dim
    value_bytes *= 4 if layout.dtype == "float32" else 1
    scale_bytes = layout.head_bytes // layout.num_layers - value_bytes
    found = {}
    for block, (head_index, head), (index, layer) in product(
        range(layout.num_blocks), enumerate(shard.heads), enumerate(shard.layers)
    ):
        head_bytes = pool[block].view(len(shard.heads), -1)[head_index].numpy().tobytes()
        scales = head_bytes[num_layers * value_bytes :]
        values = head_bytes[index * value_bytes : (index + 1) * value_bytes]
        found[block, head, layer] = values + scales[index * scale_bytes : (index + 1) * scale_bytes]
    return found


def order_of(sources: Sequence[IpcCopies], source_ids: Sequence[int] = SOURCE_IDS) -> transfer_pb2.CopyOrder:
    return transfer_pb2.CopyOrder(
        worker_epoch=7,
        rank_pools=[each.pool for each in sources],
        shards=map(shard_message, sources[0].shards),
        source_ids=source_ids,
        target_ids=TARGET_IDS,
    )


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (ONE_RANK, ONE_RANK),
        (TWO_RANKS, ONE_RANK),
        (ONE_RANK, TWO_RANKS),
        (FOUR_RANKS, TWO_RANKS),
        (TWO_STAGES, TWO_RANKS),
        (TWO_RANKS, TWO_STAGES),
    ],
)
def test_each_rank_takes_its_part_of_every_block(
    memory: PoolMemory, dtype: str, source: list[KvShard], target: list[KvShard]
) -> None:
    memory.layout = layout = replace(LAYOUT, dtype=dtype)
    pools = {shard: pool_of(layout, shard) for shard in source}
    sources = [IpcCopies(pools[shard].clone(), memory, source, rank) for rank, shard in enumerate(source)]
    expected = {key: value for shard, pool in pools.items() for key, value in content(layout, shard, pool).items()}
    for rank, shard in enumerate(target):
        pool = pool_of(layout, shard)
        before = content(layout, shard, pool)
        assert not IpcCopies(pool, memory, target, rank).carry_out(order_of(sources))
        moved = dict(zip(TARGET_IDS, SOURCE_IDS, strict=True))
        for (block, head, layer), value in content(layout, shard, pool).items():
            at = block, head, layer
            assert value == (expected[moved[block], head, layer] if block in moved else before[at]), at


def test_pools_of_a_source_stay_open_until_it_is_gone(memory: PoolMemory) -> None:
    own, others = pool_of(LAYOUT, ONE_RANK[0]), pool_of(LAYOUT, ONE_RANK[0])
    source, target = (IpcCopies(pool, memory, ONE_RANK) for pool in (others, own))
    assert not target.carry_out(order_of([source]))
    source.pool.handle = b"/proc/0/fd/0"
    others.fill_(9)
    assert not target.carry_out(order_of([source])), "it is open"
    assert torch.equal(own[TARGET_IDS], others[SOURCE_IDS])
    assert "IndexError" in target.carry_out(order_of([source], [0, 1, LAYOUT.num_blocks]))
    assert not target.carry_out(transfer_pb2.CopyOrder(worker_epoch=7))
    assert "No such file" in target.carry_out(order_of([source]))
