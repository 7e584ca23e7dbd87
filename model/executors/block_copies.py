"""Copies of whole KV blocks between the pool and numbered host slots. The executors run them before a step's rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pdserve.contracts.step import BlockCopy


class BlockCopies(Protocol):
    """A step's copies, all of the first kind before all of the second."""

    @property
    def swap_outs(self) -> Sequence[BlockCopy]: ...

    @property
    def swap_ins(self) -> Sequence[BlockCopy]: ...


def copy_blocks(copies: BlockCopies, pool: Any, slots: Any, copy: Callable[[Any, Any], object]) -> None:
    """Make a step's copies in its order.

    Args:
        pool: blocks of the pool: a numpy array or a tensor of bytes ``[num_blocks, block_bytes]``.
        slots: the host's blocks, likewise.
        copy: receives the target block and the source block.
    """
    for pairs, sources, targets in ((copies.swap_outs, pool, slots), (copies.swap_ins, slots, pool)):
        for source, target in pairs:
            assert 0 <= source < len(sources), f"block or slot {source} of {len(sources)}"
            assert 0 <= target < len(targets), f"block or slot {target} of {len(targets)}"
            copy(targets[target], sources[source])
