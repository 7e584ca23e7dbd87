"""Blocks of a pool and of the host, copied as a batch promises. What a GPU does later, a CPU does at once."""

from __future__ import annotations

import torch

from pdserve.contracts.step import BlockCopy, StepBatch
from pdserve.model.block_copies import BlockCopier
from pdserve.model.device_blocks import DeviceBlocks, swap_slots


def test_blocks_go_to_slots_and_back() -> None:
    pool = torch.arange(4, dtype=torch.uint8)[:, None].repeat(1, 16)
    copier = BlockCopier(DeviceBlocks(pool), swap_slots(2, pool))
    batch = StepBatch(step_id=0, rows=[])
    batch.swap_outs = [BlockCopy(1, 0), BlockCopy(2, 1)]
    batch.swap_ins = [BlockCopy(1, 1), BlockCopy(0, 3)]
    batch.block_copies = [BlockCopy(3, 0)]
    copier.run(batch)
    assert pool.tolist() == [[1] * 16, [2] * 16, [2] * 16, [1] * 16]


def test_there_may_be_no_slots() -> None:
    assert len(swap_slots(0, torch.zeros((4, 16), dtype=torch.uint8))) == 0
