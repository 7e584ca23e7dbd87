"""Preempted sequences with KV in host memory, and the numbered host slots that hold it, one KV block each.

A step copies the blocks of a sequence D2H; they can be reused once that step has ended. A later step copies back the
blocks missing from the prefix cache and decodes the sequence in the same step. Slots are freed when the last step
that touches them has ended. Slots whose step failed are never read: every sequence copied by a failed step fails
with it.

Owned by `pdserve.engine.worker.scheduler`, which chooses the sequences to preempt and limits the blocks to allocate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from pdserve.engine.scheduling.sequence import Sequence
from pdserve.engine.scheduling.table import AdmissionBudget, PlannedStep, SequenceTable
from pdserve.model.cost.cost_model import CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapSpace:
    """Host capacity for swapped KV, and when swapping pays off."""

    num_slots: int
    is_cheaper: Callable[[int, int], bool]
    """Whether swapping a sequence's KV out and back takes less time than recomputing it. Arguments: its tokens, and
    how many of them the prefix cache is expected to keep."""


NO_SWAP_SPACE = SwapSpace(num_slots=0, is_cheaper=lambda num_tokens, num_cached: False)
"""No swapping: every preempted sequence is recomputed."""


def swap_space(cost: CostModel, num_slots: int, max_batch_tokens: int) -> SwapSpace:
    """Swap space of ``num_slots`` slots, used if the cost model predicts both copies to be faster than a prefill, in
    chunks of ``max_batch_tokens``."""

    def is_cheaper(num_tokens: int, num_cached: int) -> bool:
        num_lost = num_tokens - num_cached
        prompt_s = cost.prompt_s(num_lost, num_cached, max_batch_tokens)
        return cost.swap_s(num_tokens) + cost.swap_s(num_lost) < prompt_s

    return SwapSpace(num_slots=num_slots, is_cheaper=is_cheaper)


class _Swapped(NamedTuple):
    sequence: Sequence
    slots: list[int]
    """One per block, in order."""
    step_id: int
    """Step that fills them."""


class Swapping:
    """Free list of slots, and the slots of each swapped sequence."""

    def __init__(self, table: SequenceTable, space: SwapSpace) -> None:
        self._table = table
        self._space = space
        self._free = list(range(space.num_slots - 1, -1, -1))
        self._swapped: dict[int, _Swapped] = {}
        self._leaving: defaultdict[int, list[int]] = defaultdict(list)
        """Slots to free, by the last step that touches them."""
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
        """First arrival among the swapped sequences."""
        return self._swapped[min(self._swapped)].sequence if self._swapped else None

    def can_swap_out(self, sequence: Sequence) -> bool:
        """Whether there are slots for all of the sequence's KV and copying is cheaper than recomputing."""
        num_tokens = sequence.num_computed
        blocks = sequence.block_table[: sequence.num_blocks_for(num_tokens)]
        if len(blocks) > len(self._free):
            return False
        return self._space.is_cheaper(num_tokens, self._table.pool.num_leading_shared(blocks) * sequence.block_size)

    def swap_out(self, step: PlannedStep, sequence: Sequence) -> None:
        """Copy the sequence's KV D2H in ``step``, including the KV of steps in flight. The caller then retires its
        blocks.

        The sequence is decoding: all its tokens have KV except the newest, which may be pending.
        """
        assert sequence.num_computed + 1 == len(sequence.tokens) + sequence.num_pending
        num_blocks = sequence.num_blocks_for(sequence.num_computed)
        slots = [self._free.pop() for _ in range(num_blocks)]
        self._swapped[sequence.sequence_id] = _Swapped(sequence, slots, step.batch.step_id)
        step.add_swap_out(sequence, slots)
        self.num_swap_outs += 1

    def resume(self, step: PlannedStep, budget: AdmissionBudget) -> bool:
        """Allocate blocks for the first sequence in line and decode it in ``step``, if it fits ``budget``; returns
        whether it does."""
        sequence, slots, _ = self._swapped[min(self._swapped)]
        num_cacheable = (len(sequence.tokens) - 1) // sequence.block_size
        if not sequence.is_idle or not self._table.start(sequence, budget, num_cacheable):
            return False
        step.add_swap_in(sequence, slots, sequence.num_registered_blocks)
        del self._swapped[sequence.sequence_id]
        self._leave(slots, step.batch.step_id)
        self.num_swap_ins += 1
        return True

    def drop(self, sequence: Sequence) -> None:
        """Forget a swapped sequence. Its slots stay taken until the step that fills them has ended."""
        swapped = self._swapped.pop(sequence.sequence_id, None)
        if swapped is not None:
            self._leave(swapped.slots, swapped.step_id)

    def step_ended(self, step_id: int) -> None:
        """Handle a completed or failed step: forget sequences that ended with it and free slots that it touched
        last."""
        self._last_ended = step_id
        for swapped in [swapped for swapped in self._swapped.values() if swapped.sequence.is_over]:
            self.drop(swapped.sequence)
        for ended in [last_step_id for last_step_id in self._leaving if last_step_id <= step_id]:
            self._free += self._leaving.pop(ended)

    def _leave(self, slots: list[int], step_id: int) -> None:
        if step_id <= self._last_ended:
            self._free += slots
        else:
            self._leaving[step_id] += slots

    def check_integrity(self) -> None:
        """Recount the slots.

        Raises:
            AssertionError: a slot is lost or taken twice.
        """
        taken = [*(swapped.slots for swapped in self._swapped.values()), *self._leaving.values()]
        assert sorted(chain(self._free, *taken)) == list(range(self._space.num_slots)), (
            "each slot is free or taken once"
        )
