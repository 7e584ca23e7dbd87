"""Sequences ordered by time: first to serve, first to expire.

Used by the schedulers for waiting prompts (by the time token 0 is due) and for deadlines. Never reads a clock.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from math import inf
from typing import NamedTuple

from pdserve.engine.scheduling.sequence import Sequence


class _Entry(NamedTuple):
    instant_s: float
    sequence_id: int
    sequence: Sequence
    num_tokens: int
    """Count at the time of the push."""


class SequenceQueue:
    """Earliest time first, then order of arrival."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._in_order: list[_Entry] = []
        self.num_tokens = 0
        """Tokens of all queued sequences, as counted when each was pushed."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self._entries

    def push(self, sequence: Sequence, instant_s: float) -> None:
        assert sequence not in self, f"{sequence.key} is queued twice"
        entry = _Entry(instant_s, sequence.sequence_id, sequence, len(sequence.tokens))
        self._entries[sequence.sequence_id] = entry
        insort(self._in_order, entry)
        self.num_tokens += entry.num_tokens

    def discard(self, sequence: Sequence) -> None:
        entry = self._entries.pop(sequence.sequence_id, None)
        if entry is not None:
            del self._in_order[bisect_left(self._in_order, entry)]
            self.num_tokens -= entry.num_tokens

    def first(self) -> Sequence | None:
        return self._in_order[0].sequence if self._in_order else None

    def first_due(self, now_s: float) -> Sequence | None:
        """Return the first sequence if its time has come."""
        return self.first() if self.first_instant_s() <= now_s else None

    def first_instant_s(self) -> float:
        """Time of the first sequence; infinite if none is queued."""
        return self._in_order[0].instant_s if self._in_order else inf
