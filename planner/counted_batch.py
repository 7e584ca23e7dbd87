"""Sequences that decode together, counted: each is touched when it joins and when it ends, not at every step between.

In a simulation nothing is learnt from a token: what a sequence holds follows from how many steps it has been in. So a
batch counts its steps, keeps the sums that a scheduler asks for, and writes tokens, lengths and blocks to a sequence
only when that one is over, or when somebody wants to go on without the batch (`CountedBatch.settle`).

Used by `pdserve.planner.counted_scheduler`, which keeps the order of arrival. Steps are numbered from 1; a step is
*planned*, *in flight*, then *completed*. A sequence with an answer of known length has its last token in a step that is
known when it joins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from heapq import heappop, heappush
from operator import attrgetter
from typing import NamedTuple

from pdserve.engine.sequence import Sequence
from pdserve.kv_transfer.block_pool import BlockPool
from pdserve.planner.expected_blocks import ExpectedBlocks

ARRIVAL = attrgetter("sequence_id")


class CountedStep(NamedTuple):
    """A planned step's decoding."""

    step_id: int
    number: int
    size: int
    """Sequences that decode in it."""
    num_context_tokens: int
    """Cached tokens of all of them, before the step."""
    beginning: list[Sequence]
    """Those of them that were in no step before."""
    ending: list[Sequence]
    """Those of them that get their last token."""


