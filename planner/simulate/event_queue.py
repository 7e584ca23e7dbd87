"""Virtual clock and event queue of the simulation: calls in order of time, ties in order of insertion.

Used by the simulator. Knows neither workers nor requests; never reads a real clock.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush


class EventQueue:
    """Pending calls at instants of the simulation."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._entries: list[tuple[float, int, Callable[[], None]]] = []
        self._num_entered = 0

    def at(self, instant_s: float, call: Callable[[], None]) -> None:
        """Call ``call`` at ``instant_s``, or now if that has passed."""
        self._num_entered += 1
        heappush(self._entries, (instant_s, self._num_entered, call))

    def run(self) -> None:
        """Make calls until none is left."""
        entries = self._entries
        while entries:
            instant_s, _, call = heappop(entries)
            if instant_s > self.now_s:
                self.now_s = instant_s
            call()
