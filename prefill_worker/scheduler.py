"""Scheduler of prompts: which prompts a worker computes next, in what chunks, and where they go afterwards.

Life of a prompt: `PrefillScheduler.add` queues it by the time token 0 is due. It is *admitted* when its turn comes
and blocks for the whole prompt are free, so an admitted prompt never waits for memory. Its chunks fill the token
budget of the steps. With its last chunk it moves to `pdserve.prefill_worker.parking` (a handoff) or, on a worker
that also decodes, to `take_ready`.

Alone it is the scheduler of a prefill worker. Inside `pdserve.decode_worker.scheduler`, on the same table and pool,
it prefills locally and recomputes preempted sequences; the decode scheduler calls `enqueue`, `plan_chunks` and
`take_ready`.

Order: resumed answers first, which clients are reading, then the earliest due token 0, then order of arrival. A prompt
without an objective is due `PATIENCE_S` after its arrival, which prevents starvation: requests that arrive later than
that cannot overtake it. Smaller prompts never overtake a prompt that lacks blocks.

A prompt with *patience* gives way until that ends: it fills no step of prompts without, and its own steps are not
planned while another one is in flight, so that a prompt which arrives then waits for the rest of one step at most.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from pdserve.contracts.events import RequestEventKind, RequestKey, SchedulerLoad
from pdserve.contracts.request import GenerationRequest, KvSource, RequestState
from pdserve.contracts.step import ModelLimits, StepBatch, StepOutput
from pdserve.engine.scheduling.interface import Event, FirstToken, PullResult
from pdserve.engine.scheduling.queue import SequenceQueue
from pdserve.engine.scheduling.sequence import Sequence
from pdserve.engine.scheduling.table import AdmissionBudget, PlannedStep, SequenceTable
from pdserve.kv_transfer.block_pool import BlockPool
from pdserve.prefill_worker.parking import Parking

PATIENCE_S = 10.0
"""A request without a TTFT objective is ordered as if its first token were due this many seconds after arrival."""

DEFAULT_PARK_TIMEOUT_S = 30.0


class PrefillScheduler:
    """Implements `pdserve.engine.scheduling.interface.Scheduler` for a prefill worker."""

    def __init__(
        self,
        pool: BlockPool,
        limits: ModelLimits,
        *,
        mint_handle: Callable[[], bytes],
        max_batch_tokens: int,
        max_batch_size: int,
        park_timeout_s: float = DEFAULT_PARK_TIMEOUT_S,
    ) -> None:
        """
        Args:
            mint_handle: returns 16 unguessable bytes, never the same twice.
            max_batch_tokens: maximum number of new tokens in a step.
            max_batch_size: maximum number of prompts admitted and not yet computed.
            park_timeout_s: a parked prompt without a pull is freed after this long.

        Raises:
            ValueError: a limit is below 1.
        """
        if max_batch_tokens < 1 or max_batch_size < 1:
            raise ValueError(
                f"max_batch_tokens {max_batch_tokens} and max_batch_size {max_batch_size} must be 1 or more"
            )
        self.table = SequenceTable(pool, limits)
        self._pool = pool
        self._max_batch_tokens = max_batch_tokens
        self._max_batch_size = max_batch_size
        self._parking = Parking(self.table, park_timeout_s=park_timeout_s, mint_handle=mint_handle)
        self._waiting = SequenceQueue()
        self._admitted: list[Sequence] = []
        self._ready: list[Sequence] = []
        self.is_blocked = False
        """Whether the first waiting prompt was due in the last plan and lacked blocks or a batch slot."""

    # Requests

    def add(self, key: RequestKey, request: GenerationRequest, now_s: float) -> None:
        if not request.handoff:
            self.table.reject(key, "this worker only prefills: send the request with handoff, or to a decode worker")
            return
        sequence = self.table.open(key, request, now_s, is_handoff=True)
        if sequence is not None:
            self.enqueue(sequence)

    def prepare(self, key: RequestKey, request: GenerationRequest, source: KvSource, now_s: float) -> None:
        self.table.reject(key, "this worker only prefills: prepare the request on a decode worker")

    def cancel(self, key: RequestKey, now_s: float) -> None:
        sequence = self.table.get(key)
        if sequence is not None:
            self._end(sequence, RequestEventKind.CANCELLED)

    def enqueue(self, sequence: Sequence) -> None:
        """Queue a sequence for blocks. Preempted ones go first, in order of arrival."""
        self._waiting.push(sequence, _due_s(sequence))

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence in any state."""
        self._waiting.discard(sequence)
        if sequence in self._admitted:
            self._admitted.remove(sequence)
        self._parking.withdraw(sequence)

    def _end(self, sequence: Sequence, kind: RequestEventKind, message: str = "") -> None:
        """End a request on a worker that only prefills."""
        self.drop(sequence)
        self.table.emit(sequence.key, kind, message)
        self.table.close(sequence)

    # Planning

    def plan(self, now_s: float) -> StepBatch | None:
        while (sequence := self.table.past_deadline(now_s)) is not None:
            self._end(sequence, RequestEventKind.FAILED, deadline_message(sequence))
        self.expire_parked(now_s)
        if self.table.must_drain or self.is_idle or (self.table.steps_in_flight and self._is_patient(now_s)):
            return None
        step = self.table.begin_step()
        budget = AdmissionBudget(self._max_batch_size - len(self._admitted), self._pool.num_available)
        self.plan_chunks(step, budget, max_tokens=self._max_batch_tokens, now_s=now_s)
        return self.table.commit(step)

    def expire_parked(self, now_s: float) -> None:
        for sequence in self._parking.take_expired(now_s):
            self._end(sequence, RequestEventKind.KV_UNAVAILABLE, "parked: nobody pulled the prompt in time")

    def plan_chunks(
        self,
        step: PlannedStep,
        budget: AdmissionBudget,
        *,
        max_tokens: int,
        now_s: float,
        fit: Callable[[int, int], int] | None = None,
    ) -> None:
        """Add chunks of up to ``max_tokens`` new tokens to a step in order of due time, and admit waiting prompts as
        ``max_tokens`` and ``budget`` allow.

        Args:
            fit: how many of so many tokens, after so many cached ones, the next chunk may have; all by default.
        """
        self.is_blocked = False
        index = 0
        while max_tokens > 0:
            head = self._waiting.first()
            if head is not None and not self.is_blocked and self._goes_before(head, index):
                if index and _gives_way(head, self._admitted[0], now_s):
                    break
                self.is_blocked = not self._try_admit(head, index, budget, now_s)
            if index == len(self._admitted):
                break
            sequence = self._admitted[index]
            if index and _gives_way(sequence, self._admitted[0], now_s):
                break
            num_wanted = num_tokens = min(max_tokens, sequence.num_uncomputed)
            if fit is not None:
                num_tokens = fit(num_wanted, sequence.num_computed)
            if num_tokens:
                step.add_chunk(sequence, num_tokens)
            if num_tokens < num_wanted:
                break
            max_tokens -= num_tokens
            index += 1
        self._hand_over()

    def _is_patient(self, now_s: float) -> bool:
        """Whether the first prompt to be computed has patience left."""
        firsts = [sequence for sequence in (self._waiting.first(), *self._admitted[:1]) if sequence is not None]
        return _has_patience(min(firsts, key=_order), now_s)

    def _goes_before(self, head: Sequence, index: int) -> bool:
        return index == len(self._admitted) or _order(head) < _order(self._admitted[index])

    def _try_admit(self, sequence: Sequence, index: int, budget: AdmissionBudget, now_s: float) -> bool:
        """Move the first waiting prompt to ``index`` of the admitted ones, with blocks for all of its tokens, if it
        can be admitted now."""
        if budget.num_slots <= 0 or not sequence.is_idle or (sequence.is_handoff and not self._may_park(sequence)):
            return False
        # At least the last token is recomputed, to sample after it; the whole prompt if its logprobs are requested.
        num_cacheable = 0 if sequence.wants_prompt_logprobs else (len(sequence.tokens) - 1) // sequence.block_size
        if not self.table.start(sequence, budget, num_cacheable):
            return False
        self._waiting.discard(sequence)
        self._admitted.insert(index, sequence)
        if sequence.state is RequestState.QUEUED:
            sequence.state = RequestState.PREFILLING
            self.table.emit_started(sequence, now_s)
        return True

    def _may_park(self, sequence: Sequence) -> bool:
        """Whether the sequence may be parked. Parked and soon parked prompts take at most half of the pool; a single
        prompt may exceed that."""
        num_taken = self._parking.num_blocks + sum(len(s.block_table) for s in self._admitted if s.is_handoff)
        num_blocks = sequence.num_blocks_for(len(sequence.tokens))
        return not num_taken or 2 * (num_taken + num_blocks) <= self._pool.num_blocks

    def _hand_over(self) -> None:
        """Move prompts whose last chunk is planned to the next stage. One that ends with its next token is offered to
        nobody: token 0 closes it."""
        planned = [sequence for sequence in self._admitted if not sequence.num_uncomputed]
        if not planned:
            return
        self._admitted = [sequence for sequence in self._admitted if sequence.num_uncomputed]
        for sequence in planned:
            self.table.stop_waiting(sequence)
            if not sequence.is_handoff:
                self._ready.append(sequence)
            elif len(sequence.tokens) + 1 < sequence.max_length:
                sequence.state = RequestState.HANDOFF
                self._parking.offer(sequence)

    def take_ready(self) -> list[Sequence]:
        """Return sequences that are not handed off and whose last chunk is planned. They decode from the next step
        on; the sampled token is pending."""
        ready, self._ready = self._ready, []
        return ready

    # Results

    def complete(self, output: StepOutput, now_s: float) -> None:
        for sequence, token in self.table.complete(output):
            self.take_result(sequence, token, now_s)
        for sequence, message in self.table.take_failed():
            self._end(sequence, RequestEventKind.FAILED, message)

    def take_result(self, sequence: Sequence, token: FirstToken | None, now_s: float) -> None:
        """Grant the blocks a handoff has written and park it with token 0; close a finished sequence."""
        if sequence.handle and token is not None:
            self._parking.park(sequence, token, now_s)
        elif sequence.handle:
            self._parking.grant_written(sequence)
        if token is not None and token.finish:
            self._waiting.discard(sequence)
            self.table.close(sequence)

    def fail_step(self, step_id: int, message: str, now_s: float) -> None:
        for sequence in self.table.fail_step(step_id):
            self._end(sequence, RequestEventKind.FAILED, message)

    # Transfers

    def pull_done(self, result: PullResult, now_s: float) -> None:
        raise AssertionError("a prefill worker starts no pull")

    def set_leased(self, handle: bytes, is_leased: bool) -> None:
        self._parking.set_leased(handle, is_leased)

    def released(self, handle: bytes) -> None:
        sequence = self._parking.take_released(handle)
        if sequence is not None:
            self.table.emit(sequence.key, RequestEventKind.RELEASED)
            self.table.close(sequence)

    # What others see

    @property
    def admitted(self) -> list[Sequence]:
        """Sequences that hold blocks and have chunks to plan. Callers must not modify the list."""
        return self._admitted

    @property
    def is_idle(self) -> bool:
        """Whether no prompt waits or is being computed. Prompts may be parked."""
        return not self._waiting and not self._admitted

    def first_waiting(self) -> Sequence | None:
        return self._waiting.first()

    def next_deadline_s(self) -> float | None:
        first_s = min(self._parking.next_expiry_s(), self.table.next_deadline_s())
        return first_s if first_s < inf else None

    def take_events(self) -> list[Event]:
        return self.table.take_events()

    def load(self) -> SchedulerLoad:
        num_in_flight = self.table.num_chunk_tokens_in_flight
        return SchedulerLoad(
            num_running=len(self._admitted),
            num_waiting=len(self._waiting),
            num_parked=self._parking.num_parked,
            num_blocks_parked=self._parking.num_blocks,
            num_blocks_free=self._pool.num_free,
            num_blocks_cached=self._pool.num_cached,
            num_blocks_referenced=self._pool.num_referenced,
            num_waiting_tokens=self._waiting.num_tokens,
            num_started_tokens=num_in_flight + sum([sequence.num_uncomputed for sequence in self._admitted]),
            num_tokens_in_flight=num_in_flight,
            num_context_tokens=sum([sequence.num_computed for sequence in self._admitted]),
        )

    def check_integrity(self) -> None:
        """Recount the pool's blocks and the parked prompts.

        Raises:
            AssertionError: names the broken invariant.
        """
        self._pool.check_integrity()
        self._parking.check_integrity()


def deadline_message(sequence: Sequence) -> str:
    return f"deadline: {sequence.request.deadline_s:g} s have passed since the worker received the request"


def _due_s(sequence: Sequence) -> float:
    """Time at which token 0 is due. A preempted sequence is always late, and so is a resumed answer."""
    if sequence.state is RequestState.PREEMPTED or sequence.request.emitted_tokens:
        return -inf
    return sequence.arrived_s + (sequence.request.ttft_slo_s or PATIENCE_S)


def _order(sequence: Sequence) -> tuple[float, int]:
    return _due_s(sequence), sequence.sequence_id


def _has_patience(sequence: Sequence, now_s: float) -> bool:
    return now_s < sequence.arrived_s + sequence.request.patience_s and sequence.state is not RequestState.PREEMPTED


def _gives_way(sequence: Sequence, first: Sequence, now_s: float) -> bool:
    """Whether a prompt leaves the rest of a step that another one began."""
    return _has_patience(sequence, now_s) and not _has_patience(first, now_s)
