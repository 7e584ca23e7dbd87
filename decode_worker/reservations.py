"""Requests whose prompt another worker computes: a queue for blocks, and the pulls in flight.

Blocks for the whole prompt plus headroom are reserved at once, and only then does a pull start: no request holds some
blocks while it waits for others. First come those with the best chance per block to meet their TPOT objective in spite
of the wait; one in `OLDEST_EVERY` is the oldest, so that none starves. Without objectives, first come, first served.
A pull may wait for grants until its request's deadline, as the step of the last chunk may take minutes; gRPC notices a
source that is lost, and the transport one that sends nothing of what it granted.
Owned by `pdserve.engine.worker.scheduler`, which limits the blocks to reserve. Never preempts.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log

from pdserve.contracts.request import KvSource
from pdserve.engine.scheduling.interface import AbortPullEvent, PullResult, StartPullEvent
from pdserve.engine.scheduling.sequence import Sequence
from pdserve.engine.scheduling.table import AdmissionBudget, SequenceTable

OLDEST_EVERY = 8
"""One in so many reservations is for the oldest request: the n-th oldest waits for at most n times so many others."""


class Reservations:
    """Requests that need blocks, in order, and the pulls in flight."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        self._waiting: dict[Sequence, KvSource] = {}
        """In order of arrival."""
        self._with_objective: dict[Sequence, float] = {}
        """Those that have a TPOT objective to lose, with the logarithm of their blocks; in order of arrival."""
        self._num_reserved = 0
        self._pulls: dict[int, Sequence] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def pulling(self) -> Iterator[Sequence]:
        """Sequences that will decode once their pull has ended."""
        return (sequence for sequence in self._pulls.values() if not sequence.is_over)

    def first_waiting(self, now_s: float) -> Sequence | None:
        """Next one to reserve blocks."""
        if self._num_reserved % OLDEST_EVERY == 0 or not self._with_objective:
            return next(iter(self._waiting), None)

        def rank(sequence: Sequence) -> float:
            """- log(chance per block). With lengths of a constant hazard, the chance to end within TPOT falls by 1 / e
            in every ``stall_slo_s`` of wait."""
            waited_s = now_s - sequence.arrived_s
            return self._with_objective[sequence] + waited_s / sequence.request.stall_slo_s

        return min(self._with_objective, key=rank)

    def push(self, sequence: Sequence, source: KvSource) -> None:
        self._waiting[sequence] = source
        if sequence.request.stall_slo_s:
            self._with_objective[sequence] = log(sequence.num_blocks_expected())

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence in any state. The targets of its pull stay reserved until the pull has ended."""
        if sequence.is_pulling:
            self._table.events.append(AbortPullEvent(sequence.sequence_id))
        else:
            self._waiting.pop(sequence, None)
            self._with_objective.pop(sequence, None)

    def reserve(self, sequence: Sequence, budget: AdmissionBudget, now_s: float) -> bool:
        """Reserve blocks for a waiting request and start its pull, if it fits ``budget``; returns whether it does."""
        source = self._waiting[sequence]
        num_tokens = len(sequence.tokens)
        if not self._table.start(sequence, budget, num_tokens // sequence.block_size):
            return False
        del self._waiting[sequence]
        self._with_objective.pop(sequence, None)
        self._num_reserved += 1
        num_cached_blocks = sequence.num_registered_blocks
        sequence.is_pulling = True
        self._pulls[sequence.sequence_id] = sequence
        pull = StartPullEvent(
            pull_id=sequence.sequence_id,
            source=source,
            num_cached_blocks=num_cached_blocks,
            block_ids=tuple(sequence.block_table[num_cached_blocks : sequence.num_blocks_for(num_tokens)]),
            num_tokens=num_tokens,
            deadline_s=sequence.request.deadline_s - (now_s - sequence.arrived_s),
        )
        self._table.emit_started(sequence, now_s)
        self._table.events.append(pull)
        return True

    def finish(self, result: PullResult) -> Sequence | None:
        """Handle the end of a pull, after which nothing writes to its targets. Returns its sequence unless that has
        ended."""
        return self._table.end_pull(self._pulls.pop(result.pull_id))
