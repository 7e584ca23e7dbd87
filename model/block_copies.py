"""Copies of whole KV blocks: within the pool, and between the pool and numbered slots of host memory.

Used by the executors, ahead of a step's rows. A block is a run of bytes here; what they mean is not known.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from pdserve.contracts.step import BlockCopy, StepBatch


class BlockCopier:
    """A pool in memory that the CPU reaches, and the host slots beside it."""

    def __init__(self, pool: npt.NDArray[np.uint8], num_slots: int) -> None:
        """
        Args:
            pool: ``[num_blocks, block_bytes]``, a view of the pool.
            num_slots: host slots of a block each. The host gives their memory only as they are first written.
        """
        self._pool = pool
        self._slots = np.empty((num_slots, pool.shape[1]), np.uint8)

    def run(self, batch: StepBatch) -> None:
        """Make the batch's copies, in the order that it promises."""
        _copy(batch.swap_outs, self._pool, self._slots)
        _copy(batch.swap_ins, self._slots, self._pool)
        _copy(batch.block_copies, self._pool, self._pool)


def _copy(copies: Iterable[BlockCopy], sources: npt.NDArray[np.uint8], targets: npt.NDArray[np.uint8]) -> None:
    for source, target in copies:
        assert 0 <= source < len(sources), f"block or slot {source} of {len(sources)}"
        assert 0 <= target < len(targets), f"block or slot {target} of {len(targets)}"
        targets[target] = sources[source]
