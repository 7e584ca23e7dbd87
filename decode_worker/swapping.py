"""Preempted sequences whose KV waits in host memory, and the numbered host slots that hold it: a KV block each.

A step copies the blocks of a sequence out, and they can be reused when that step has ended. A later step copies back
what the prefix cache lacks by then, and decoding goes on in the same step. Slots are free again when the last step that
touches them has ended. Slots whose step failed are never read: whatever a failed step copied fails with it.

Owned by `pdserve.decode_worker.scheduler`, which chooses the sequences to preempt and limits the blocks to take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from pdserve.engine.scheduling.sequence import Sequence
from pdserve.engine.scheduling.table import PlannedStep, SequenceTable
from pdserve.model.cost.cost_model import CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapSpace:
    """Capacity of the host for swapped KV, and when swapping pays."""

    num_slots: int
    is_cheaper: Callable[[int, int], bool]
    """Whether copying a sequence's KV to the host and back takes less time than computing it again, by (its tokens, how
    many of them the prefix cache is expected to keep)."""


NO_SWAP_SPACE = SwapSpace(num_slots=0, is_cheaper=lambda num_tokens, num_cached: False)
"""Every preempted sequence is recomputed."""


def swap_space(cost: CostModel, num_slots: int) -> SwapSpace:
    """``num_slots`` slots, used where the cost model predicts less time for both copies than for a prefill."""

    def is_cheaper(num_tokens: int, num_cached: int) -> bool:
        num_lost = num_tokens - num_cached
        return cost.swap_s(num_tokens) + cost.swap_s(num_lost) < cost.prefill_s(num_lost, num_cached)

    return SwapSpace(num_slots=num_slots, is_cheaper=is_cheaper)


class _Swapped(NamedTuple):
    sequence: Sequence
    slots: list[int]
    """One for each of its blocks, in order."""
    step_id: int
    """The step that fills them."""


class _Leaving(NamedTuple):
    slots: list[int]
    step_id: int
    """The last step that touches them."""


class Swapping:
    """A free list of slots, and the slots of each swapped sequence."""

    def __init__(self, table: SequenceTable, space: SwapSpace) -> None:
        self._table = table
        self._space = space
        self._free = list(range(space.num_slots - 1, -1, -1))
        self._swapped: dict[int, _Swapped] = {}
        self._leaving: list[_Leaving] = []
        self._last_ended = -1
        self.num_swap_outs = 0
        self.num_swap_ins = 0

    @property
    def num_waiting(self) -> int:
        return len(self._swapped)

    @property
    def num_slots_used(self) -> int:
        return self._space.num_slots - len(self._free)

    def first_waiting(self) -> Sequence | None:
        """The first arrival of those whose KV is here."""
        return self._swapped[min(self._swapped)].sequence if self._swapped else None

    def can_swap_out(self, sequence: Sequence) -> bool:
        """Whether there are slots for all of its KV, and copying it is cheaper than computing it again."""
        num_tokens = sequence.num_computed
        blocks = sequence.block_table[: sequence.num_blocks_for(num_tokens)]
        if len(blocks) > len(self._free):
            return False
        return self._space.is_cheaper(num_tokens, self._table.pool.num_leading_shared(blocks) * sequence.block_size)

    def swap_out(self, step: PlannedStep, sequence: Sequence) -> None:
        """Copy the sequence's KV out with ``step``, that of the steps in flight included; its blocks are to be retired.

        The sequence decodes: all its tokens have KV but the newest one, which may be pending.
        """
        assert sequence.num_computed + 1 == len(sequence.tokens) + sequence.num_pending
        num_blocks = sequence.num_blocks_for(sequence.num_computed)
        slots = [self._free.pop() for _ in range(num_blocks)]
        self._swapped[sequence.sequence_id] = _Swapped(sequence, slots, step.batch.step_id)
        step.add_swap_out(sequence, slots)
        self.num_swap_outs += 1

    def resume(self, step: PlannedStep, *, spare_blocks: int) -> int | None:
        """Take blocks for the first in line and let it decode in ``step``, if the blocks that it is expected to need
        before it ends are no more than ``spare_blocks``. Returns how many of those it takes; ``None`` if it waits on.
        """
        sequence, slots, _ = self._swapped[min(self._swapped)]
        if not sequence.is_idle:
            return None
        pool = self._table.pool
        cached = pool.match_prefix(sequence.block_hashes((len(sequence.tokens) - 1) // sequence.block_size))
        num_taken = sequence.num_blocks_expected() - len(cached) + pool.num_unreferenced(cached)
        if num_taken > spare_blocks:
            return None
        pool.share(cached)
        sequence.start_at(cached, pool.allocate(sequence.num_blocks_with_headroom() - len(cached)))
        step.add_swap_in(sequence, slots, len(cached))
        del self._swapped[sequence.sequence_id]
        self._leave(slots, step.batch.step_id)
        self.num_swap_ins += 1
        return num_taken

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence, if it is here. Its slots stay taken until the step that fills them has ended."""
        swapped = self._swapped.pop(sequence.sequence_id, None)
        if swapped is not None:
            self._leave(swapped.slots, swapped.step_id)

    def step_ended(self, step_id: int) -> None:
        """The step was completed or failed: forget the sequences that ended with it, free the slots it was the last to
        touch."""
        self._last_ended = step_id
        for swapped in [swapped for swapped in self._swapped.values() if swapped.sequence.is_over]:
            self.drop(swapped.sequence)
        leaving, self._leaving = self._leaving, []
        for slots, last_step_id in leaving:
            self._leave(slots, last_step_id)

    def _leave(self, slots: list[int], step_id: int) -> None:
        if step_id <= self._last_ended:
            self._free += slots
        else:
            self._leaving.append(_Leaving(slots, step_id))

    def check_integrity(self) -> None:
        """Recount the slots.

        Raises:
            AssertionError: one is lost or taken twice.
        """
        taken = [*(swapped.slots for swapped in self._swapped.values()), *(leaving.slots for leaving in self._leaving)]
        assert sorted(chain(self._free, *taken)) == list(range(self._space.num_slots)), (
            "each slot is free or taken once"
        )
