"""Copies between a pool and its staging file, with host memory in place of the GPU."""

from __future__ import annotations

import pytest
import torch

from pdserve.contracts.kv_layout import KvLayout
from pdserve.kv_transfer import host_staging
from pdserve.kv_transfer.host_staging import HostStaging
from pdserve.kv_transfer.pool_memory import PoolMemory

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


@pytest.fixture(params=[1, 2, 100], ids=lambda blocks: f"{blocks} staged blocks")
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


def test_a_rank_copies_its_own_heads() -> None:
    memory = PoolMemory.create(LAYOUT)
    pools = [torch.full((LAYOUT.num_blocks, LAYOUT.head_bytes), 10 + rank, dtype=torch.uint8) for rank in range(2)]
    ranks = [HostStaging(pool, memory, range(rank, rank + 1)) for rank, pool in enumerate(pools)]
    for rank, staging in enumerate(ranks):
        staging.copy_d2h([3], [1])
        assert bytes(memory.block(3, rank, rank + 1)) == bytes([10 + rank]) * LAYOUT.head_bytes
        assert not any(memory.block(2, rank, rank + 1))
    assert bytes(memory.block(3, 0, 1)) == bytes([10]) * LAYOUT.head_bytes
    memory.block(5, 1, 2)[:] = bytes([7]) * LAYOUT.head_bytes
    ranks[1].copy_h2d([5])
    assert set(pools[1][5].tolist()) == {7}
    assert set(pools[0].flatten().tolist()) == {10}


def test_a_pool_of_another_layout_cannot_be_staged_here() -> None:
    with pytest.raises(AssertionError, match="for KvLayout"):
        HostStaging(torch.zeros((7, LAYOUT.block_bytes), dtype=torch.uint8), PoolMemory.create(LAYOUT))
