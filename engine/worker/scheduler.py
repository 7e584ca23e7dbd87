"""The scheduler of a worker of any role: which sequences compute in each step, and which requests get blocks.

A step holds one row for every running sequence, then prefill chunks in the rest of the token budget, so that both
phases share one forward pass. A request to decode here comes by `Scheduler.prepare` (its prompt is computed elsewhere
and pulled) or by `Scheduler.add` (computed here); one with handoff comes by `add` and leaves with its prompt. A
scheduler knows no role: a router sends prefill workers requests of the last kind alone, and what is planned follows
from the requests that are there, so that a worker may get another role at any time.

Its parts: `pdserve.prefill_worker` orders prompts and parks those to hand off, `pdserve.decode_worker` reserves blocks
for pulls, swaps preempted sequences, and bounds the gaps between tokens.

Admission counts future need: a sequence starts when the blocks that it and all running sequences are expected to
need before they end (`Sequence.num_blocks_expected`) fit the pool together. A single sequence always fits; otherwise
it was rejected on arrival.

When a running sequence needs a block and none is free, the last arrival is preempted: its KV is swapped to host
memory if that is cheaper (`pdserve.decode_worker.swapping`), else recomputed later. It resumes ahead of new work. If
the last arrival is the sequence that needs the block, it waits instead. So the oldest sequence is never preempted,
and some sequence always advances.

Pure: no I/O, no torch, no clock. ``now_s`` is an argument, monotonic, with any origin: the live step loop passes real
time, the planner's simulator virtual time. Results may arrive one step late: `Scheduler.plan` may be called once more
before `Scheduler.complete` of the previous step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator
from operator import attrgetter

from pdserve.contracts.events import RefusalCode, RequestEvent, RequestEventKind, RequestKey, SchedulerLoad
from pdserve.contracts.request import GenerationRequest, KvSource
from pdserve.contracts.step import ModelLimits, StepBatch, StepOutput
from pdserve.decode_worker.gap_limit import GapLimit, MixedSeconds
from pdserve.decode_worker.reservations import Reservations
from pdserve.decode_worker.swapping import NO_SWAP_SPACE, Swapping, SwapSpace
from pdserve.engine.scheduling.interface import Event, PullResult
from pdserve.engine.scheduling.prefixes import Lending, PrefixPulls
from pdserve.engine.scheduling.sequence import Sequence, sum_blocks_missing
from pdserve.engine.scheduling.speculation import MAX_GUESSES, Speculation
from pdserve.engine.scheduling.table import AdmissionBudget, PlannedStep, SequenceTable
from pdserve.kv_transfer.block_pool import BlockPool
from pdserve.kv_transfer.transports import ABORTED, REFUSED
from pdserve.prefill_worker.parking import Parking
from pdserve.prefill_worker.prompts import Prompts
from pdserve.prefill_worker.restores import NO_TIER, Restores, TierSpace

DEFAULT_PARK_TIMEOUT_S = 30.0

_ARRIVAL = attrgetter("sequence_id")


class Scheduler:
    """Decides what each step computes. Not thread-safe: one loop owns it."""

    def __init__(
        self,
        pool: BlockPool,
        limits: ModelLimits,
        *,
        mint_handle: Callable[[], bytes],
        max_batch_tokens: int,
        max_batch_size: int,
        park_timeout_s: float = DEFAULT_PARK_TIMEOUT_S,
        swap_space: SwapSpace = NO_SWAP_SPACE,
        tier_space: TierSpace = NO_TIER,
        mixed_s: MixedSeconds | None = None,
        speculation: Speculation | None = None,
        ids: Iterator[int] | None = None,
    ) -> None:
        """
        Args:
            mint_handle: returns 16 unguessable bytes, never the same twice.
            max_batch_tokens: maximum number of new tokens in a step; 1 or more, as is the next.
            max_batch_size: maximum number of sequences that hold blocks in order to decode, or, if all requests are
                handed off, of prompts that are admitted and not yet computed. If any is to decode here and the token
                budget is smaller, the limit is the budget minus one, which leaves a token for prefill.
            park_timeout_s: a parked prompt without a pull is freed after this long.
            swap_space: host memory for preempted sequences; none by default.
            tier_space: a tier that prompts are restored from; none by default.
            mixed_s: predicts steps with prefill, to bound them by ``max_gap_s`` of requests; ``None`` bounds none.
            speculation: chooses the guesses of each step; ``None`` if the executor makes none.
            ids: of sequences and pulls, rising; from 0 by default.
        """
        self.table = SequenceTable(pool, limits, ids)
        self.parking = Parking(self.table, park_timeout_s=park_timeout_s, mint_handle=mint_handle)
        self.restores = Restores(self.table, tier_space)
        self.prefixes = PrefixPulls(self.table)
        self.lending = Lending(self.table)
        self.prompts = Prompts(self.table, self.parking, self.restores, self.prefixes)
        self.reservations = Reservations(self.table)
        self.swapping = Swapping(self.table, swap_space)
        self.running: list[Sequence] = []
        """Sequences that decode, in order of arrival."""
        self._pool = pool
        self._max_batch_tokens = max_batch_tokens
        self._max_batch_size = max_batch_size
        self._is_stuck = False
        """Nothing runs, and what waits lacks room."""
        self._num_preemptions = 0
        self._mixed_s = mixed_s
        self._speculation = speculation

    # Requests

    def add(self, key: RequestKey, request: GenerationRequest, now_s: float) -> None:
        """Add a request to prefill here. A request that can never run gets a REJECTED event.

        Args:
            now_s: time the worker received the request; may be earlier than that of previous calls.
        """
        sequence = self.table.open(key, request, now_s, is_handoff=request.handoff)
        if sequence is not None:
            self.prompts.enqueue(sequence)

    def prepare(self, key: RequestKey, request: GenerationRequest, source: KvSource, now_s: float) -> None:
        """Add a request whose prompt another worker prefills: reserve blocks, pull, decode."""
        sequence = self.table.open(key, request, now_s, is_handoff=False)
        if sequence is not None:
            self.reservations.push(sequence, source)

    def cancel(self, key: RequestKey, now_s: float) -> None:
        """Drop a request in any state and emit CANCELLED. Unknown keys are ignored."""
        sequence = self.table.get(key)
        if sequence is not None:
            self._end(sequence, RequestEventKind.CANCELLED)

    def _end(self, sequence: Sequence, kind: RequestEventKind, message: str = "") -> None:
        self._remove_running(sequence)
        self.reservations.drop(sequence)  # aborts the pull of a prefix, too
        self.swapping.drop(sequence)
        self.prompts.drop(sequence)
        self.parking.withdraw(sequence)
        self.table.close(sequence)
        self.table.emit(sequence.key, kind, message)

    def _remove_running(self, sequence: Sequence) -> bool:
        """Remove a sequence from the running ones; returns whether it was there."""
        index = bisect_left(self.running, sequence.sequence_id, key=_ARRIVAL)
        is_running = index < len(self.running) and self.running[index] is sequence
        if is_running:
            del self.running[index]
        return is_running

    # Planning

    def plan(self, now_s: float) -> StepBatch | None:
        """Schedule the next step; ``None`` when nothing can run now. Expires requests past their deadline."""
        self.expire(now_s)
        if self.table.must_drain or self.table.is_guessing:
            return None
        if self._speculation is not None and self._speculation.needs_tokens and self.table.steps_in_flight:
            return None
        if not self.table.num_to_decode and self.table.steps_in_flight and self.prompts.is_patient(now_s):
            return None
        step = self.table.begin_step()
        self._plan_decode(step)
        if self._has_waiting_work():
            self.plan_new_work(step, now_s)
        if self._speculation is not None:
            self._plan_guesses(step, self._speculation)
        batch = self.table.commit(step)
        self._is_stuck = not self.table.steps_in_flight and self._has_waiting_work()
        return batch

    def expire(self, now_s: float) -> None:
        """End requests past their deadline and parked prompts that timed out."""
        while (sequence := self.table.deadlines.first_due(now_s)) is not None:
            message = f"deadline: {sequence.request.deadline_s:g} s have passed since the worker received the request"
            self._end(sequence, RequestEventKind.FAILED, message)
        for sequence in self.parking.take_expired(now_s):
            self._end(sequence, RequestEventKind.KV_UNAVAILABLE, "parked: nobody pulled the prompt in time")
        for sequence in self.restores.take_late(now_s):
            self.prompts.enqueue(sequence)

    def _has_waiting_work(self) -> bool:
        return bool(self.reservations.num_waiting or self.swapping.num_waiting or not self.prompts.is_idle)

    def _plan_decode(self, step: PlannedStep) -> None:
        """Add a row for every running sequence that has a token left to generate and a block to write to."""
        block_size = self._pool.block_size
        # Preemption removes sequences after the current one only, never before it.
        for sequence in self.running:
            if len(sequence.tokens) + sequence.num_pending >= sequence.max_length:
                continue
            if sequence.num_computed < len(sequence.block_table) * block_size or self._grow(step, sequence):
                step.add_decode(sequence)

    def _plan_guesses(self, step: PlannedStep, speculation: Speculation) -> None:
        """Let rows guess in what the step leaves of its token budget. Nobody is preempted for a guess. A step samples
        no more tokens than ``max_batch_size``, or than one row with all guesses, so that no more logits are held."""
        num_left = self._max_batch_tokens - step.batch.num_new_tokens
        num_left = min(num_left, max(self._max_batch_size, 1 + MAX_GUESSES) - step.num_rows)
        for index, num_guesses, num_forced in speculation.choose(step, num_left):
            sequence = step.sequences[index]
            num_tokens = step.batch.rows[index].cached_length + 1 + max(num_guesses, num_forced)
            num_missing = sequence.num_blocks_for(num_tokens) - len(sequence.block_table)
            if num_missing > 0 and self._pool.can_allocate(num_missing):
                sequence.block_table.extend(self._pool.allocate(num_missing))
            step.allow_guesses(index, num_guesses, num_forced)

    def _grow(self, step: PlannedStep, sequence: Sequence) -> bool:
        """Allocate one more block for the sequence, preempting the last arrivals if needed; ``False`` if it must
        wait."""
        while not self._pool.can_allocate(1):
            if self.lending.withdraw():
                continue
            if self.table.num_retiring:
                return False  # the steps in flight will free blocks, so no preemption
            victim = self._latest()
            if victim is sequence:
                return False
            self._preempt(step, victim)
        sequence.block_table.extend(self._pool.allocate(1))
        return True

    def _latest(self) -> Sequence:
        """Last arrival among sequences that can be recomputed here. Excludes pulls and handoffs, which end soon."""
        local = [sequence for sequence in self.prompts.admitted if not sequence.is_handoff]
        return max((*self.running[-1:], *local), key=_ARRIVAL)

    def _preempt(self, step: PlannedStep, sequence: Sequence) -> None:
        self._num_preemptions += 1
        is_running = self._remove_running(sequence)
        self.prompts.drop(sequence)
        if not sequence.is_preempted:
            self.table.emit(sequence.key, RequestEventKind.PREEMPTED)
        sequence.is_preempted = True
        if is_running and self.swapping.can_swap_out(sequence):
            self.swapping.swap_out(step, sequence)
        else:
            self.prompts.enqueue(sequence)
        self.table.retire(sequence)

    def plan_new_work(self, step: PlannedStep, now_s: float) -> None:
        """Resume swapped sequences, reserve blocks and prefill, which compete for blocks and batch slots. Preempted
        sequences go first, then the older of the first reservation and the first prompt, once it lacked blocks."""
        local, reserving = self.prompts.waiting.first(), self.reservations.first_waiting(now_s)
        budget = AdmissionBudget(0, 0)
        if local is not None or reserving is not None or self.swapping.num_waiting:
            budget = self._budget()
        self._resume_swapped(step, budget)
        while reserving is not None and budget.num_slots > 0 and not self._must_wait(reserving, local):
            if not self.reservations.reserve(reserving, budget, now_s):
                break
            reserving = self.reservations.first_waiting(now_s)
        if reserving is not None and local is not None and not _is_ahead(local, reserving):
            budget.num_slots = 0
        max_tokens = self._max_batch_tokens - step.num_rows
        fit = self._gap_limit(step)
        for sequence in self.prompts.plan_chunks(step, budget, max_tokens=max_tokens, now_s=now_s, fit=fit):
            if sequence.is_preempted:
                self.table.emit(sequence.key, RequestEventKind.RESUMED)
            self._join(sequence)

    def _gap_limit(self, step: PlannedStep) -> GapLimit | None:
        """Limit of the step's chunks, if one of its decode rows has a longest gap."""
        if self._mixed_s is None or self.prompts.is_idle:
            return None
        max_gap_s = min([s.request.max_gap_s for s in step.sequences if s.request.max_gap_s], default=0.0)
        if not max_gap_s:
            return None
        num_context_tokens = sum([row.cached_length for row in step.batch.rows])
        return GapLimit(self._mixed_s, max_gap_s, step.num_rows, num_context_tokens, self._pool.block_size)

    def _resume_swapped(self, step: PlannedStep, budget: AdmissionBudget) -> None:
        """Resume swapped sequences in order, as far as they fit. None overtakes one that does not fit."""
        while budget.num_slots > 0 and (sequence := self.swapping.first_waiting()) is not None:
            if not self.swapping.resume(step, budget):
                budget.num_slots = 0
                return
            self.table.emit(sequence.key, RequestEventKind.RESUMED)
            self._join(sequence)

    def _must_wait(self, reserving: Sequence, local: Sequence | None) -> bool:
        """Whether the first reservation in line must let the first prompt waiting for prefill go ahead.

        Never for a prompt that will be handed off: two workers could wait for each other's reservations.
        """
        if local is None or local.is_handoff:
            return False
        is_hungry = self.prompts.is_blocked or local.is_preempted
        return is_hungry and _is_ahead(local, reserving)

    def _budget(self) -> AdmissionBudget:
        """Free batch slots, and available blocks beyond the expected need of all sequences that hold blocks and
        decode now or soon."""
        begun = [*self.prompts.admitted, *self.prefixes.sequences()]
        soon = [*(s for s in begun if not s.is_handoff), *self.reservations.pulling()]
        num_blocks_missing = sum_blocks_missing(self.running) + sum_blocks_missing(soon)
        if self.table.num_to_decode:
            max_batch_size = min(self._max_batch_size, max(1, self._max_batch_tokens - 1))
            num_slots = max_batch_size - len(self.running) - len(soon)
        else:
            num_slots = self._max_batch_size - len(begun)
        return AdmissionBudget(num_slots, self._pool.num_available - num_blocks_missing)

    def _join(self, sequence: Sequence) -> None:
        self.table.deadlines.discard(sequence)
        sequence.is_preempted = False
        insort(self.running, sequence, key=_ARRIVAL)

    # Results

    def complete(self, output: StepOutput, now_s: float) -> None:
        """Process the results of the oldest planned step that is not completed."""
        step = self.table.steps_in_flight[0]
        if self._speculation is not None and step.batch.may_guess:
            self._speculation.learn(step.sequences, output)
        results = self.table.complete(output)
        for sequence, token in results:
            if sequence.handle and token is not None:
                self.parking.park(sequence, token, now_s)
            elif sequence.handle:
                self.parking.grant_written(sequence)
        self.close([sequence for sequence, token in results if token is not None and token.finish])
        self.swapping.step_ended(output.step_id)
        for sequence, message in self.table.take_failed():
            self._end(sequence, RequestEventKind.FAILED, message)

    def close(self, finished: Collection[Sequence]) -> None:
        """Forget sequences whose last token is known, preempted ones included."""
        for sequence in finished:
            self.prompts.drop(sequence)
            self.table.close(sequence)
        if finished:
            self.running = [sequence for sequence in self.running if not sequence.is_over]

    def fail_step(self, step_id: int, message: str, now_s: float) -> None:
        """Handle an exception in the oldest planned step: its requests emit FAILED, and their blocks are freed, not
        cached."""
        for sequence in self.table.fail_step(step_id):
            self._end(sequence, RequestEventKind.FAILED, message)
        self.swapping.step_ended(step_id)

    # Transfers

    def pull_done(self, result: PullResult, now_s: float) -> None:
        """Handle the end of a pull. Called exactly once per StartPullEvent."""
        if result.pull_id in self.prefixes:
            self.prompts.pull_ended(result, now_s)
            return
        sequence = self.reservations.finish(result)
        if sequence is None:
            return
        first = result.first_token
        failure = result.failure or _mismatch(result, sequence)
        if failure or first is None:
            refusal = RefusalCode.SOURCE if result.failure_stage in (REFUSED, ABORTED) else RefusalCode.NONE
            self.table.emit(sequence.key, RequestEventKind.KV_UNAVAILABLE, failure, refusal)
            self.table.close(sequence)
        elif self.table.receive(sequence, result.num_tokens, first):
            # The request ended with token 0, which the prefill worker has emitted.
            self.table.emit(sequence.key, RequestEventKind.RELEASED)
            self.table.close(sequence)
        else:
            self._join(sequence)
            waited_s = now_s - sequence.arrived_s
            self.table.events.append(RequestEvent(key=sequence.key, kind=RequestEventKind.JOINED, waited_s=waited_s))

    def set_leased(self, handle: bytes, is_leased: bool) -> None:
        """A decode worker began to pull the parked prompt, which does not time out meanwhile, or it left without
        releasing the prompt, and another may come until the park timeout."""
        self.parking.set_leased(handle, is_leased)

    def lend(self, handle: bytes, hashes: Collection[bytes]) -> None:
        """Grant another worker the leading blocks of ``hashes`` that are cached here, until `released`. None while only
        loans may keep work here from running: it must not wait for one loan after the other."""
        self.lending.lend(handle, () if self._is_stuck else hashes)

    def released(self, handle: bytes) -> None:
        """The puller has every block, or a pull of a prefix has ended: demote the local ones to cached."""
        self.lending.end(handle)
        sequence = self.parking.take_released(handle)
        if sequence is not None:
            self.table.emit(sequence.key, RequestEventKind.RELEASED)
            self.table.close(sequence)

    def restored(self, restore_id: int) -> None:
        """The tier has written the blocks that a prompt waits for, or cannot."""
        sequence = self.restores.finish(restore_id)
        if sequence is not None:
            self.prompts.enqueue(sequence)

    # What others see

    def next_deadline_s(self) -> float:
        """Time at which `plan` has something to expire; infinite if never."""
        first_s = min(self.parking.expiring.first_instant_s(), self.table.deadlines.first_instant_s())
        return min(first_s, self.restores.next_deadline_s())

    def take_events(self) -> list[Event]:
        """Return the events since the last call, in order."""
        return self.table.take_events()

    def load(self) -> SchedulerLoad:
        admitted, pulling = self.prompts.admitted, list(self.reservations.pulling())
        num_prefixes = sum(1 for _ in self.prefixes.sequences())
        num_in_flight = sum([step.num_chunk_tokens for step in self.table.steps_in_flight])
        return SchedulerLoad(
            num_running=len(admitted) + len(self.running) + len(pulling),
            num_waiting=len(self.prompts.waiting)
            + self.restores.num_waiting
            + num_prefixes
            + self.reservations.num_waiting
            + self.swapping.num_waiting,
            num_parked=self.parking.num_parked,
            num_blocks_parked=self.parking.num_blocks,
            num_blocks_free=self._pool.num_free,
            num_blocks_cached=self._pool.num_cached,
            num_blocks_referenced=self._pool.num_referenced,
            num_waiting_tokens=self.prompts.waiting.num_tokens
            + self.restores.num_tokens_left
            + self.prefixes.num_tokens_left,
            num_started_tokens=num_in_flight + sum([sequence.num_uncomputed for sequence in admitted]),
            num_tokens_in_flight=num_in_flight,
            num_context_tokens=sum([sequence.num_computed for sequence in admitted])
            + sum([sequence.num_computed for sequence in self.running])
            + sum([len(sequence.tokens) for sequence in pulling]),
            num_preemptions=self._num_preemptions,
            num_swap_outs=self.swapping.num_swap_outs,
            num_swap_ins=self.swapping.num_swap_ins,
            num_swap_slots_used=self.swapping.num_slots_used,
            num_guesses=0 if self._speculation is None else self._speculation.num_guesses,
            num_right_guesses=0 if self._speculation is None else self._speculation.num_right,
            num_restored_tokens=self.restores.num_restored_tokens,
            num_restores=self.restores.num_begun,
            num_restores_given_up=self.restores.num_given_up,
            restore_saved_s=self.restores.saved_s,
            tier_failure=self.restores.tier_failure,
        )

    def check_integrity(self) -> None:
        """Recount the pool's blocks, the parked prompts and the host's slots.

        Raises:
            AssertionError: names the broken invariant.
        """
        self._pool.check_integrity()
        self.parking.check_integrity()
        self.swapping.check_integrity()


def _mismatch(result: PullResult, sequence: Sequence) -> str:
    """Mismatch between the pulled prompt and the sequence; empty if they match."""
    if result.first_token is None:
        return "verify: the source granted no first token"
    if not result.first_token.finish and result.num_tokens != len(sequence.tokens):
        return f"verify: KV of {result.num_tokens} tokens for a prompt of {len(sequence.tokens)}"
    return ""


def _is_ahead(local: Sequence, reserving: Sequence) -> bool:
    return local.is_preempted or local.sequence_id < reserving.sequence_id
