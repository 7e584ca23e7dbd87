"""Copies between a pool and its staging file, with host memory in place of the GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pdserve.contracts.kv_layout import KvLayout
from pdserve.kernels.kv_pool import KvPool
from pdserve.kv_transfer import host_staging
from pdserve.kv_transfer.host_staging import HostStaging
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.kv_transfer.resharding import KvShard

LAYOUT = KvLayout(
    num_blocks=8, num_kv_heads=2, num_layers=3, block_size=4, head_dim=8, dtype="float32", model_hash="model"
)


class Rig:
    """A pool of random bytes and a staging file of zeros."""

    def __init__(self) -> None:
        self.memory = PoolMemory.create(LAYOUT)
        self.pool = torch.randint(1, 256, (LAYOUT.num_blocks, LAYOUT.block_bytes), dtype=torch.uint8)
        self.staging = HostStaging(self.pool, self.memory)

    def staged(self, block: int) -> bytes:
        return bytes(self.memory.block(block, 0, LAYOUT.num_kv_heads))

    def pooled(self, block: int) -> bytes:
        return self.pool[block].numpy().tobytes()


@pytest.fixture(params=[1, 4, 200], ids=lambda blocks: f"{blocks} staged blocks")
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(host_staging, "PINNED_BYTES", request.param * LAYOUT.block_bytes)
    return Rig()


def test_just_the_granted_blocks_come_to_the_host(rig: Rig) -> None:
    rig.staging.copy_d2h([6, 0, 3], [1, 1, 1])
    for block in range(LAYOUT.num_blocks):
        expected = rig.pooled(block) if block in (0, 3, 6) else bytes(LAYOUT.block_bytes)
        assert rig.staged(block) == expected


def test_just_the_pulled_blocks_come_to_the_pool(rig: Rig) -> None:
    before = rig.pool.clone()
    rig.memory.blocks[:] = b"\x00" * LAYOUT.pool_bytes
    rig.staging.copy_h2d([5, 2, 7])
    for block in range(LAYOUT.num_blocks):
        expected = bytes(LAYOUT.block_bytes) if block in (2, 5, 7) else before[block].numpy().tobytes()
        assert rig.pooled(block) == expected


def test_a_block_is_copied_again_once_its_generation_was_raised(rig: Rig) -> None:
    rig.staging.copy_d2h([4, 5], [1, 1])
    first = rig.pooled(4)
    rig.pool[4:6] = 7
    rig.staging.copy_d2h([4, 5, 4], [1, 2, 1])
    assert rig.staged(4) == first
    assert rig.staged(5) == rig.pooled(5)


def test_no_blocks_are_no_copy(rig: Rig) -> None:
    rig.staging.copy_d2h([], [])
    rig.staging.copy_h2d([])
    assert not any(rig.memory.blocks)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_rank_copies_its_own_heads_and_layers(dtype: str, num_stages: int) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    memory = PoolMemory.create(layout)
    whole = KvPool(torch.frombuffer(memory.blocks, dtype=torch.uint8), layout.shape, getattr(torch, dtype))
    shards = [
        KvShard(range(head, head + 1), range(stage * 3 // num_stages, (stage + 1) * 3 // num_stages))
        for stage in range(num_stages)
        for head in range(2)
    ]
    pools = []
    for rank, shard in enumerate(shards):
        own = replace(layout, num_kv_heads=1, num_layers=len(shard.layers))
        pool = KvPool(torch.full((own.pool_bytes,), 10 + rank, dtype=torch.uint8), own.shape, getattr(torch, dtype))
        staging = HostStaging(pool.blocks, memory, shard)
        staging.copy_d2h([3], [1])
        pools.append((pool, staging))
    for (pool, staging), (heads, layers) in zip(pools, shards, strict=True):
        parts = [(pool.values, whole.values[:, heads.start : heads.stop, layers.start : layers.stop])]
        if pool.scales is not None and whole.scales is not None:
            parts.append((pool.scales, whole.scales[:, heads.start : heads.stop, layers.start : layers.stop]))
        for own_part, there in parts:
            assert torch.equal(there[3], own_part[3])
            assert not there[[2, 4]].any()
            there[5] = 7
        staging.copy_h2d([5])
        for own_part, _ in parts:
            assert (own_part[5] == 7).all()
            assert torch.equal(own_part[4], own_part[3])


def test_a_pool_of_another_layout_cannot_be_staged_here() -> None:
    with pytest.raises(AssertionError, match="for KvLayout"):
        HostStaging(torch.zeros((7, LAYOUT.block_bytes), dtype=torch.uint8), PoolMemory.create(LAYOUT))
