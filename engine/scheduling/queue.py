"""Sequences ordered by time: first to serve, first to expire.

Used by the schedulers for waiting prompts (by the time token 0 is due) and for deadlines. Never reads a clock.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

from pdserve.engine.scheduling.sequence import Sequence

_MIN_STALE = 64
"""Heap entries of removed sequences tolerated before a rebuild."""


class _Entry(NamedTuple):
    instant_s: float
    sequence: Sequence
    num_tokens: int
    """Count at the time of the push."""


class SequenceQueue:
    """Earliest time first, then order of arrival. O(log n), including removal from the middle."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._heap: list[tuple[float, int]] = []
        self.num_tokens = 0
        """Tokens of all queued sequences, as counted when each was pushed."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self._entries

    def push(self, sequence: Sequence, instant_s: float) -> None:
        assert sequence not in self, f"{sequence.key} is queued twice"
        entry = _Entry(instant_s, sequence, len(sequence.tokens))
        self._entries[sequence.sequence_id] = entry
        self.num_tokens += entry.num_tokens
        heappush(self._heap, (instant_s, sequence.sequence_id))

    def discard(self, sequence: Sequence) -> None:
        entry = self._entries.pop(sequence.sequence_id, None)
        if entry is None:
            return
        self.num_tokens -= entry.num_tokens
        if len(self._heap) > 2 * len(self._entries) + _MIN_STALE:
            self._heap = [(entry.instant_s, sequence_id) for sequence_id, entry in self._entries.items()]
            heapify(self._heap)

    def first(self) -> Sequence | None:
        entry = self._first_entry()
        return entry.sequence if entry is not None else None

    def first_due(self, now_s: float) -> Sequence | None:
        """Return the first sequence if its time has come."""
        entry = self._first_entry()
        return entry.sequence if entry is not None and entry.instant_s <= now_s else None

    def first_instant_s(self) -> float:
        """Time of the first sequence; infinite if none is queued."""
        entry = self._first_entry()
        return entry.instant_s if entry is not None else inf

    def _first_entry(self) -> _Entry | None:
        while self._heap:
            instant_s, sequence_id = self._heap[0]
            entry = self._entries.get(sequence_id)
            if entry is not None and entry.instant_s == instant_s:
                return entry
            heappop(self._heap)
        return None