class CountedBatch:
    """What a batch of sequences holds, in sums that cost the same for a batch of any size."""

    def __init__(self, pool: BlockPool, sequences: Iterable[Sequence]) -> None:
        """
        Args:
            sequences: those that decode by now; none is in flight.
        """
        self.size = 0
        """Sequences that have a token left to plan."""
        self._pool = pool
        self._block_size = pool.block_size
        self._num_planned = 0
        """Steps so far."""
        self._in_flight: deque[CountedStep] = deque()
        self._num_context_tokens = 0
        """Computed tokens of the sequences that have a token left to plan."""
        self._last_steps: dict[Sequence, int] = {}
        """Of those sequences: the step in which each gets its last token."""
        self._ends: list[tuple[int, int, Sequence]] = []
        """A heap of (last step, sequence id, sequence)."""
        self._beginning: list[Sequence] = []
        self._planned_out: list[Sequence] = []
        """Sequences that joined with their last token planned already."""
        self._blocks: list[int] = []
        """Allocated for the batch, and not in any sequence's table yet."""
        self._growing = [0] * (2 * self._block_size)
        """By the remainder of a step's number: sequences that need one more block in it. Twice in a row, so that any
        stretch of steps shorter than a block is one slice."""
        self._growth_starts: list[int] = []
        """A heap of steps: each the first in which some sequence, not among those yet, needs one more block."""
        self._num_held_blocks = 0
        """Of the sequences that have a token left to plan."""
        self._expected_blocks = ExpectedBlocks(self._block_size)
        """The same, that they are expected to need before they end."""
        for sequence in sequences:
            self.add(sequence)
        self._beginning.clear()

    # Sequences

    def add(self, sequence: Sequence) -> None:
        """A sequence decodes from the next step on that is planned."""
        num_left = sequence.max_length - len(sequence.tokens) - sequence.num_pending
        if not num_left:
            self._planned_out.append(sequence)
            return
        last_step = self._num_planned + num_left
        self.size += 1
        self._num_context_tokens += sequence.num_computed
        self._last_steps[sequence] = last_step
        heappush(self._ends, (last_step, sequence.sequence_id, sequence))
        self._beginning.append(sequence)
        num_held = len(sequence.block_table)
        self._num_held_blocks += num_held
        if self._will_grow(sequence):
            num_writable = num_held * self._block_size - sequence.num_computed
            heappush(self._growth_starts, self._num_planned + num_writable + 1)
        self._expected_blocks.add(sequence, last_step)

    def _will_grow(self, sequence: Sequence) -> bool:
        """Whether it needs more blocks than it had when it joined."""
        return len(sequence.block_table) * self._block_size < sequence.num_kv_tokens_max

    # Steps

    @property
    def _num_completed(self) -> int:
        return self._in_flight[0].number - 1 if self._in_flight else self._num_planned

    @property
    def num_steps_to_first_end(self) -> int:
        """Steps until one of the sequences has its last token."""
        return self._ends[0][0] - self._num_planned

    def num_blocks_for(self, num_steps: int) -> int:
        """Blocks that so many further steps need, `num_steps_to_first_end` at most."""
        last = self._num_planned + num_steps
        num_blocks = self._num_growing(num_steps)
        return num_blocks + sum([self._num_grown(first, last) for first in self._growth_starts if first <= last])

    def _num_growing(self, num_steps: int) -> int:
        """Blocks that sequences need in so many further steps that needed some in earlier ones."""
        block_size = self._block_size
        num_whole, num_rest = divmod(num_steps, block_size)
        first = (self._num_planned + 1) % block_size
        num_blocks = sum(self._growing[first : first + num_rest])
        return num_blocks + num_whole * sum(self._growing[:block_size]) if num_whole else num_blocks

    def _num_grown(self, first: int, last: int) -> int:
        """Blocks that a sequence needs up to step ``last``, if it needs one in step ``first``."""
        return 1 + (last - first) // self._block_size

    def advance(self, num_steps: int) -> list[Sequence]:
        """Plan and complete so many steps, `num_steps_to_first_end` at most, for which there must be blocks. Returns
        the sequences that have their last token, settled, in order of arrival."""
        assert not self._in_flight, "a batch in flight cannot run ahead"
        ending = self._move(num_steps)
        self._beginning.clear()
        for sequence in ending:
            self._settle(sequence, self._num_planned)
        return ending

    def plan(self, step_id: int) -> CountedStep:
        """Plan the next step, for which there must be blocks."""
        num_context_tokens, size = self._num_context_tokens, self.size
        beginning, self._beginning = self._beginning, []
        ending = self._move(1)
        step = CountedStep(step_id, self._num_planned, size, num_context_tokens, beginning, ending)
        self._in_flight.append(step)
        return step

    def forget(self, step_id: int) -> None:
        """The step planned last was empty, and nobody submits it."""
        if self._in_flight and self._in_flight[-1].step_id == step_id:
            self._in_flight.pop()

    def complete(self, step_id: int) -> CountedStep | None:
        """The oldest step in flight ended. Returns it, its ending sequences settled; ``None`` if that was not one of
        this batch."""
        if not self._in_flight or self._in_flight[0].step_id != step_id:
            return None
        step = self._in_flight.popleft()
        for sequence in step.ending:
            self._settle(sequence, step.number)
        return step

    def _move(self, num_steps: int) -> list[Sequence]:
        """Plan so many steps, and part with the sequences that need no more, in order of arrival."""
        num_blocks = self._num_growing(num_steps)
        self._num_planned += num_steps
        last, starts = self._num_planned, self._growth_starts
        while starts and starts[0] <= last:
            first = heappop(starts)
            num_blocks += self._num_grown(first, last)
            self._count_growing(first, 1)
        if num_blocks:
            self._blocks += self._pool.allocate(num_blocks)
            self._num_held_blocks += num_blocks
        self._num_context_tokens += num_steps * self.size
        ends, ending = self._ends, []
        while ends and ends[0][0] == last:
            ending.append(heappop(ends)[2])
        for sequence in ending:
            self._part(sequence)
        return ending

    def _count_growing(self, step: int, num: int) -> None:
        remainder = step % self._block_size
        self._growing[remainder] += num
        self._growing[remainder + self._block_size] += num

    def _part(self, sequence: Sequence) -> None:
        """The sequence's last token is planned."""
        last_step, num_kv_tokens = self._last_steps.pop(sequence), sequence.num_kv_tokens_max
        self.size -= 1
        self._num_context_tokens -= num_kv_tokens
        self._num_held_blocks -= sequence.num_blocks_for(num_kv_tokens)
        self._expected_blocks.remove(sequence)
        if self._will_grow(sequence):
            self._count_growing(last_step + 1 - num_kv_tokens, -1)

    # Sums

    @property
    def num_context_tokens(self) -> int:
        """Computed tokens of all sequences that are not over."""
        num_tokens = self._num_context_tokens
        for step in self._in_flight:
            num_tokens += sum([sequence.num_kv_tokens_max for sequence in step.ending])
        if self._planned_out:
            self._planned_out = [sequence for sequence in self._planned_out if not sequence.is_over]
            num_tokens += sum([sequence.num_computed for sequence in self._planned_out])
        return num_tokens

    def num_blocks_missing(self) -> int:
        """As `pdserve.engine.sequence.sum_blocks_missing` says of the same sequences."""
        return self._expected_blocks.total(self._num_completed) - self._num_held_blocks

    # Sequences, one by one

    def _num_ahead(self, sequence: Sequence, last_step: int) -> int:
        """Tokens that the completed steps gave the sequence and that it was not told of."""
        num_known = sequence.max_length - max(0, last_step - self._num_completed)
        return max(0, num_known - len(sequence.tokens) - sequence.num_pending)

    def _settle(self, sequence: Sequence, last_step: int) -> None:
        """Tell a sequence of its tokens in the completed steps, and of its blocks for the planned ones."""
        num_tokens = self._num_ahead(sequence, last_step)
        if num_tokens:
            sequence.tokens += [0] * num_tokens
            sequence.num_computed += num_tokens
            sequence.num_written = sequence.num_computed
        num_kv_tokens = sequence.num_kv_tokens_max - max(0, last_step - self._num_planned)
        num_blocks = sequence.num_blocks_for(num_kv_tokens) - len(sequence.block_table)
        if num_blocks > 0:
            first = len(self._blocks) - num_blocks
            sequence.block_table += self._blocks[first:]
            del self._blocks[first:]

    def settle(self) -> dict[int, list[Sequence]]:
        """Tell all sequences, and end the batch. Returns the sequences of each step in flight, in order of arrival: a
        row of each belongs to the step, and they were not told of it."""
        for sequence, last_step in self._last_steps.items():
            self._settle(sequence, last_step)
        members = set(self._last_steps).difference(self._beginning)
        in_steps = {}
        for step in reversed(self._in_flight):
            for sequence in step.ending:
                self._settle(sequence, step.number)
            members.update(step.ending)
            in_steps[step.step_id] = sorted(members, key=ARRIVAL)
            members.difference_update(step.beginning)
        assert not self._blocks, f"{len(self._blocks)} blocks of the batch belong to nobody"
        return in_steps
