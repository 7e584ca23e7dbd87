"""Prompts to compute: which ones come next, in what chunks, and where they go afterwards.

Life of a prompt: `Prompts.enqueue` queues it by the time token 0 is due. It is *admitted* when its turn comes and
blocks for the whole prompt are free, so an admitted prompt never waits for memory. If its request names a worker to
pull a prefix from, that comes first, while others are computed. Its chunks fill the token budget of the steps. With its
last chunk it moves to `pdserve.prefill_worker.parking` (a handoff), or decodes here.

Order: resumed answers first, which clients are reading, in the order in which they would be given up: the one whose
client has waited longest, however often it was lost. Then the earliest due token 0, then order of arrival. A prompt
without an objective is due `DUE_WITHOUT_OBJECTIVE_S` after its arrival, which prevents starvation: requests that arrive
later than that cannot overtake it. Smaller prompts never overtake a prompt that lacks blocks.

A prompt with *patience* gives way until that ends: it fills no step of prompts without, and while nothing here is to
decode, its own steps are not planned while another one is in flight, so that a prompt which arrives then waits for
the rest of one step at most.

Owned by `pdserve.engine.worker.scheduler`, which limits the tokens, sequences and blocks.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from math import inf

from pdserve.engine.scheduling.interface import PullResult
from pdserve.engine.scheduling.prefixes import PrefixPulls
from pdserve.engine.scheduling.queue import SequenceQueue
from pdserve.engine.scheduling.sequence import Sequence
from pdserve.engine.scheduling.table import AdmissionBudget, PlannedStep, SequenceTable
from pdserve.prefill_worker.parking import Parking
from pdserve.prefill_worker.restores import Restores

DUE_WITHOUT_OBJECTIVE_S = 10.0
"""A request without a TTFT objective is ordered as if its first token were due this many seconds after arrival."""
_RESUMED_S = -1e9
"""Added to the deadlines of resumed answers, so that they go before all other prompts."""


class Prompts:
    """Prompts that wait, and those of which chunks are computed."""

    def __init__(self, table: SequenceTable, parking: Parking, restores: Restores, prefixes: PrefixPulls) -> None:
        self._table = table
        self._parking = parking
        self._restores = restores
        self._prefixes = prefixes
        self.waiting = SequenceQueue()
        """In the order in which they are admitted; callers must not modify it."""
        self.admitted: list[Sequence] = []
        """Those that hold blocks and have chunks to plan; callers must not modify the list."""
        self.is_blocked = False
        """Whether the first waiting prompt was due in the last plan and lacked blocks or a batch slot."""

    @property
    def is_idle(self) -> bool:
        """Whether no prompt waits or is being computed. Prompts may be parked, or wait for the pull of a prefix."""
        return not self.waiting and not self.admitted

    def enqueue(self, sequence: Sequence) -> None:
        """Queue a sequence for blocks. Preempted ones go first, in order of arrival."""
        self.waiting.push(sequence, _due_s(sequence))

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence, if it waits or is admitted."""
        self.waiting.discard(sequence)
        self._restores.drop(sequence)
        if sequence in self.admitted:
            self.admitted.remove(sequence)

    def is_patient(self, now_s: float) -> bool:
        """Whether there are prompts, and the first one to be computed has patience left."""
        firsts = [sequence for sequence in (self.waiting.first(), *self.admitted[:1]) if sequence is not None]
        return bool(firsts) and _has_patience(min(firsts, key=_order), now_s)

    def plan_chunks(
        self,
        step: PlannedStep,
        budget: AdmissionBudget,
        *,
        max_tokens: int,
        now_s: float,
        fit: Callable[[int, int], int] | None = None,
    ) -> list[Sequence]:
        """Add chunks of up to ``max_tokens`` new tokens to a step in order of due time, and admit waiting prompts as
        ``max_tokens`` and ``budget`` allow. Return the sequences that are not handed off and whose last chunk is
        planned: they decode from the next step on, and the sampled token is pending.

        Args:
            fit: how many of so many tokens, after so many cached ones, the next chunk may have; all by default.
        """
        self.is_blocked = False
        index = 0
        while max_tokens > 0:
            head = self.waiting.first()
            if head is not None and not self.is_blocked and self._goes_before(head, index):
                if index and _gives_way(head, self.admitted[0], now_s):
                    break
                if self._may_admit(head, budget) and self._restores.begin(head, budget, _num_cacheable(head), now_s):
                    self.waiting.discard(head)
                    continue
                self.is_blocked = not self._try_admit(head, index, budget, now_s)
                if head.is_pulling:
                    continue
            if index == len(self.admitted):
                break
            sequence = self.admitted[index]
            if index and _gives_way(sequence, self.admitted[0], now_s):
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
        return self._hand_over()

    def _goes_before(self, head: Sequence, index: int) -> bool:
        return index == len(self.admitted) or _order(head) < _order(self.admitted[index])

    def _may_admit(self, sequence: Sequence, budget: AdmissionBudget) -> bool:
        """Whether a prompt can be admitted now if there are blocks for it."""
        return budget.num_slots > 0 and sequence.is_idle and (not sequence.is_handoff or self._may_park(sequence))

    def _try_admit(self, sequence: Sequence, index: int, budget: AdmissionBudget, now_s: float) -> bool:
        """Move the first waiting prompt to ``index`` of the admitted ones, with blocks for all of its tokens, if it
        can be admitted now. One that pulls a prefix follows when that has ended (`pull_ended`)."""
        num_cacheable = _num_cacheable(sequence)
        if not self._may_admit(sequence, budget) or not self._table.start(sequence, budget, num_cacheable):
            return False
        self.waiting.discard(sequence)
        if not self._prefixes.try_start(sequence, num_cacheable):
            self.admitted.insert(index, sequence)
            if not sequence.is_preempted:
                self._table.emit_started(sequence, now_s)
        return True

    def pull_ended(self, result: PullResult, now_s: float) -> None:
        """Have the prompt computed whose pull of a prefix has ended, from the first token without KV."""
        sequence = self._prefixes.finish(result)
        if sequence is not None:
            insort(self.admitted, sequence, key=_order)
            self._table.emit_started(sequence, now_s)

    def _may_park(self, sequence: Sequence) -> bool:
        """Whether the sequence may be parked. Parked and soon parked prompts take at most half of the pool; a single
        prompt may exceed that."""
        begun = (*self.admitted, *self._prefixes.sequences())
        num_taken = self._parking.num_blocks + sum(len(s.block_table) for s in begun if s.is_handoff)
        num_blocks = sequence.num_blocks_for(len(sequence.tokens))
        return not num_taken or 2 * (num_taken + num_blocks) <= self._table.pool.num_blocks

    def _hand_over(self) -> list[Sequence]:
        """Park prompts whose last chunk is planned; return those to decode here. One that ends with its next token is
        offered to nobody: token 0 closes it."""
        planned = [sequence for sequence in self.admitted if not sequence.num_uncomputed]
        if not planned:
            return planned
        self.admitted = [sequence for sequence in self.admitted if sequence.num_uncomputed]
        for sequence in planned:
            self._table.deadlines.discard(sequence)
            if sequence.is_handoff and len(sequence.tokens) + 1 < sequence.max_length:
                self._parking.offer(sequence)
        return [sequence for sequence in planned if not sequence.is_handoff]


def _num_cacheable(sequence: Sequence) -> int:
    """Blocks that need not be computed. The last token is, to sample after it; all if it asks for logprobs."""
    return 0 if sequence.wants_prompt_logprobs else (len(sequence.tokens) - 1) // sequence.block_size


def _due_s(sequence: Sequence) -> float:
    """Time at which token 0 is due. A preempted sequence is always late, and so is a resumed answer."""
    if sequence.is_preempted:
        return -inf
    if sequence.request.emitted_tokens:
        return _RESUMED_S + sequence.arrived_s + sequence.request.deadline_s
    return sequence.arrived_s + (sequence.request.ttft_slo_s or DUE_WITHOUT_OBJECTIVE_S)


def _order(sequence: Sequence) -> tuple[float, int]:
    return _due_s(sequence), sequence.sequence_id


def _has_patience(sequence: Sequence, now_s: float) -> bool:
    return now_s < sequence.arrived_s + sequence.request.patience_s and not sequence.is_preempted


def _gives_way(sequence: Sequence, first: Sequence, now_s: float) -> bool:
    """Whether a prompt leaves the rest of a step that another one began."""
    return _has_patience(sequence, now_s) and not _has_patience(first, now_s)
