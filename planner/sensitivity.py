"""Sensitivity of a plan: the losers at the winner's rate, the rate at which the winner saturates, and the effect of
faster or slower steps.

Used by `pdserve.planner.search`, which runs the simulations and then reads the results here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

from pdserve.planner.attainment import Attainment
from pdserve.planner.goodput import OneRate, RateSearch, Trial, slowed
from pdserve.planner.goodput_search import GoodputSearch
from pdserve.planner.plan import Sensitivity
from pdserve.planner.ranking import Entry

_TIME_FACTORS = (0.9, 1.1)
_TOLERANCE = 0.1
"""Tolerance of goodputs that are only used in ratios."""
_SATURATION = 1.25
"""Start rate for saturation, as a multiple of the goodput."""


class SensitivityAnalysis:
    """Analyses one winner. Saturation and sensitivity are ratios of equally short runs."""

    def __init__(
        self, winner: Entry, losers: Sequence[Entry], rate: float, *, tolerance: float, short: Trial, long: Trial
    ) -> None:
        """
        Args:
            losers: the other finalists.
            rate: at which the losers are simulated.
            tolerance: of goodputs, as a share; an existing result at a rate this near is reused.
            short: trial of the winner, for ratios.
            long: trial with one seed, of any layout.
        """
        assert winner.screened is not None
        self._winner = winner
        self._known = [_seen_near(loser, rate, tolerance) for loser in losers]
        self._at_rate = [
            OneRate(replace(long, layout=loser.layout), rate)
            for loser, seen in zip(losers, self._known, strict=True)
            if seen is None
        ]
        short_rate = winner.screened.rate

        def search(trial: Trial, start_rate: float) -> GoodputSearch:
            return GoodputSearch(trial, start_rate, _TOLERANCE, is_bracketed=False)

        halved = replace(short, slo=replace(short.slo, attainment=short.slo.attainment / 2))
        self._as_predicted = search(short, short_rate)
        self._saturation = search(halved, short_rate * _SATURATION)
        # Their rates are on a clock of their own: see `slowed`.
        self._slowed = [search(slowed(short, factor), short_rate / sqrt(factor)) for factor in _TIME_FACTORS]

    @property
    def searches(self) -> list[RateSearch]:
        """Searches to run before reading any result."""
        return [*self._at_rate, self._saturation, self._as_predicted, *self._slowed]

    def losers_at_rate(self) -> list[Attainment]:
        """In order of the losers."""
        simulated = iter(self._at_rate)
        return [next(simulated).attainment() if seen is None else seen for seen in self._known]

    def saturation_rate(self) -> float | None:
        """Rate at which the winner's attainment falls to half of its target; ``None`` if its short runs met none."""
        scale = self._scale()
        return None if scale is None else max(self._winner.rate, scale * self._saturation.goodput().rate)

    def sensitivity(self) -> tuple[Sensitivity, ...]:
        """Winner's goodput with faster or slower steps; empty if its short runs met no objective."""
        scale = self._scale()
        if scale is None:
            return ()
        return tuple(
            Sensitivity(factor, scale * each.goodput().rate / factor)
            for factor, each in zip(_TIME_FACTORS, self._slowed, strict=True)
        )

    def _scale(self) -> float | None:
        """Factor from short runs to long ones."""
        rate = self._as_predicted.goodput().rate
        return self._winner.rate / rate if rate else None


def _seen_near(entry: Entry, rate: float, tolerance: float) -> Attainment | None:
    """Result of a finalist near ``rate``."""
    assert entry.final is not None
    seen = entry.final.nearest(rate)
    return seen if seen is not None and abs(seen.rate / rate - 1) <= tolerance else None
