"""Searches for the goodput of one layout.

Near the target, the share of requests that miss grows roughly as a power of the rate. `GoodputSearch` fits that power
to the results so far and tries the rate at which the curve crosses the target, until the crossing is near a tried rate:
the crossing is the goodput. The first seed finds the rate; the other seeds are spent near it. A run at a hopeless rate
stops as soon as too many requests have missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf, log, sqrt

from pdserve.planner.attainment import Attainment, Interval
from pdserve.planner.goodput import Goodput, Run, Trial, measured
from pdserve.planner.simulation import Simulation

_POWER, _POWER_BEYOND = 4.0, 8.0
"""Default exponents of missed requests over rate, if only one rate is known: for a rate that meets the target, and for
one beyond the goodput, where misses grow faster. Exponents observed near it are 2 to 8."""
_POWER_OF_STOPPED = 3.0
"""The same for a run that was stopped early: most requests in flight would have missed too."""
_LEAST_POWER, _MOST_POWER = 1.0, 12.0
"""Range of the exponent between two rates."""
_POWER_IN_DOUBT = 0.6
"""Factor on the exponent for confidence intervals; with it, intervals on known curves contain the goodput."""
_LONGEST_STEP = 1.3
"""Largest step upwards from the first rate; grows with each further rate."""
_MOST_OF_WAY = 0.85
"""Largest part of the way to a rate beyond the goodput."""
_SIDE_STEP = 0.9
"""Step from a rate to one on the other side of the goodput."""
_WIDEST_BRACKET = 1.3
"""Widest ratio of a failing to a passing rate; within a wider one, a curve may take any shape."""
_MAX_RATES = 10
"""Rates per search."""


class GoodputSearch:
    """Finds the highest rate that meets the target; a `RateSearch`."""

    def __init__(
        self,
        trial: Trial,
        start_rate: float,
        tolerance: float,
        max_rate: float = inf,
        *,
        is_rough: bool = False,
        is_bracketed: bool = True,
    ) -> None:
        """
        Args:
            start_rate: a guess.
            tolerance: largest distance of the goodput from a simulated rate, as a share.
            max_rate: the highest rate to try.
            is_rough: until `settle`, stop after one run that ran to its end and in which some requests missed.
            is_bracketed: simulate a rate on either side of the goodput, which gives its confidence; otherwise one rate
                that meets the target is enough.
        """
        assert start_rate > 0
        self.trial = trial
        self._tolerance = tolerance
        self._max_rate = max_rate
        self._start_rate = self._capped(start_rate)
        self._is_rough = is_rough
        self._is_bracketed = is_bracketed
        self._allowed = max(1 - trial.slo.attainment, 0.5 / trial.num_requests)
        """Share of requests that may miss."""
        self._runs: dict[float, dict[int, Simulation]] = {}
        self._points: dict[float, Attainment] = {}
        """Result of all runs at each rate."""
        self._missed: dict[float, float] = {}
        """Share of requests that missed in the first seed's run, used to compare rates."""

    @property
    def is_settled(self) -> bool:
        return not self._is_rough

    def settle(self) -> None:
        """Continue to the full precision of the trial and the tolerance."""
        self._is_rough = False

    def ask(self) -> list[Run]:
        seeds = self.trial.seeds
        first = seeds[:1]
        if not self._points:
            return self._asked(self._start_rate, first)
        if len(self._points) >= _MAX_RATES:
            return []
        near = self._nearest()
        if near is None:
            # All were stopped or passed. Take growing steps: runs far beyond the goodput stop at about the same share.
            power = _POWER_OF_STOPPED / max(1, len(self._points) - 1)
            return self._asked(self._crossing(self._points[min(self._points)], power), first)
        if not self._is_near(near):
            return self._asked(self._crossing(near), seeds if self._is_complete(near) else first)
        if self._is_rough:
            return []
        if self._rates_met() and not self._is_bracketed:
            return self._asked(near.rate, seeds)
        return self._asked(near.rate, seeds) + self._asked(self._other_side(near), first)

    def tell(self, run: Run, simulation: Simulation) -> None:
        runs = self._runs.setdefault(run.rate, {})
        runs[run.seed] = simulation
        in_order = [runs[seed] for seed in self.trial.seeds if seed in runs]
        self._points[run.rate] = measured(self.trial, run.rate, in_order)
        if run.seed == self.trial.seeds[0]:
            self._missed[run.rate] = self._missed_share(measured(self.trial, run.rate, [simulation]), num_runs=1)

    @property
    def num_requests(self) -> int:
        return sum(point.num_requests for point in self._points.values())

    def _asked(self, rate: float, seeds: Sequence[int]) -> list[Run]:
        known = self._runs.get(rate, {})
        is_whole = (self._is_rough and len(self.trial.seeds) > 1) or len(seeds) > 1
        return [Run(self.trial, rate, seed, is_whole) for seed in seeds if seed not in known]

    def _missed_share(self, point: Attainment, num_runs: int) -> float:
        """Above 0. For a stopped run, the minimum share among the requests that arrived until then."""
        come_share = point.num_requests / (self.trial.num_requests * num_runs) if point.is_partial else 1.0
        return max((1 - point.share) / come_share, self._least_missed(point))

    def _least_missed(self, point: Attainment) -> float:
        """Stands in for 0 misses, which have no exponent; always well below the allowed share."""
        return min(0.5 / max(point.num_counted, 1), 0.25 * self._allowed)

    def _rates_met(self) -> list[float]:
        return [point.rate for point in self._points.values() if point.meets(self.trial.slo.attainment)]

    def _other_side(self, near: Attainment) -> float:
        """Next rate for the other end, if the goodput is not yet between two close rates: first next to ``near``, then
        in the middle. Otherwise a rate that was tried."""
        met, step = self._rates_met(), min(_SIDE_STEP, 1 - self._tolerance)
        if not met:
            return min(self._points) * step
        highest = max(met)
        beyond = [rate for rate in self._points if rate > highest]
        if not beyond:
            return self._capped(highest * max(1 / step, _LONGEST_STEP ** (len(self._points) - 2)))
        lowest = min(beyond)
        if lowest <= highest * _WIDEST_BRACKET:
            return highest
        if near.rate == highest:
            return highest / step
        return lowest * step if near.rate == lowest else sqrt(highest * lowest)

    def _capped(self, rate: float) -> float:
        """``max_rate`` if ``rate`` is within the tolerance of it."""
        return rate if rate * (1 + self._tolerance) < self._max_rate else self._max_rate

    def _nearest(self) -> Attainment | None:
        """The point nearest to the goodput, of the complete and not passed ones with the most seeds."""
        return min(
            [point for point in self._points.values() if not point.is_partial and not self._is_passed(point)],
            key=lambda point: (-len(self._runs[point.rate]), abs(log(self._crossing(point) / point.rate))),
            default=None,
        )

    def _is_passed(self, point: Attainment) -> bool:
        """Whether another tried rate lies between it and the goodput, with as many seeds or stopped early."""
        num_seeds, ends = len(self._runs[point.rate]), sorted((point.rate, self._crossing(point)))
        return any(
            ends[0] <= other.rate <= ends[1] and (other.is_partial or len(self._runs[other.rate]) >= num_seeds)
            for other in self._points.values()
            if other is not point
        )

    def _is_complete(self, point: Attainment) -> bool:
        return len(self._runs[point.rate]) == len(self.trial.seeds)

    def _is_near(self, point: Attainment) -> bool:
        """Whether the goodput lies within the tolerance, which is twice as wide while seeds are missing."""
        rate = self._crossing(point)
        if self._is_rough:  # A rate that nearly all requests meet gives too little information.
            return rate < point.rate * _LONGEST_STEP
        tolerance = self._tolerance * (1 if self._is_complete(point) else 2)
        is_within = abs(log(rate / point.rate)) <= log(1 + tolerance) + 1e-9
        return is_within and (rate < self._max_rate or point.rate == self._max_rate)

    def _crossing(self, point: Attainment, power: float | None = None) -> float:
        """The rate, ``max_rate`` at most, at which the allowed share of requests misses, extrapolated from one point;
        stays on this side of rates known to be beyond it."""
        missed, target = self._missed_share(point, len(self._runs[point.rate])), self.trial.slo.attainment
        is_up = missed < self._allowed
        if power is None:
            power = self._power(point.rate, _POWER if is_up else _POWER_BEYOND, is_up=is_up)
        rate = point.rate * exp(log(self._allowed / missed) / power)
        beyond = [each for each in self._points.values() if each.meets(target) is not is_up]
        if is_up:
            limits = [self._inside(point, each) for each in beyond if each.rate > point.rate]
            # Few misses give little information: step further each time, if necessary.
            return min([rate, self._max_rate, point.rate * _LONGEST_STEP ** len(self._points), *limits])
        return max([rate, *(self._inside(point, each) for each in beyond if each.rate < point.rate)])

    def _inside(self, point: Attainment, beyond: Attainment) -> float:
        """Most of the way from one point to the other, in logarithm; half of it if the other run was stopped or if half
        is close enough to both."""
        distance = log(beyond.rate / point.rate)
        is_half = beyond.is_partial or abs(distance) <= 2 * log(1 + self._tolerance)
        return point.rate * exp(distance * (0.5 if is_half else _MOST_OF_WAY))

    def _power(self, rate: float, default: float, *, is_up: bool) -> float:
        """Exponent of missed requests over rate: from ``rate`` to the next tried rate above it (or below it), or to the
        one on the other side if there is none."""
        above = [each for each in self._missed if each > rate]
        below = [each for each in self._missed if each < rate]
        if not above and not below:
            return default
        other = min(above) if above and (is_up or not below) else max(below)
        missed, missed_other = self._missed_alike(rate, other)
        power = log(missed_other / missed) / log(other / rate)
        return min(max(power, _LEAST_POWER), _MOST_POWER)

    def _missed_alike(self, *rates: float) -> list[float]:
        """Share of missed requests at each rate, from runs of equal seeds: all seeds if possible, else the first."""
        points = [self._points[rate] for rate in rates]
        if all(self._is_complete(point) for point in points):
            return [self._missed_share(point, len(self.trial.seeds)) for point in points]
        return [self._missed[rate] for rate in rates]

    def goodput(self) -> Goodput:
        """The result; call once `ask` returns nothing."""
        near, rates = self._nearest(), sorted(self._points)
        rate, interval = 0.0, Interval(0.0, rates[0])
        if near is not None and (self._is_rough or self._rates_met()):
            rate = self._crossing(near) if self._is_near(near) else near.rate
            interval = self._interval(near, rate)
        return Goodput(
            rate=rate,
            interval=interval,
            target=self.trial.slo.attainment,
            num_devices=self.trial.layout.num_devices,
            points=tuple(self._points[each] for each in rates),
            num_requests=self.num_requests,
            is_capped=near is not None and near.rate == self._max_rate <= rate,
        )

    def _interval(self, near: Attainment, rate: float) -> Interval:
        """Rates at which the bounds of attainment cross the target, with conservative exponents, narrowed by the
        simulated rates. A curve may be so steep that a bound crosses the target next to ``near``."""
        target, ends = self.trial.slo.attainment, []
        for share, is_upper in zip(near.interval, (False, True), strict=True):
            missed = max(1 - share, self._least_missed(near))
            is_up = missed < self._allowed
            power = inf
            if is_up is is_upper:  # outwards: a smaller exponent reaches further
                told = self._power(near.rate, _LEAST_POWER, is_up=is_up)
                power = min(max(_POWER_IN_DOUBT * told, _LEAST_POWER), _POWER)
            ends.append(near.rate * exp(log(self._allowed / missed) / power))
        points = self._points.values()
        met = [point.rate for point in points if point.rate <= rate and point.interval.low >= target]
        beyond = [point.rate for point in points if point.rate >= rate and point.interval.high < target]
        return Interval(min(max([ends[0], *met]), rate), max(min([ends[1], self._max_rate, *beyond]), rate))
