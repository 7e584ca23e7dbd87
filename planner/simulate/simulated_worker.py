"""One worker under the virtual clock: the live step loop over the live scheduler.

Drives `pdserve.engine.worker.loop` as its thread does, with an executor that computes nothing and takes the time that
the cost model predicts. At pipeline depth 2, the loop plans and submits step N + 1 while step N runs; messages that
arrive meanwhile are received when step N ends, in time for step N + 2. At depth 1, or if there was nothing to plan yet,
one turn of the loop separates two steps.

Most steps of a decode worker change only lengths and are not planned (`pdserve.planner.simulate.steady_steps`). The
worker finds the last turn of such a *run*, or the first one that receives a new message, and fast-forwards to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf, sqrt
from random import Random
from typing import NamedTuple, Protocol

from pdserve.contracts.events import SchedulerLoad
from pdserve.contracts.step import SampledToken, StepBatch, StepOutput, StepRow
from pdserve.contracts.worker_config import WorkerRole
from pdserve.engine.worker.loop import StepLoop, StepReport, Wait
from pdserve.engine.worker.messages import Message
from pdserve.engine.worker.scheduler import Scheduler
from pdserve.kv_transfer.block_pool import BlockPool
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.stage import Stage
from pdserve.planner.simulate.event_queue import EventQueue
from pdserve.planner.simulate.steady_steps import Growth, fast_forward, steady_steps

END_TOKEN = 1
"""The stop token of answers that end before their limit."""
NO_GUESSES: Mapping[int, int] = {}
_TOKEN, _END = SampledToken(0, None), SampledToken(END_TOKEN, None)


class WorkerSink(Protocol):
    """Receives the reports of a worker's step loop."""

    def received(self, worker: SimulatedWorker, report: StepReport, sent_s: float) -> None:
        """``report`` left the worker at ``sent_s``: now, or earlier if it has nothing but second tokens."""
        ...


@dataclass(slots=True)
class _Step:
    """A step in flight."""

    batch: StepBatch
    num_prefilled: int
    num_decoded: int
    """Without rows of answers that end before the step does."""
    begins_s: float
    ends_s: float
    right: Mapping[int, int]
    """Right guesses of rows with guesses."""

    def result(self) -> StepOutput:
        rows = self.batch.rows
        return StepOutput(
            step_id=self.batch.step_id,
            sampled=[_TOKEN if (each := row.sample) and not each.stop_token_ids else _sampled(row) for row in rows],
            num_guesses={index: rows[index].max_guesses for index in self.right},
            more={
                index: [token for ahead in range(count) if (token := _sampled(rows[index], 1 + ahead))]
                for index, count in self.right.items()
            },
            duration_s=self.ends_s - self.begins_s,
        )


def _sampled(row: StepRow, num_ahead: int = 0) -> SampledToken | None:
    """The answer's next token, or one behind it: it ends as soon as it may."""
    if row.sample is None:
        return None
    return _END if row.sample.stop_token_ids and _num_beyond(row) + num_ahead >= 0 else _TOKEN


def _num_beyond(row: StepRow) -> int:
    """Tokens of the answer before the one that the row samples, beyond ``min_tokens``: 0 for its last token."""
    assert row.sample is not None
    return row.sample_position - row.num_prompt_tokens - row.sample.min_tokens


def _num_left(row: StepRow) -> int:
    """Tokens of the answer behind the one that the row samples."""
    assert row.sample is not None
    return max(0, -_num_beyond(row)) if row.sample.stop_token_ids else row.max_guesses


class _SteadyRun(NamedTuple):
    """Consecutive turns that each end with a step of the same batch; each step is slightly longer than the last."""

    batch_size: int
    num_ahead: int
    """Turns that end with steps planned before the run: 1 with a step in flight, else 0."""
    ahead_ends_s: float
    """End of the step in flight."""
    begins_s: float
    """Start of the first planned step."""
    first_s: float
    """Length of the first planned step."""
    growth_s: float
    """Growth of the step time per step."""

    def end_s(self, num_turns: int) -> float:
        """End of turn ``num_turns``."""
        num_steps = num_turns - self.num_ahead
        if num_steps <= 0:
            return self.ahead_ends_s
        return self.begins_s + num_steps * (self.first_s + self.growth_s * (num_steps - 1) / 2)

    def first_turn(self, instant_s: float) -> int:
        """The first turn that ends at ``instant_s`` or later."""
        waited_s = instant_s - self.begins_s
        num_steps = 0
        if waited_s > 0:
            half_growth_s = self.growth_s / 2
            linear_s = self.first_s - half_growth_s
            num_steps = ceil(2 * waited_s / (linear_s + sqrt(linear_s * linear_s + 4 * half_growth_s * waited_s)))
        # The root is exact up to rounding.
        num_turns = max(1, num_steps + self.num_ahead - 1)
        while self.end_s(num_turns) < instant_s:
            num_turns += 1
        return num_turns


