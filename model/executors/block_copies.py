"""Copies of whole KV blocks between the pool and numbered host slots. The executors run them before a step's rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve.contracts.step import StepBatch


def copy_blocks(batch: StepBatch, pool: Any, slots: Any, copy: Callable[[Any, Any], object]) -> None:
    """Make the batch's copies in its order.

    Args:
        pool: blocks of the pool: a numpy array or a tensor of bytes ``[num_blocks, block_bytes]``.
        slots: the host's blocks, likewise.
        copy: receives the target block and the source block.
    """
    for copies, sources, targets in ((batch.swap_outs, pool, slots), (batch.swap_ins, slots, pool)):
        for source, target in copies:
            assert 0 <= source < len(sources), f"block or slot {source} of {len(sources)}"
            assert 0 <= target < len(targets), f"block or slot {target} of {len(targets)}"
            copy(targets[target], sources[source])
