"""Copies of whole KV blocks between the pool and numbered slots of host memory, as runs of bytes.

Used by the executors, ahead of a step's rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from pdserve.contracts.step import BlockCopy, StepBatch


class Blocks(Protocol):
    """Bytes ``[number, block_bytes]``: an array of numpy, or a tensor on any device."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...

    def __setitem__(self, index: int, block: Any, /) -> None: ...


class BlockCopier:
    """A pool and its host slots."""

    def __init__(self, pool: Blocks, slots: Blocks) -> None:
        """
        Args:
            pool: a view of the pool.
            slots: on the host, which gives memory to what is not initialised only as it is first written.
        """
        self._pool = pool
        self._slots = slots

    def run(self, batch: StepBatch) -> None:
        """Make the batch's copies, in the order that it promises."""
        _copy(batch.swap_outs, self._pool, self._slots)
        _copy(batch.swap_ins, self._slots, self._pool)


def _copy(copies: Iterable[BlockCopy], sources: Blocks, targets: Blocks) -> None:
    for source, target in copies:
        assert 0 <= source < len(sources), f"block or slot {source} of {len(sources)}"
        assert 0 <= target < len(targets), f"block or slot {target} of {len(targets)}"
        targets[target] = sources[source]
