"""The goodput of one layout: the highest rate at which enough requests meet both objectives, found by simulation.

`find_goodput` brackets the rate and bisects its logarithm. Every rate, and every layout that is given the same
workload and seeds, sees the same requests in the same pattern, only closer together (common random numbers), so that
differences are the layouts' own. A rate that is clearly too high is given up as soon as too many requests missed; one
that is clearly met is passed on its first run, and only the answer is confirmed with all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from math import sqrt
from typing import Protocol

from pdserve.contracts.deployment import SloConfig
from pdserve.planner.attainment import Attainment, Interval, measure
from pdserve.planner.layout import Layout, PlannedModel
from pdserve.planner.requests import SimulatedRequest
from pdserve.planner.simulation import Simulation
from pdserve.planner.simulator import Overheads, simulate
from pdserve.planner.workload import Clamped
from pdserve.router.policy import Costs

_LEAST_GROWTH = 1.06
"""Of the first step of bracketing; each is twice the one before, in logarithm."""
_MAX_STEPS = 7
"""Of bracketing: 1.06 ** (2 ** 7 - 1) is a factor of 1600."""
_CHANCE_Z = 3.0
"""Standard deviations of missed requests above what the target allows, at which a run is given up."""
_MAX_SURE_STEPS = 4
"""Of looking for a rate that meets the target beyond doubt."""
_CLOSE_SHARE = 0.01
"""Attainment above the target that is as good as the target."""
_MARGIN = 0.15
"""Share of a bracket, at either end, in which no rate is tried."""


class DrawnRequests(Protocol):
    """Requests whose rate is still open."""

    @property
    def clamped(self) -> Clamped:
        """What did not fit into the model's length."""
        ...

    def at_rate(self, requests_per_s: float) -> Sequence[SimulatedRequest]:
        """The requests, in order of arrival, so many a second."""
        ...


