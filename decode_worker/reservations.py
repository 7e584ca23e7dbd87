"""Requests whose prompt another worker computes: a queue for blocks, and the pulls in flight.

Blocks for the whole prompt plus headroom are reserved at once, first come first served, and only then does a pull
start: no request holds some blocks while it waits for others. Owned by `pdserve.decode_worker.scheduler`, which
limits the blocks to reserve. Never preempts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from pdserve.contracts.events import RequestEvent, RequestEventKind
from pdserve.contracts.request import KvSource, RequestState
from pdserve.engine.scheduling.interface import AbortPullEvent, PullResult, StartPullEvent
from pdserve.engine.scheduling.sequence import Sequence
from pdserve.engine.scheduling.table import SequenceTable


class _Reservation(NamedTuple):
    sequence: Sequence
    source: KvSource


class Reservations:
    """FIFO of requests that need blocks, and the pulls in flight."""

    def __init__(self, table: SequenceTable, *, pull_timeout_s: float) -> None:
        self._table = table
        self._pull_timeout_s = pull_timeout_s
        self._waiting: deque[_Reservation] = deque()
        self._pulls: dict[int, Sequence] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def pulling(self) -> Iterator[Sequence]:
        """Sequences that will decode once their pull has ended."""
        return (sequence for sequence in self._pulls.values() if not sequence.is_over)

    def first_waiting(self) -> Sequence | None:
        return self._waiting[0].sequence if self._waiting else None

    def push(self, sequence: Sequence, source: KvSource) -> None:
        self._waiting.append(_Reservation(sequence, source))

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence in any state. The targets of its pull stay reserved until the pull has ended."""
        if sequence.is_pulling:
            self._table.events.append(AbortPullEvent(sequence.sequence_id))
        else:
            self._waiting = deque(waiting for waiting in self._waiting if waiting.sequence is not sequence)

    def reserve(self, *, spare_blocks: int, now_s: float) -> int | None:
        """Reserve blocks for the first request in line and start its pull, if it is expected to need at most
        ``spare_blocks`` blocks before it ends. Returns the number of spare blocks taken; ``None`` if the request
        keeps waiting."""
        sequence, source = self._waiting[0]
        cached = self._table.pool.match_prefix(sequence.iter_block_hashes(len(sequence.tokens) // sequence.block_size))
        num_taken = sequence.num_blocks_expected() - len(cached) + self._table.pool.num_unreferenced(cached)
        if num_taken > spare_blocks:
            return None
        self._waiting.popleft()
        self._table.pool.share(cached)
        new_blocks = self._table.pool.allocate(sequence.num_blocks_with_headroom() - len(cached))
        sequence.start_at(cached, new_blocks)
        self._start_pull(sequence, source, len(cached), now_s)
        return num_taken

    def _start_pull(self, sequence: Sequence, source: KvSource, num_cached_blocks: int, now_s: float) -> None:
        waited_s = now_s - sequence.arrived_s
        num_tokens = len(sequence.tokens)
        sequence.state = RequestState.HANDOFF
        sequence.is_pulling = True
        self._pulls[sequence.sequence_id] = sequence
        started = RequestEvent(
            key=sequence.key,
            kind=RequestEventKind.STARTED,
            num_cached_tokens=sequence.num_written,
            waited_s=waited_s,
        )
        pull = StartPullEvent(
            pull_id=sequence.sequence_id,
            source=source,
            num_cached_blocks=num_cached_blocks,
            block_ids=tuple(sequence.block_table[num_cached_blocks : sequence.num_blocks_for(num_tokens)]),
            num_tokens=num_tokens,
            deadline_s=min(self._pull_timeout_s, sequence.request.deadline_s - waited_s),
        )
        self._table.events += [started, pull]

    def finish(self, result: PullResult) -> Sequence | None:
        """Handle the end of a pull, after which nothing writes to its targets. Returns its sequence unless that has
        ended."""
        sequence = self._pulls.pop(result.pull_id)
        sequence.is_pulling = False
        if sequence.is_over:
            self._table.settle(sequence)
            return None
        return sequence
