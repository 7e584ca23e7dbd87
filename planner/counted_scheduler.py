"""The decode scheduler of a simulated worker: the real one, but for decode rows, which it counts and does not build.

Every decision is `DecodeScheduler`'s: who is admitted, reserved, preempted, and what is prefilled beside the decoding.
But what each running sequence does from step to step is left to a `CountedBatch`. Where that cannot be, the scheduler
plans rows as on a live worker, until again nothing but decoding goes on: when a running sequence ends before its time,
and when blocks run short, so that somebody must be preempted.

A pool that caches content hears of an answer's blocks when the answer or the counting ends, not as each is full: nobody
else's prompt goes on with an answer that is not over. Only requests whose whole prompts are equal see it: their answers
are equal, too, and where blocks are scarce another one's may be kept than on a live worker.

Driven by `pdserve.planner.simulated_worker`. Every token of an answer is 0; of the tokens the events tell the first one
of a sequence here, and the last one. Requests have one choice, and no step fails.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from pdserve.contracts.request import FinishReason
from pdserve.contracts.step import StepBatch, StepOutput
from pdserve.decode_worker.scheduler import DecodeScheduler
from pdserve.engine.scheduler import PullResult, TokenEvent
from pdserve.engine.sequence import Sequence
from pdserve.engine.sequence_table import PlannedStep
from pdserve.planner.counted_batch import ARRIVAL, CountedBatch


class QuietSteps(NamedTuple):
    """Decode steps of an unchanging batch: until an answer ends, that step included, or while work waits just one."""

    num_steps: int
    """0: what comes next is not decoding alone, or needs blocks that are not there; only `Scheduler.plan` knows."""
    batch_size: int
    num_context_tokens: int
    """Cached tokens of the whole batch before the first of the steps; each step adds ``batch_size``."""


NO_QUIET_STEPS = QuietSteps(0, 0, 0)


class CountedRows(NamedTuple):
    """Decode rows of a step that were not built."""

    num_rows: int
    num_context_tokens: int


NO_COUNTED_ROWS = CountedRows(0, 0)


class CountedDecodeScheduler(DecodeScheduler):
    """A `DecodeScheduler` for simulations. Where `_batch` is not ``None`` it counts, of all that is running."""

    _batch: CountedBatch | None = None
    counted_rows: CountedRows = NO_COUNTED_ROWS
    """Of the step planned last."""
    _is_refused: bool = False
    """The first reservation in line lacked blocks or a place, and nobody gave any back since: sequences that decode on
    leave no more to others than before."""

    # Quiet steps

    def is_decoding_only(self) -> bool:
        """Whether nothing but decoding goes on, so that `quiet_steps` is worth asking once no step is in flight."""
        return self._prefill.is_idle and not self._swapping.num_waiting

    def quiet_steps(self, now_s: float) -> QuietSteps:
        """Expire and reserve as `plan` does, and say how many decode steps may be counted instead of planned."""
        if self._table.steps_in_flight or not self.is_decoding_only():
            return NO_QUIET_STEPS
        self._expire(now_s)
        if self._batch is None:
            self._batch = CountedBatch(self._pool, self._running)
        if self._reservations.num_waiting and not self._is_refused:
            self._plan_new_work(self._table.begin_step(), now_s)  # no prompt waits: it reserves, and adds no row
            self._is_refused = self._reservations.num_waiting > 0
        batch = self._batch
        if not batch.size:
            return NO_QUIET_STEPS
        num_steps = 1 if self._reservations.num_waiting else batch.num_steps_to_first_end
        if not self._has_blocks_for(batch, num_steps):
            num_steps = bisect_left(range(1, num_steps + 1), True, key=lambda n: not self._has_blocks_for(batch, n))
        return QuietSteps(num_steps, batch.size, batch.num_context_tokens)

    def _has_blocks_for(self, batch: CountedBatch, num_steps: int) -> bool:
        """Whether the running sequences can take so many decode steps without anybody's blocks."""
        block_size = self._pool.block_size
        most = (num_steps + block_size - 1) // block_size * batch.size
        return self._pool.can_allocate(most) or self._pool.can_allocate(batch.num_blocks_for(num_steps))

    def advance(self, num_steps: int) -> None:
        """Account for so many decode steps at once, as many as `quiet_steps` said at most."""
        if num_steps:
            assert self._batch is not None, "nobody asked for quiet steps"
            for sequence in self._batch.advance(num_steps):
                self._finish(sequence)

    # Steps that are planned

    def plan(self, now_s: float) -> StepBatch | None:
        self.counted_rows = NO_COUNTED_ROWS
        self._is_refused = False
        planned = super().plan(now_s)
        if planned is None and self._batch is not None:
            self._batch.forget(self._table.next_step_id)
        return planned

    def _plan_decode(self, step: PlannedStep) -> None:
        batch = self._batch
        if batch is None or not self._has_blocks_for(batch, 1):
            self._stop_counting()
            super()._plan_decode(step)
            return
        counted = batch.plan(step.batch.step_id)
        step.num_counted_rows = counted.size
        self.counted_rows = CountedRows(counted.size, counted.num_context_tokens)

    def complete(self, output: StepOutput, now_s: float) -> None:
        step = self._batch.complete(output.step_id) if self._batch is not None else None
        if step is not None:
            ending = set(step.ending)
            for sequence in sorted(ending.union(step.beginning), key=ARRIVAL):
                if sequence in ending:
                    self._finish(sequence)
                else:
                    self._tell(sequence, sequence.num_answered, FinishReason.NONE)
        super().complete(output, now_s)

    def _finish(self, sequence: Sequence) -> None:
        """The sequence has its last token."""
        self._is_refused = False
        self._table.register_written(sequence)
        self._tell(sequence, sequence.num_answered - 1, FinishReason.LENGTH)
        self._remove_running(sequence)
        self._table.close(sequence)

    def _tell(self, sequence: Sequence, index: int, finish: FinishReason) -> None:
        self._table.events.append(TokenEvent(sequence.key, sequence.request.choice, index, 0, None, finish))

    def _stop_counting(self) -> None:
        """Let every sequence know where it is, and build the rows of the steps in flight, before those of prompts."""
        batch, self._batch = self._batch, None
        if batch is None:
            return
        in_steps = batch.settle()
        for sequence in self._running:
            self._table.register_written(sequence)
        for step in self._table.steps_in_flight:
            others, rows = step.sequences, step.batch.rows
            step.sequences, step.batch.rows, step.num_counted_rows = [], [], 0
            for sequence in in_steps.get(step.batch.step_id, ()):
                step.add_decode(sequence)
            for sequence in others:
                sequence.last_row += len(step.sequences)
            step.sequences += others
            step.batch.rows += rows

    # What gives blocks back

    def pull_done(self, result: PullResult, now_s: float) -> None:
        self._is_refused = False
        super().pull_done(result, now_s)

    def released(self, handle: bytes, now_s: float) -> None:
        self._is_refused = False
        super().released(handle, now_s)

    # What the batch knows

    def _join(self, sequence: Sequence) -> None:
        super()._join(sequence)
        if self._batch is not None:
            self._batch.add(sequence)

    def _close(self, sequence: Sequence) -> None:
        self._is_refused = False
        self._stop_counting()
        super()._close(sequence)

    def _num_running_blocks_missing(self) -> int:
        return super()._num_running_blocks_missing() if self._batch is None else self._batch.num_blocks_missing()

    def _num_running_context_tokens(self) -> int:
        return super()._num_running_context_tokens() if self._batch is None else self._batch.num_context_tokens
