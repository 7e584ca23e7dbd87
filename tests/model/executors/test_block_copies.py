"""Copies of KV blocks to and from the host."""

from __future__ import annotations

import numpy as np
import pytest

from pdserve.contracts.step import BlockCopy, StepBatch
from pdserve.model.executors.block_copies import copy_blocks


def a_pool() -> np.ndarray:
    """Block n is full of n."""
    return np.repeat(np.arange(4, dtype=np.uint8)[:, None], 16, axis=1)


def slots(number: int) -> np.ndarray:
    return np.empty((number, 16), np.uint8)


def test_copies_happen_in_the_order_that_a_batch_promises() -> None:
    pool = a_pool()
    batch = StepBatch(step_id=0, rows=[])
    batch.swap_outs = [BlockCopy(1, 0), BlockCopy(2, 1)]
    batch.swap_ins = [BlockCopy(1, 1), BlockCopy(0, 3)]
    copy_blocks(batch, pool, slots(2), np.copyto)
    assert pool.tolist() == [[0] * 16, [2] * 16, [2] * 16, [1] * 16]


def test_slots_keep_what_they_hold_from_step_to_step() -> None:
    pool = a_pool()
    host = slots(1)
    copy_blocks(StepBatch(step_id=0, rows=[], swap_outs=[BlockCopy(3, 0)]), pool, host, np.copyto)
    pool[:] = 9
    copy_blocks(StepBatch(step_id=1, rows=[], swap_ins=[BlockCopy(0, 2)]), pool, host, np.copyto)
    assert pool[:, 0].tolist() == [9, 9, 3, 9]


@pytest.mark.parametrize("copy", [BlockCopy(4, 0), BlockCopy(-1, 0), BlockCopy(0, 1), BlockCopy(0, -1)])
def test_what_does_not_exist_is_not_copied(copy: BlockCopy) -> None:
    with pytest.raises(AssertionError, match="block or slot"):
        copy_blocks(StepBatch(step_id=0, rows=[], swap_outs=[copy]), a_pool(), slots(1), np.copyto)