class Guessing:
    """Guesses of a worker, each of which is right with the same chance. All that the scheduler allows are made."""

    def __init__(self, worker_id: str, share_right: float, draft: CostModel | None) -> None:
        """
        Args:
            draft: of the model that guesses; ``None``: guesses take no time.
        """
        self.share_right = share_right
        self.draft = draft
        self._random = Random(worker_id)

    def num_right(self, num_guesses: int) -> int:
        """Guesses of a row before the first wrong one."""
        random, share = self._random.random, self.share_right
        return next((number for number in range(num_guesses) if random() >= share), num_guesses)

    def draft_s(self, num_rows: int, depth: int) -> float:
        """Seconds before a step whose rows have up to ``depth`` guesses."""
        return 0.0 if self.draft is None else depth * self.draft.decode_s(num_rows, 0)


class SimulatedWorker:
    """A worker, or one micro-batch of a pipeline-parallel one: its step loop and that loop's executor."""

    def __init__(
        self,
        worker_id: str,
        role: WorkerRole,
        *,
        scheduler: Scheduler,
        block_pool: BlockPool,
        cost: CostModel,
        stage: Stage,
        queue: EventQueue,
        sink: WorkerSink,
        turn_s: float,
        guessing: Guessing | None,
    ) -> None:
        """
        Args:
            turn_s: seconds that the loop takes between two steps, unless the second was submitted before the first
                ended.
            guessing: of the rows that ``scheduler`` lets guess; ``None`` if it lets none.
        """
        self.worker_id = worker_id
        self.role = role
        self._scheduler = scheduler
        self.cost = cost
        self.busy_s = 0.0
        self.held_block_s = 0.0
        """Referenced KV blocks times seconds; a shared block counts once."""
        self.num_turns, self.turned_s = 0, 0.0
        """Turns of the loop, and the instant of the last one. The scheduler changes only at turns."""
        self.num_steps = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self.num_right_guesses = 0
        self.num_token_steps = 0.0
        """Steps, each of which counts as many times as it has tokens for a decoding sequence, as routers count them."""
        self.gaps_us: dict[int, int] = {}
        """Decoded tokens by length of their step in microseconds."""
        self._block_pool = block_pool
        self._held_until_s = 0.0
        """End of the time that `held_block_s` covers."""
        self._block_size = block_pool.block_size
        self._stage = stage
        self._num_ahead = cost.pipeline_depth - 1
        """Steps planned while one runs."""
        self._turn_s = turn_s
        self._guessing = guessing
        self._queue = queue
        self._sink = sink
        self._inbox: list[Message] = []
        self.pipeline_depth = cost.pipeline_depth
        self._loop = StepLoop(scheduler=scheduler, executor=self, sink=self)
        self._steps: deque[_Step] = deque()
        """Steps in flight."""
        self._free_at_s = 0.0
        """End of the last submitted step, plus the loop's turn if no step is in flight."""
        self._run: _SteadyRun | None = None
        self._run_length = 0
        self._run_growth: Growth | None = None
        """Since the start of the run; None until asked for."""
        self._num_turns_due = 0
        self._is_idle = True

    def receive(self, message: Message) -> None:
        """Put ``message`` into the inbox now."""
        self._inbox.append(message)
        now_s = self._queue.now_s
        if self._is_idle:
            self._turn_at(now_s)
        elif self._run is not None:
            self._cut_run_after(now_s)

    def load(self) -> SchedulerLoad:
        """Load as of now."""
        return self._scheduler.load()

    def run_growth(self) -> tuple[int, int, int, float]:
        """What the scheduler does not yet know of the current run: steps that have ended; context tokens and blocks of
        those that would be planned by now, one more; and the instant of the last turn."""
        run = self._run
        if run is None:
            return 0, 0, 0, self.turned_s
        num_turns = min(run.first_turn(self._queue.now_s), self._run_length)
        num_turns -= run.end_s(num_turns) > self._queue.now_s  # it has not ended
        if self._run_growth is None:
            self._run_growth = Growth(self._scheduler)
        num_tokens, num_blocks = self._run_growth.after(min(num_turns + 1, self._run_length))
        turned_s = run.end_s(num_turns) if num_turns else self.turned_s
        return num_turns, num_tokens, num_blocks, turned_s

    # The loop

    def _turn_at(self, instant_s: float) -> None:
        """Schedule the next turn at ``instant_s``; replaces any earlier one."""
        self._is_idle = False
        self._num_turns_due += 1
        number = self._num_turns_due
        self._queue.at(instant_s, lambda: self._turn() if number == self._num_turns_due else None)

    def _turn(self) -> None:
        self.num_turns += 1
        self.turned_s = now_s = self._queue.now_s
        self.held_block_s += self._block_pool.num_referenced * (now_s - self._held_until_s)
        self._held_until_s = now_s
        had_step = self._run is not None or bool(self._steps)
        if self._run is not None:
            self._end_run(self._run)
        while self._steps and self._steps[0].ends_s <= now_s:
            step = self._steps.popleft()
            self._count_step(step)
            self._loop.step_ended(step.result(), now_s)
            if self._guessing is None:  # nothing sets what only rows with guesses have
                self._scheduler.table.spare_rows[:] = step.batch.rows
        if had_step and self._free_at_s <= now_s and not self._steps:
            self._free_at_s = now_s + self._turn_s
        inbox, self._inbox = self._inbox, []
        for message in inbox:
            self._loop.handle(message, now_s)
        if self._try_run(now_s):
            return
        before_s = self._free_at_s
        match self._loop.turn(now_s):
            case Wait.STEP:
                self._turn_at(self._steps[0].ends_s)
            case Wait.NOTHING:
                self._turn_at(max(now_s, before_s))
            case Wait.MESSAGE:
                self._rest()

    def _rest(self) -> None:
        """Nothing can run: wait for a message or for a deadline."""
        deadline_s = self._loop.scheduler.next_deadline_s()
        if deadline_s < inf:
            self._turn_at(deadline_s)
        self._is_idle = True

    def publish(self, report: StepReport) -> None:
        """Send the loop's report."""
        if report.events or report.orders:
            self._sink.received(self, report, self._queue.now_s)

    # Planned steps

    def submit(self, batch: StepBatch) -> _Step:
        """Start a step once the previous one ends."""
        num_copied_blocks = len(batch.swap_outs) + len(batch.swap_ins)
        chunks, num_decoded, num_context_tokens, num_unneeded = [], 0, 0, 0
        guessing = [(1 + row.max_guesses, row.cached_length) for row in batch.rows if row.max_guesses]
        for row in batch.rows:
            if row.max_guesses:
                num_decoded += 1
            elif len(row.tokens) < 2 and row.cached_length >= row.num_prompt_tokens:
                num_decoded += 1
                num_context_tokens += row.cached_length
                if row.sample is not None and row.sample.stop_token_ids:
                    num_unneeded += _num_beyond(row) > 0
            else:
                chunks.append((len(row.tokens), row.cached_length))
        step_s = self.cost.step_s(chunks + guessing, num_decoded - len(guessing), num_context_tokens)
        if num_copied_blocks:
            step_s += self.cost.swap_s(num_copied_blocks * self._block_size)
        num_prefilled = sum([num_new for num_new, _ in chunks])
        right: dict[int, int] = {}
        if guessing:
            assert self._guessing is not None
            rows = {index: row for index, row in enumerate(batch.rows) if row.max_guesses}
            right = {index: self._guessing.num_right(row.max_guesses) for index, row in rows.items()}
            step_s += self._guessing.draft_s(len(batch.rows), max(row.max_guesses for row in rows.values()))
        return self._start(batch, num_prefilled, num_decoded - num_unneeded, step_s, right)

    def _start(
        self,
        batch: StepBatch,
        num_prefilled: int,
        num_decoded: int,
        step_s: float,
        right: Mapping[int, int] = NO_GUESSES,
    ) -> _Step:
        begins_s = self._stage.enter(max(self._queue.now_s, self._free_at_s), step_s)
        self._free_at_s = begins_s + step_s
        step = _Step(batch, num_prefilled, num_decoded, begins_s, self._free_at_s, right)
        self._steps.append(step)
        return step

    def close(self) -> None:
        """Hold nothing, so release nothing."""

    # Steady runs, whose steps are not planned

    def _try_run(self, now_s: float) -> bool:
        """Begin a run if the coming steps are steady. Those of a pipeline also wait for its other micro-batches, and
        what is guessed in a step depends on the one before."""
        scheduler = self._scheduler
        if not scheduler.running or len(self._steps) != self._num_ahead or self.cost.pipeline_parallel > 1:
            return False
        if self._guessing is not None:
            return False
        steady = steady_steps(scheduler, now_s)
        if not steady.num_steps:
            return False
        self._loop.flush()
        first_s, growth_s, num_linear = self.cost.decode_run_s(steady.batch_size, steady.num_context_tokens)
        num_steps = min(steady.num_steps, num_linear)
        begins_s = max(now_s, self._free_at_s)
        if not self._num_ahead:  # A turn precedes every step; the first one's is already over.
            first_s += self._turn_s
            begins_s -= self._turn_s
        self._run = _SteadyRun(steady.batch_size, self._num_ahead, self._free_at_s, begins_s, first_s, growth_s)
        self._run_length = num_steps
        self._turn_at(self._run.end_s(num_steps))
        self._cut_run_after(scheduler.next_deadline_s())
        return True

    def _cut_run_after(self, instant_s: float) -> None:
        """Shorten the run to the turn that observes ``instant_s``, if it is longer."""
        assert self._run is not None
        if instant_s >= self._run.end_s(self._run_length):
            return
        num_turns = self._run.first_turn(instant_s)
        if num_turns < self._run_length:
            self._run_length = num_turns
            self._turn_at(self._run.end_s(num_turns))

    def _end_run(self, run: _SteadyRun) -> None:
        num_turns, self._run = self._run_length, None
        self._run_growth = None
        num_steps = num_turns - run.num_ahead
        while self._steps:
            self._count_step(self._steps.popleft())
        if num_steps:
            duration_s = run.end_s(num_turns) - run.begins_s
            num_decoded = num_steps * run.batch_size
            self._count(duration_s, num_steps, num_decoded)
            if not run.num_ahead:
                self.busy_s -= num_steps * self._turn_s
            self.held_block_s += num_decoded / self._block_size / 2 * duration_s  # blocks allocated in the run
            self._free_at_s = run.end_s(num_turns)
        batch, num_unneeded, num_context_tokens, second_tokens = fast_forward(self._scheduler, num_turns)
        for turn, event in second_tokens:
            self._sink.received(self, StepReport(events=[event]), run.end_s(turn))
        self._loop.flush()
        if batch is None:
            return
        if not batch.rows:
            self._loop.step_ended(StepOutput(step_id=batch.step_id, sampled=[], duration_s=0.0), self._queue.now_s)
        else:
            num_rows = len(batch.rows)
            self._start(batch, 0, num_rows - num_unneeded, self.cost.decode_s(num_rows, num_context_tokens))

    def _count_step(self, step: _Step) -> None:
        self._count(step.ends_s - step.begins_s, 1, step.num_decoded)
        if step.right:
            rows = step.batch.rows
            num_right = sum([min(count, _num_left(rows[index])) for index, count in step.right.items()])
            self.num_right_guesses += num_right
            self.num_token_steps += num_right / max(1, step.num_decoded)
        self.num_prefill_tokens += step.num_prefilled

    def _count(self, duration_s: float, num_steps: int, num_decoded: int) -> None:
        self.busy_s += duration_s
        self.num_steps += num_steps
        self.num_token_steps += num_steps
        self.num_decode_tokens += num_decoded
        if num_decoded:
            gap_us = round(duration_s / num_steps * 1e6)
            self.gaps_us[gap_us] = self.gaps_us.get(gap_us, 0) + num_decoded
