"""Blocks of a pool and of the host, copied as a batch promises. What a GPU does later, a CPU does at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
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


class _FakeCudart:
    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        assert address not in self.pinned
        self.pinned[address] = num_bytes
        return flags

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0


def test_slots_beside_a_gpus_pool_are_pinned_for_as_long_as_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = _FakeCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    errors: list[int] = []
    monkeypatch.setattr(torch.cuda, "check_error", errors.append)
    pool = cast(torch.Tensor, SimpleNamespace(is_cuda=True, shape=(4, 16)))
    slots = swap_slots(2, pool)
    assert list(cudart.pinned.values()) == [2 * 16]
    assert errors == [0]
    del slots
    assert not cudart.pinned
    assert not len(swap_slots(0, pool))
    assert not cudart.pinned
