"""Fast-forward of a scheduler over decode steps that change only lengths, where answers end as soon as they may.

A *turn* plans a step and completes the oldest one in flight: with an executor of pipeline depth 1 the step just
planned, with depth 2 the previous one. `fast_forward` leaves sequences, blocks and the step in flight as that many
turns would, in one pass over the batch, except that the step in flight keeps its id. Every token is 0 up to the one at
`Sequence.least_length`, which ends the answer. If that is a stop token, the step in flight has a row of the sequence
that is not needed any more.

Used by `pdserve.planner.simulate.simulated_worker`.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import Counter
from typing import NamedTuple

from pdserve.contracts.events import TokenEvent
from pdserve.contracts.request import FinishReason
from pdserve.contracts.step import SampledToken, StepBatch, StepRow
from pdserve.engine.scheduling.sequence import Sequence
from pdserve.engine.scheduling.table import PlannedStep, SequenceTable
from pdserve.engine.worker.scheduler import Scheduler
from pdserve.kv_transfer.block_pool import BlockPool


class SteadySteps(NamedTuple):
    """Turns in which the same sequences decode, up to the first that yields a sequence's first or last token."""

    num_steps: int
    """0 if only `Scheduler.plan` can decide the next step."""
    batch_size: int
    """Rows of each planned step except the last, which lacks sequences that reach their limit."""
    num_context_tokens: int
    """Cached tokens of all rows of the first planned step. Each step adds ``batch_size``."""


NO_STEADY_STEPS = SteadySteps(0, 0, 0)


class SecondToken(NamedTuple):
    """Token 1 of an answer, whose emission ends the handoff stall."""

    turn: int
    """Turn that completes it, counted from 1."""
    event: TokenEvent


class Forwarded(NamedTuple):
    """Outcome of turns taken at once."""

    in_flight: StepBatch | None
    """Step in flight after them, if one was before; without rows if the last turn planned none."""
    num_unneeded: int
    """Its rows of sequences that are over."""
    num_context_tokens: int
    """Cached tokens of all its rows."""
    second_tokens: list[SecondToken]
    """They are not events."""


def steady_steps(scheduler: Scheduler, now_s: float) -> SteadySteps:
    """Expire and reserve as `Scheduler.plan` does, and count the steps that `fast_forward` may take instead of `plan`
    and `complete`, as long as nothing arrives and no deadline passes."""
    scheduler.expire(now_s)
    table = scheduler.table
    if not scheduler.prompts.is_idle or scheduler.swapping.num_waiting or table.must_drain:
        return NO_STEADY_STEPS
    counted = _count_steady_steps(table, scheduler.running)
    steady = _limit_to_blocks(counted, table.pool, scheduler.running)
    if not steady.num_steps or not scheduler.reservations.num_waiting:
        return steady
    scheduler.plan_new_work(table.begin_step(), now_s)  # no prompt waits: this reserves and adds no row
    # A refused reservation stays refused: running sequences leave ever fewer blocks to others.
    return _limit_to_blocks(counted, table.pool, scheduler.running)