class Workload(Protocol):
    """Where requests come from: `pdserve.planner.workload`."""

    def draw(self, num_requests: int, seed: int, *, max_model_len: int) -> DrawnRequests:
        """``num_requests`` requests, shortened to ``max_model_len`` tokens; equal arguments draw equal ones."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What is the same at every rate."""

    model: PlannedModel
    layout: Layout
    slo: SloConfig
    num_requests: int = 1500
    """Of each run."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One run each."""
    is_finite: bool = False
    """See `pdserve.planner.attainment.measure`."""
    overheads: Overheads = field(default_factory=Overheads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The highest rate that met the target, and all that was tried to find it."""

    rate: float
    """Requests per second of the whole layout; the highest that was simulated and met the target, 0 where none did."""
    interval: Interval
    """Where the rate lies at which attainment crosses the target."""
    target: float
    """Attainment that was asked."""
    num_devices: int
    points: tuple[Attainment, ...]
    """Every rate that was simulated, in order; those stopped early are upper bounds (`Attainment.is_partial`)."""
    num_requests: int
    """Simulated, in all runs together."""
    is_capped: bool = False
    """The highest rate that was tried met the target: the goodput is at least so high."""

    @property
    def at_rate(self) -> Attainment | None:
        """What was seen at the goodput itself."""
        return next((point for point in self.points if point.rate == self.rate), None)

    @property
    def rate_per_device(self) -> float:
        return self.rate / self.num_devices

    def requests_per_dollar(self, dollars_per_hour: float) -> float:
        """Requests within the SLO for each dollar, of a layout that costs so much."""
        return self.rate * 3600 / dollars_per_hour


def attain(trial: Trial, workload: Workload, rate: float, *, is_whole: bool = True) -> Attainment:
    """Serve the workload at ``rate``, once for each seed.

    Args:
        is_whole: run all of it, whatever comes out; else stop as soon as it is clear whether the target is met.

    Raises:
        ValueError: the layout cannot be run (`pdserve.planner.simulator.simulate`).
    """
    return _attain(trial, workload, rate, _costs(trial), is_whole=is_whole)


def _costs(trial: Trial) -> Costs:
    """They remember what they were asked: so the runs of a trial share them."""
    return {pool.role: pool.cost(trial.model) for pool in trial.layout.pools}


def _attain(trial: Trial, workload: Workload, rate: float, costs: Costs, *, is_whole: bool) -> Attainment:
    target = trial.slo.attainment
    runs: list[Simulation] = []
    judged: Attainment | None = None
    for seed in trial.seeds:
        runs.append(_run(trial, workload, rate, seed, costs, None if is_whole else _max_missed(trial)))
        judged = measure(
            runs,
            trial.slo,
            rate,
            block_size=trial.model.block_size,
            num_offered=0 if is_whole else trial.num_requests,
            is_finite=trial.is_finite,
        )
        is_clear = judged.is_partial or not judged.interval.low <= target <= judged.interval.high
        if is_clear and not is_whole:
            break
    assert judged is not None, "a trial has seeds"
    return judged


def _run(trial: Trial, workload: Workload, rate: float, seed: int, costs: Costs, max_missed: int | None) -> Simulation:
    drawn = workload.draw(trial.num_requests, seed, max_model_len=trial.model.max_model_len)
    num_seats = sum(pool.replicas * pool.pipeline_parallel * pool.max_batch_size for pool in trial.layout.pools)
    return simulate(
        trial.model,
        trial.layout,
        drawn.at_rate(rate),
        slo=trial.slo,
        overheads=trial.overheads,
        # Placements are compared, not admission: a queue of any length that still meets the SLO is welcome.
        max_in_flight=max(1024, 2 * num_seats),
        max_missed=max_missed,
        cost_of=lambda pool: costs[pool.role],
    )


def _max_missed(trial: Trial) -> int:
    """Missed requests of a run that are more than the target allows, and more than chance."""
    miss_share = 1 - trial.slo.attainment
    expected = miss_share * trial.num_requests
    return int(expected + _CHANCE_Z * sqrt(expected * trial.slo.attainment)) + 1


def find_goodput(
    trial: Trial, workload: Workload, start_rate: float, *, tolerance: float = 0.03, max_rate: float = float("inf")
) -> Goodput:
    """The highest rate that meets the target, to within ``tolerance``.

    Args:
        start_rate: a guess.
        max_rate: the highest to try.

    Raises:
        ValueError: the layout cannot be run.
    """
    assert start_rate > 0
    return _Bisection(trial, workload, tolerance, max_rate).find(min(start_rate, max_rate))


class _Bisection:
    """The rates of one layout that were tried so far."""

    def __init__(self, trial: Trial, workload: Workload, tolerance: float, max_rate: float) -> None:
        self._trial = trial
        self._workload = workload
        self._tolerance = tolerance
        self._growth = max(1 + tolerance, _LEAST_GROWTH)
        self._max_rate = max_rate
        self._costs = _costs(trial)
        self._points: dict[float, Attainment] = {}
        self._num_requests = 0

    def find(self, start_rate: float) -> Goodput:
        low, high = self._bracket(start_rate)
        while low:
            while high / low > 1 + self._tolerance + 1e-9 and not self._is_close(low):
                middle = self._between(low, high)
                if self._is_met(middle):
                    low = middle
                else:
                    high = middle
            if self._is_met(low, is_whole=True):
                break
            # What its first run promised, the others did not hold.
            high, low = low, self._highest_met_below(low)
            if not low:
                low, high = self._bracket(high / self._growth)
        if low and len(self._trial.seeds) > 1:
            self._find_sure_rate(low)
        return self._goodput(low, is_capped=low >= self._max_rate)

    def _find_sure_rate(self, rate: float) -> None:
        """Go below ``rate`` until the target is met beyond doubt, for the lower end of the confidence interval."""
        target, factor = self._trial.slo.attainment, self._growth
        for _ in range(_MAX_SURE_STEPS):
            if any(point.interval.low >= target for point in self._points.values()):
                return
            rate, factor = rate / factor, factor * factor
            self._is_met(rate)

    def _bracket(self, start_rate: float) -> tuple[float, float]:
        """The highest rate seen to meet the target, 0 for none, and the lowest above it seen to miss it."""
        rate, factor = start_rate, self._growth
        if self._is_met(rate):
            for _ in range(_MAX_STEPS):
                higher = min(rate * factor, self._max_rate)
                if not self._is_met(higher):
                    return rate, higher
                rate, factor = higher, factor * factor
                if rate >= self._max_rate:
                    break
            return rate, rate  # the highest allowed, or so many requests are met however fast they come
        for _ in range(_MAX_STEPS):
            lower = rate / factor
            if self._is_met(lower):
                return lower, rate
            rate, factor = lower, factor * factor
        return 0.0, rate

    def _is_close(self, rate: float) -> bool:
        """Whether all runs together came so near to the target that a higher rate would tell nothing new."""
        point, target = self._points[rate], self._trial.slo.attainment
        return point.num_requests == self._num_whole and 0 <= point.share - target < _CLOSE_SHARE

    def _between(self, low: float, high: float) -> float:
        """The next rate to try: where a straight line from attainment to attainment meets the target, or the middle
        where one of them is not known that well; in logarithm, and away from both ends."""
        lower, upper = self._points[low], self._points[high]
        place = 0.5
        if upper.num_requests == lower.num_requests == self._num_whole and lower.share > upper.share:
            place = (lower.share - self._trial.slo.attainment) / (lower.share - upper.share)
        place = min(max(place, _MARGIN), 1 - _MARGIN)
        return low * float((high / low) ** place)

    @property
    def _num_whole(self) -> int:
        """Requests of all runs at one rate."""
        return self._trial.num_requests * len(self._trial.seeds)

    def _is_met(self, rate: float, *, is_whole: bool = False) -> bool:
        target = self._trial.slo.attainment
        known = self._points.get(rate)
        if known is None or (is_whole and known.num_requests < self._num_whole):
            known = _attain(self._trial, self._workload, rate, self._costs, is_whole=is_whole)
            self._num_requests += known.num_requests
            self._points[rate] = known
        return known.meets(target)

    def _highest_met_below(self, rate: float) -> float:
        target = self._trial.slo.attainment
        return max(
            (known for known, point in self._points.items() if known < rate and point.meets(target)), default=0.0
        )

    def _goodput(self, rate: float, *, is_capped: bool) -> Goodput:
        points = tuple(self._points[each] for each in sorted(self._points))
        target = self._trial.slo.attainment
        return Goodput(
            rate=rate,
            interval=_rate_interval(points, rate, target),
            target=target,
            num_devices=self._trial.layout.num_devices,
            points=points,
            num_requests=self._num_requests,
            is_capped=is_capped,
        )


def _rate_interval(points: Sequence[Attainment], rate: float, target: float) -> Interval:
    """Rates at which the bounds of attainment cross the target, found on straight lines between what was simulated."""
    if not rate:
        return Interval(0.0, points[0].rate)
    low = _crossing([(point.rate, point.interval.low) for point in points if not point.is_partial], target)
    high = _crossing([(point.rate, point.interval.high) for point in points], target)
    return Interval(min(low, rate), max(high, rate))


def _crossing(curve: Sequence[tuple[float, float]], target: float) -> float:
    """The rate at which a curve of attainment falls below the target for good."""
    last = max((index for index, (_, share) in enumerate(curve) if share >= target), default=-1)
    if last < 0:
        return 0.0
    rate, share = curve[last]
    if last + 1 == len(curve):
        return rate
    next_rate, next_share = curve[last + 1]
    return rate + (next_rate - rate) * (share - target) / (share - next_share)


def slowed(trial: Trial, time_factor: float) -> Trial:
    """The same trial on a clock that runs ``time_factor`` times as fast.

    Where all steps and transfers take ``time_factor`` times as long, everything is as before with a unit of time so
    much longer: objectives and overheads are shorter in it, and a rate in it is so many times what it is in seconds.
    The goodput of the slowed cluster is that of this trial divided by ``time_factor``.
    """
    slo, overheads = trial.slo, trial.overheads
    return replace(
        trial,
        slo=replace(slo, ttft_seconds=slo.ttft_seconds / time_factor, tpot_seconds=slo.tpot_seconds / time_factor),
        overheads=Overheads(**{each.name: getattr(overheads, each.name) / time_factor for each in fields(overheads)}),
    )
