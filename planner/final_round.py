"""Picks the best finalist of one kind, colocated or disaggregated.

While the choice is open, the best finalist so far and the ones about as good get as many simulations as their goodput
needs. Used by `pdserve.planner.search`, which runs both kinds in parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdserve.planner.goodput import Run
from pdserve.planner.ranking import Entry, Ranking
from pdserve.planner.simulation import Simulation


class FinalRound:
    """Fills in `Entry.final`; a `RateSearch`."""

    def __init__(self, ranking: Ranking, entries: Sequence[Entry], tolerance: float, done: Callable[[], None]) -> None:
        """
        Args:
            entries: of one kind, each with a rough search.
            tolerance: of goodputs, as a share.
            done: called after every simulation.
        """
        self._ranking = ranking
        self._tolerance = tolerance
        self._searches = {entry: entry.search for entry in entries if entry.search is not None}
        self._done = done

    def ask(self) -> list[Run]:
        while True:
            runs = [run for search in self._searches.values() for run in search.ask()]
            if runs:
                return runs
            for entry, search in self._searches.items():
                entry.final = search.goodput()
            unsettled = [search for search in map(self._searches.__getitem__, self._leaders()) if not search.is_settled]
            if not unsettled:
                return []
            for search in unsettled:
                search.settle()

    def _leaders(self) -> list[Entry]:
        """The best, and all within half of a goodput's tolerance of it."""
        key, ranked = self._ranking.key, self._ranking.ranked(self._searches)
        best = key(ranked[0], ranked[0].rate)
        return [entry for entry in ranked if key(entry, entry.rate * (1 + self._tolerance / 2)) <= best]

    def tell(self, run: Run, simulation: Simulation) -> None:
        next(search for search in self._searches.values() if search.trial is run.trial).tell(run, simulation)
        self._done()

    @property
    def num_requests(self) -> int:
        return sum(search.num_requests for search in self._searches.values())


def start_rate(guess: float, shared_rates: Sequence[float], tolerance: float) -> float:
    """Start rate of a finalist with an expected goodput of ``guess``: a rate of other finalists if one lies within
    ``tolerance``, so that differences come from the layouts."""
    nearest = min(shared_rates, key=lambda rate: abs(guess / rate - 1))
    return nearest if abs(guess / nearest - 1) <= tolerance else guess