class Growth:
    """What steps of a steady run add to its sequences."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._block_size = block_size = scheduler.table.pool.block_size
        of_all = [(len(s.block_table) * block_size - s.num_computed, _num_rows(s)) for s in scheduler.running]
        self._fewest_rows = min([rows for _, rows in of_all])
        self._all = Counter([free for free, _ in of_all])
        """Sequences by the tokens that fit the blocks they hold, beyond those computed."""
        self._shortest = Counter([free for free, rows in of_all if rows == self._fewest_rows])
        """Those that reach their limit first."""

    def after(self, num_steps: int) -> tuple[int, int]:
        """Context tokens and blocks that are added once so many steps are planned."""
        num_tokens, num_blocks = num_steps * self._all.total(), self._num_blocks(self._all, num_steps)
        if num_steps > self._fewest_rows:
            num_tokens -= (num_steps - self._fewest_rows) * self._shortest.total()
            num_blocks -= self._num_blocks(self._shortest, num_steps)
            num_blocks += self._num_blocks(self._shortest, self._fewest_rows)
        return num_tokens, num_blocks

    def _num_blocks(self, sequences: Counter[int], num_rows: int) -> int:
        items = sequences.items()
        return sum([count * -(-(num_rows - free) // self._block_size) for free, count in items if num_rows > free])


def _count_steady_steps(table: SequenceTable, running: list[Sequence]) -> SteadySteps:
    """Steady steps of ``running`` from here on, if blocks suffice. None if the step in flight has rows of other
    sequences; one if those are over, because its end frees their blocks."""
    if not running:
        return NO_STEADY_STEPS
    num_in_flight = len(table.steps_in_flight)
    num_steps = running[0].least_length
    num_context_tokens = num_pending = 0
    for sequence in running:
        num_context_tokens += sequence.num_computed
        num_known = len(sequence.tokens)
        num_to_last = num_in_flight + sequence.least_length - num_known
        if sequence.num_pending:
            num_pending += 1
            num_to_last -= 1
        if num_to_last < num_steps:
            num_steps = num_to_last
        if num_known == sequence.num_prompt_tokens:
            num_steps = min(num_steps, num_in_flight - sequence.num_pending + 1)
    leaving = _leaving(table)
    num_rows = sum([step.num_rows + len(step.swapped_out) for step in table.steps_in_flight])
    if num_pending + len(leaving) != num_rows:
        return NO_STEADY_STEPS
    if leaving:
        num_steps = min(num_steps, 1)
    return SteadySteps(num_steps, len(running), num_context_tokens)


def _limit_to_blocks(steady: SteadySteps, pool: BlockPool, running: list[Sequence]) -> SteadySteps:
    """The first of ``steady`` steps, for which the available blocks suffice."""
    if not steady.num_steps:
        return steady
    num_steps = _num_steps_with_blocks(pool, running, steady.num_steps)
    return steady._replace(num_steps=num_steps) if num_steps < steady.num_steps else steady


def _leaving(table: SequenceTable) -> list[Sequence]:
    """Sequences that are over and have rows in the step in flight."""
    if not table.num_retiring:
        return []
    return [sequence for step in table.steps_in_flight for sequence in step.sequences if sequence.is_over]


def _num_steps_with_blocks(pool: BlockPool, running: list[Sequence], num_steps: int) -> int:
    """Steps with enough blocks: exact up to ``num_steps``, or a cheap lower bound if blocks are plentiful."""
    num_blocks_each = pool.num_available // len(running)
    if num_blocks_each > 1:
        return num_blocks_each * pool.block_size - 1
    lacks_blocks = lambda n: not pool.can_allocate(_num_blocks_missing(running, n))  # noqa: E731
    return bisect_left(range(1, num_steps + 1), True, key=lacks_blocks)


def _num_blocks_missing(running: list[Sequence], num_steps: int) -> int:
    """Blocks needed by the rows of ``num_steps`` more steps."""
    missing = (s.num_blocks_for(s.num_computed + _num_rows(s, num_steps)) - len(s.block_table) for s in running)
    return sum(num_blocks for num_blocks in missing if num_blocks > 0)


def _num_rows(sequence: Sequence, num_steps: int = sys.maxsize) -> int:
    """Rows of the sequence in ``num_steps`` more steps; none beyond its limit."""
    return min(num_steps, sequence.max_length - len(sequence.tokens) - sequence.num_pending)


def fast_forward(scheduler: Scheduler, num_steps: int) -> Forwarded:
    """Take ``num_steps`` turns, at most `steady_steps`, and emit the first and last tokens they end with."""
    table, running = scheduler.table, scheduler.running
    leaving = _leaving(table)
    step = next(iter(table.steps_in_flight), None)
    old_rows: list[StepRow] = []
    rows: list[StepRow] = []
    sequences: list[Sequence] = []
    if step is not None:
        old_rows = step.batch.rows
        step.batch = StepBatch(step_id=step.batch.step_id, rows=rows)
        step.sequences, step.num_chunk_tokens = sequences, 0
    block_size = table.pool.block_size
    zeros = [0] * num_steps
    finished: list[Sequence] = []
    second_tokens: list[SecondToken] = []
    growing: list[Sequence] = []
    for index, sequence in enumerate(running):
        tokens = sequence.tokens
        num_known = len(tokens)
        num_computed = sequence.num_computed + num_steps
        previous_row = sequence.last_row
        if (
            sequence.num_pending
            and num_known + num_steps < sequence.least_length
            and num_known > sequence.num_prompt_tokens + 1
        ):
            if num_computed > len(sequence.block_table) * block_size:
                growing.append(sequence)
            row = old_rows[previous_row]
            row.tokens = ()
            row.previous_row = index if num_steps > 1 else previous_row
            row.sample_position = sequence.num_computed = num_computed
            row.cached_length = sequence.num_written = num_computed - 1
            tokens += zeros
            sequence.last_row = len(rows)
            rows.append(row)
            sequences.append(sequence)
            continue
        num_pending = sequence.num_pending
        num_rows = min(num_steps, sequence.max_length - num_known - num_pending)
        if sequence.num_computed + num_rows > len(sequence.block_table) * block_size:
            growing.append(sequence)
        if num_steps > 1:
            sequence.last_row = index
        if num_known - sequence.num_prompt_tokens == 1 and num_known + 1 < sequence.least_length:
            turn = 1 if step is None or num_pending else 2
            if turn <= num_steps:
                event = TokenEvent(sequence.key, sequence.request.choice, 1, 0, None, FinishReason.NONE)
                second_tokens.append(SecondToken(turn, event))
        if _move(table, sequence, step, num_steps, num_rows):
            finished.append(sequence)
    _grow(table, growing)
    for sequence in leaving:
        table.leave_step(sequence)
    if table.pool.caches_content:
        for sequence in running:
            table.register_written(sequence)
    num_unneeded = sum([sequence.num_in_flight for sequence in finished])
    num_context_tokens = sum([row.cached_length for row in rows])
    batch = None
    if step is not None:
        finished.sort(key=lambda sequence: sequence.last_row)  # rows in flight may have another order than `running`
        batch = step.batch
        scheduler.swapping.step_ended(batch.step_id)
    scheduler.close(finished)
    return Forwarded(batch, num_unneeded, num_context_tokens, second_tokens)


def _move(table: SequenceTable, sequence: Sequence, step: PlannedStep | None, num_steps: int, num_rows: int) -> bool:
    """Advance a sequence that joined since the step in flight was planned, has at most one token of its answer,
    ends, or has no step in flight. Returns whether it is finished."""
    tokens = sequence.tokens
    num_tokens = num_steps + sequence.num_pending - (step is not None)
    sequence.num_computed += num_rows
    sequence.num_pending = sequence.num_in_flight = 0
    tokens += [0] * (num_tokens - 1)
    if step is not None and num_rows == num_steps:
        sequence.num_computed -= 1
        step.add_decode(sequence)
    sequence.num_written = sequence.num_computed - sequence.num_pending
    if not num_tokens:
        return False
    is_last = len(tokens) + 1 >= sequence.least_length
    if sequence.num_prompt_tokens < len(tokens) and not is_last:
        tokens.append(0)
        return False
    sequence.num_pending += 1
    token = next(iter(sequence.stop_token_ids), 0) if is_last else 0
    return table.take_token(sequence, SampledToken(token, None)) is not FinishReason.NONE


def _grow(table: SequenceTable, sequences: list[Sequence]) -> None:
    """Allocate blocks for all computed tokens."""
    missing = [s.num_blocks_for(s.num_computed) - len(s.block_table) for s in sequences]
    blocks = table.pool.allocate(sum(missing))
    for sequence, num_missing in zip(sequences, missing, strict=True):
        sequence.block_table.extend(blocks[-num_missing:])
        del blocks[-num_missing:]
