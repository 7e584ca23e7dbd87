"""Scheduler of a decode or mixed worker: sequences to decode, plus local prefill, recomputation and pulls.

A step holds one row for every running sequence, then prefill chunks in the rest of the token budget, so that both
phases share one forward pass. The decode and mixed roles use the same class: prompts come by `prepare` (computed
elsewhere, pulled) or by `add` (computed here, by the `PrefillScheduler` inside).

Admission counts future need: a sequence starts when the blocks that it and all running sequences are expected to
need before they end (`Sequence.num_blocks_expected`) fit the pool together. A single sequence always fits; otherwise
it was rejected on arrival.

When a running sequence needs a block and none is free, the last arrival is preempted: its KV is swapped to host
memory if that is cheaper (`pdserve.decode_worker.swapping`), else recomputed later. It resumes ahead of new work. If
the last arrival is the sequence that needs the block, it waits instead. So the oldest sequence is never preempted,
and some sequence always advances.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from operator import attrgetter

from pdserve.contracts.events import RefusalCode, RequestEvent, RequestEventKind, RequestKey, SchedulerLoad
from pdserve.contracts.request import GenerationRequest, KvSource, RequestState
from pdserve.contracts.step import ModelLimits, StepBatch, StepOutput
from pdserve.decode_worker.gap_limit import GapLimit, MixedSeconds
from pdserve.decode_worker.reservations import Reservations
from pdserve.decode_worker.steady_steps import (
    NO_STEADY_STEPS,
    Forwarded,
    SteadySteps,
    count_steady_steps,
    fast_forward,
    limit_to_blocks,
)
from pdserve.decode_worker.swapping import NO_SWAP_SPACE, Swapping, SwapSpace
from pdserve.engine.scheduling.interface import Event, PullResult
from pdserve.engine.scheduling.sequence import Sequence, sum_blocks_missing
from pdserve.engine.scheduling.table import AdmissionBudget, PlannedStep
from pdserve.kv_transfer.block_pool import BlockPool
from pdserve.kv_transfer.transports import ABORTED, REFUSED
from pdserve.prefill_worker.scheduler import DEFAULT_PARK_TIMEOUT_S, PrefillScheduler, deadline_message

DEFAULT_PULL_TIMEOUT_S = 60.0

_ARRIVAL = attrgetter("sequence_id")


class DecodeScheduler:
    """Implements `pdserve.engine.scheduling.interface.Scheduler` for a decode or a mixed worker."""

    def __init__(
        self,
        pool: BlockPool,
        limits: ModelLimits,
        *,
        mint_handle: Callable[[], bytes],
        max_batch_tokens: int,
        max_batch_size: int,
        park_timeout_s: float = DEFAULT_PARK_TIMEOUT_S,
        pull_timeout_s: float = DEFAULT_PULL_TIMEOUT_S,
        swap_space: SwapSpace = NO_SWAP_SPACE,
        mixed_s: MixedSeconds | None = None,
    ) -> None:
        """
        Args:
            mint_handle: returns 16 unguessable bytes, for prompts handed off from here.
            max_batch_tokens: maximum number of new tokens in a step.
            max_batch_size: maximum number of sequences that hold blocks in order to decode. If the token budget is
                smaller, the limit is the budget minus one, which leaves a token for prefill.
            park_timeout_s: a parked prompt without a pull is freed after this long.
            pull_timeout_s: a pull times out after this long.
            swap_space: host memory for preempted sequences; none by default.
            mixed_s: predicts steps with prefill, to bound them by ``max_gap_s`` of requests; ``None`` bounds none.

        Raises:
            ValueError: a limit is below 1.
        """
        self._prefill = PrefillScheduler(
            pool,
            limits,
            mint_handle=mint_handle,
            max_batch_tokens=max_batch_tokens,
            max_batch_size=max_batch_size,
            park_timeout_s=park_timeout_s,
        )
        self._pool = pool
        self._table = self._prefill.table
        self._reservations = Reservations(self._table, pull_timeout_s=pull_timeout_s)
        self._swapping = Swapping(self._table, swap_space)
        self._running: list[Sequence] = []
        """In order of arrival."""
        self._max_batch_tokens = max_batch_tokens
        self._max_batch_size = min(max_batch_size, max(1, max_batch_tokens - 1))
        self._num_preemptions = 0
        self._mixed_s = mixed_s

    # Requests

    def add(self, key: RequestKey, request: GenerationRequest, now_s: float) -> None:
        sequence = self._table.open(key, request, now_s, is_handoff=request.handoff)
        if sequence is not None:
            self._prefill.enqueue(sequence)

    def prepare(self, key: RequestKey, request: GenerationRequest, source: KvSource, now_s: float) -> None:
        sequence = self._table.open(key, request, now_s, is_handoff=False)
        if sequence is not None:
            self._reservations.push(sequence, source)

    def cancel(self, key: RequestKey, now_s: float) -> None:
        sequence = self._table.get(key)
        if sequence is not None:
            self._end(sequence, RequestEventKind.CANCELLED)

    def _end(self, sequence: Sequence, kind: RequestEventKind, message: str = "") -> None:
        self._remove_running(sequence)
        self._reservations.drop(sequence)
        self._swapping.drop(sequence)
        self._prefill.drop(sequence)
        self._table.close(sequence)
        self._table.emit(sequence.key, kind, message)

    def _remove_running(self, sequence: Sequence) -> bool:
        """Remove a sequence from the running ones; returns whether it was there."""
        index = bisect_left(self._running, sequence.sequence_id, key=_ARRIVAL)
        is_running = index < len(self._running) and self._running[index] is sequence
        if is_running:
            del self._running[index]
        return is_running

    # Planning

    def plan(self, now_s: float) -> StepBatch | None:
        self._expire(now_s)
        if self._table.must_drain:
            return None
        step = self._table.begin_step()
        self._plan_decode(step)
        if self._has_waiting_work():
            self._plan_new_work(step, now_s)
        return self._table.commit(step)

    def _expire(self, now_s: float) -> None:
        """End requests past their deadline and parked prompts that timed out."""
        while (sequence := self._table.past_deadline(now_s)) is not None:
            self._end(sequence, RequestEventKind.FAILED, deadline_message(sequence))
        self._prefill.expire_parked(now_s)

    def _has_waiting_work(self) -> bool:
        return bool(self._reservations.num_waiting or self._swapping.num_waiting or not self._prefill.is_idle)

    def _plan_decode(self, step: PlannedStep) -> None:
        """Add a row for every running sequence that has a token left to generate and a block to write to."""
        block_size = self._pool.block_size
        # Preemption removes sequences after the current one only, never before it.
        for sequence in self._running:
            if len(sequence.tokens) + sequence.num_pending >= sequence.max_length:
                continue
            if sequence.num_computed < len(sequence.block_table) * block_size or self._grow(step, sequence):
                step.add_decode(sequence)

    def _grow(self, step: PlannedStep, sequence: Sequence) -> bool:
        """Allocate one more block for the sequence, preempting the last arrivals if needed; ``False`` if it must
        wait."""
        while not self._pool.can_allocate(1):
            if self._table.num_retiring:
                return False  # the steps in flight will free blocks, so no preemption
            victim = self._latest()
            if victim is sequence:
                return False
            self._preempt(step, victim)
        sequence.block_table.extend(self._pool.allocate(1))
        return True

    def _latest(self) -> Sequence:
        """Last arrival among sequences that can be recomputed here. Excludes pulls and handoffs, which end soon."""
        return max((*self._running[-1:], *self._local_prefills()), key=_ARRIVAL)

    def _local_prefills(self) -> Iterator[Sequence]:
        return (sequence for sequence in self._prefill.admitted if not sequence.is_handoff)

    def _preempt(self, step: PlannedStep, sequence: Sequence) -> None:
        self._num_preemptions += 1
        is_running = self._remove_running(sequence)
        self._prefill.drop(sequence)
        if sequence.state is not RequestState.PREEMPTED:
            self._table.emit(sequence.key, RequestEventKind.PREEMPTED)
        sequence.state = RequestState.PREEMPTED
        if is_running and self._swapping.can_swap_out(sequence):
            self._swapping.swap_out(step, sequence)
        else:
            self._prefill.enqueue(sequence)
        self._table.retire(sequence)

    def _plan_new_work(self, step: PlannedStep, now_s: float) -> None:
        """Resume swapped sequences, reserve blocks and prefill, which compete for blocks and batch slots. Preempted
        sequences go first, then the older of the first reservation and the first prompt, once it lacked blocks."""
        local, reserving = self._prefill.first_waiting(), self._reservations.first_waiting(now_s)
        budget = AdmissionBudget(0, 0)
        if local is not None or reserving is not None or self._swapping.num_waiting:
            budget = self._budget()
        self._resume_swapped(step, budget)
        while reserving is not None and budget.num_slots > 0 and not self._must_wait(reserving, local):
            if not self._reservations.reserve(reserving, budget, now_s):
                break
            reserving = self._reservations.first_waiting(now_s)
        if reserving is not None and local is not None and not _is_ahead(local, reserving):
            budget.num_slots = 0
        max_tokens = self._max_batch_tokens - step.num_rows
        self._prefill.plan_chunks(step, budget, max_tokens=max_tokens, now_s=now_s, fit=self._gap_limit(step))
        for sequence in self._prefill.take_ready():
            if sequence.state is RequestState.PREEMPTED:
                self._table.emit(sequence.key, RequestEventKind.RESUMED)
            self._join(sequence)

    def _gap_limit(self, step: PlannedStep) -> GapLimit | None:
        """Limit of the step's chunks, if one of its decode rows has a longest gap."""
        if self._mixed_s is None or self._prefill.is_idle:
            return None
        max_gap_s = min([s.request.max_gap_s for s in step.sequences if s.request.max_gap_s], default=0.0)
        if not max_gap_s:
            return None
        num_context_tokens = sum([row.cached_length for row in step.batch.rows])
        return GapLimit(self._mixed_s, max_gap_s, step.num_rows, num_context_tokens, self._pool.block_size)

    def _resume_swapped(self, step: PlannedStep, budget: AdmissionBudget) -> None:
        """Resume swapped sequences in order, as far as they fit. None overtakes one that does not fit."""
        while budget.num_slots > 0 and (sequence := self._swapping.first_waiting()) is not None:
            if not self._swapping.resume(step, budget):
                budget.num_slots = 0
                return
            self._table.emit(sequence.key, RequestEventKind.RESUMED)
            self._join(sequence)

    def _must_wait(self, reserving: Sequence, local: Sequence | None) -> bool:
        """Whether the first reservation in line must let the first prompt waiting for prefill go ahead.

        Never for a prompt that will be handed off: two workers could wait for each other's reservations.
        """
        if local is None or local.is_handoff:
            return False
        is_hungry = self._prefill.is_blocked or local.state is RequestState.PREEMPTED
        return is_hungry and _is_ahead(local, reserving)

    def _budget(self) -> AdmissionBudget:
        """Free batch slots, and available blocks beyond the expected need of all sequences that hold blocks and
        decode now or soon."""
        soon = [*self._local_prefills(), *self._reservations.pulling()]
        num_blocks_missing = sum_blocks_missing(self._running) + sum_blocks_missing(soon)
        num_slots = self._max_batch_size - len(self._running) - len(soon)
        return AdmissionBudget(num_slots, self._pool.num_available - num_blocks_missing)

    def _join(self, sequence: Sequence) -> None:
        self._table.stop_waiting(sequence)
        sequence.state = RequestState.DECODING
        insort(self._running, sequence, key=_ARRIVAL)

    # Results

    def complete(self, output: StepOutput, now_s: float) -> None:
        results = self._table.complete(output)
        for sequence, token in results:
            self._prefill.take_result(sequence, token, now_s)
        self._swapping.step_ended(output.step_id)
        if results:
            self._running = [sequence for sequence in self._running if not sequence.is_over]
        for sequence, message in self._table.take_failed():
            self._end(sequence, RequestEventKind.FAILED, message)

    def fail_step(self, step_id: int, message: str, now_s: float) -> None:
        for sequence in self._table.fail_step(step_id):
            self._end(sequence, RequestEventKind.FAILED, message)
        self._swapping.step_ended(step_id)

    # Steady decode steps, for the simulator

    def steady_steps(self, now_s: float) -> SteadySteps:
        """Expire and reserve as `plan` does, and count the steps that `fast_forward` may take instead of `plan` and
        `complete`, as long as nothing arrives and no deadline passes."""
        self._expire(now_s)
        if not self._prefill.is_idle or self._swapping.num_waiting or self._table.must_drain:
            return NO_STEADY_STEPS
        counted = count_steady_steps(self._table, self._running)
        steady = limit_to_blocks(counted, self._pool, self._running)
        if not steady.num_steps or not self._reservations.num_waiting:
            return steady
        self._plan_new_work(self._table.begin_step(), now_s)  # no prompt waits: this reserves and adds no row
        # A refused reservation stays refused: running sequences leave ever fewer blocks to others.
        return limit_to_blocks(counted, self._pool, self._running)

    def fast_forward(self, num_steps: int) -> Forwarded:
        """Take ``num_steps`` steady steps at once."""
        forwarded, finished = fast_forward(self._table, self._running, num_steps)
        for sequence in finished:
            self._table.close(sequence)
        if finished:
            self._running = [sequence for sequence in self._running if not sequence.is_over]
        self._swapping.step_ended(self._table.next_step_id - 1 - len(self._table.steps_in_flight))
        return forwarded

    def free_kv_tokens(self) -> Counter[int]:
        """Running sequences by the tokens that fit the blocks they hold, beyond those computed."""
        block_size = self._pool.block_size
        return Counter([len(s.block_table) * block_size - s.num_computed for s in self._running])

    # Transfers

    def pull_done(self, result: PullResult, now_s: float) -> None:
        sequence = self._reservations.finish(result)
        if sequence is None:
            return
        first = result.first_token
        failure = result.failure or _mismatch(result, sequence)
        if failure or first is None:
            refusal = RefusalCode.SOURCE if result.failure_stage in (REFUSED, ABORTED) else RefusalCode.NONE
            self._table.events.append(
                RequestEvent(sequence.key, RequestEventKind.KV_UNAVAILABLE, failure, refusal=refusal)
            )
            self._table.close(sequence)
        elif self._table.receive(sequence, result.num_tokens, first):
            # The request ended with token 0, which the prefill worker has emitted.
            self._table.emit(sequence.key, RequestEventKind.RELEASED)
            self._table.close(sequence)
        else:
            self._join(sequence)
            waited_s = now_s - sequence.arrived_s
            self._table.events.append(RequestEvent(key=sequence.key, kind=RequestEventKind.JOINED, waited_s=waited_s))

    def set_leased(self, handle: bytes, is_leased: bool) -> None:
        self._prefill.set_leased(handle, is_leased)

    def released(self, handle: bytes) -> None:
        self._prefill.released(handle)

    # What others see

    def next_deadline_s(self) -> float | None:
        return self._prefill.next_deadline_s()

    def take_events(self) -> list[Event]:
        return self._table.take_events()

    def load(self) -> SchedulerLoad:
        load = self._prefill.load()
        pulling = list(self._reservations.pulling())
        return load._replace(
            num_running=load.num_running + len(self._running) + len(pulling),
            num_waiting=load.num_waiting + self._reservations.num_waiting + self._swapping.num_waiting,
            num_context_tokens=load.num_context_tokens
            + sum([sequence.num_computed for sequence in self._running])
            + sum([len(sequence.tokens) for sequence in pulling]),
            num_preemptions=self._num_preemptions,
            num_swap_outs=self._swapping.num_swap_outs,
            num_swap_ins=self._swapping.num_swap_ins,
            num_swap_slots_used=self._swapping.num_slots_used,
        )

    def check_integrity(self) -> None:
        """Recount the pool's blocks, the parked prompts and the host's slots.

        Raises:
            AssertionError: names the broken invariant.
        """
        self._prefill.check_integrity()
        self._swapping.check_integrity()


def _mismatch(result: PullResult, sequence: Sequence) -> str:
    """Mismatch between the pulled prompt and the sequence; empty if they match."""
    if result.first_token is None:
        return "verify: the source granted no first token"
    if not result.first_token.finish and result.num_tokens != len(sequence.tokens):
        return f"verify: KV of {result.num_tokens} tokens for a prompt of {len(sequence.tokens)}"
    return ""


def _is_ahead(local: Sequence, reserving: Sequence) -> bool:
    return local.state is RequestState.PREEMPTED or local.sequence_id < reserving.sequence_id
