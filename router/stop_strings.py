"""Finds stop strings in text that arrives in pieces.

Text that may be the beginning of a stop string is held back, so that nothing of it is written before it is known to be
none. The cut does not depend on how the text was divided: it is before the stop string that is complete first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopScan(NamedTuple):
    """What may be written, and whether a stop string was found at its end."""

    text: str
    is_stopped: bool


class StopStrings:
    """The stop strings of one answer, none of them empty."""

    def __init__(self, stops: Sequence[str], *, are_shown: bool = False) -> None:
        """``are_shown``: the text ends with the stop string instead of before it."""
        assert all(stops)
        self._stops = tuple(stops)
        self._are_shown = are_shown
        self._held = ""

    def push(self, text: str) -> StopScan:
        """Take the next piece of text. After a stop nothing more may be pushed."""
        if not self._stops:
            return StopScan(text, False)
        text = self._held + text
        found = self._find(text)
        if found is not None:
            end, start = found
            return StopScan(text[: end if self._are_shown else start], True)
        safe = len(text) - self._num_doubtful(text)
        self._held = text[safe:]
        return StopScan(text[:safe], False)

    def flush(self) -> str:
        """What was held back and is no stop string after all, at the end of the answer."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, int] | None:
        """End and start of the stop string that ends first; of the longest of those that end together."""
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(found, default=None)

    def _num_doubtful(self, text: str) -> int:
        """Length of the longest end of ``text`` that is the beginning of a stop string."""
        return max(_overlap(text, stop) for stop in self._stops)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that ``stop`` begins with and goes on after."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
