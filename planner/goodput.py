"""The goodput of one layout: the highest rate at which enough requests meet both objectives, found by simulation.

Near the target, the share of requests that miss grows about as a power of the rate. `GoodputSearch` tries the rate at
which that power, through what was seen so far, crosses the target, until the crossing is near a rate that was tried:
the goodput is the crossing. All rates, and all layouts that are given the same workload and seeds, see the same
requests in the same pattern, only closer together (common random numbers), so that differences are the layouts' own.
Rates are looked for with the first seed, and the others are spent where it led to. A rate that is hopeless is given up
as soon as too many requests missed. A search only says which runs it needs: `pdserve.planner.crew` carries them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from math import exp, inf, log
from typing import NamedTuple, Protocol

from pdserve.contracts.deployment import SloConfig
from pdserve.model.cost import CostModel
from pdserve.planner.attainment import Attainment, Interval, measure
from pdserve.planner.layout import Layout, PlannedModel, Pool
from pdserve.planner.requests import SimulatedRequest
from pdserve.planner.simulation import Simulation
from pdserve.planner.simulator import Overheads, simulate
from pdserve.planner.workload import Clamped

_POWER, _POWER_BEYOND = 4.0, 8.0
"""Of the rate, as which missed requests grow where only one rate is known: one that meets the target, or one that is
beyond the goodput, where they grow faster. What is seen near it is from 2 to 8."""
_POWER_OF_STOPPED = 3.0
"""The same of a run that was stopped early: of the requests under way, most would have missed, too."""
_LEAST_POWER, _MOST_POWER = 1.0, 12.0
"""Between which the power is kept that two rates tell."""
_LONGEST_STEP = 1.3
"""Upwards, from the first rate that is tried."""
_MOST_OF_WAY = 0.85
"""To a rate that is beyond the goodput, that the next one may lie on."""
_SIDE_STEP = 0.9
"""From a rate to one on the other side of the goodput."""
_MAX_RATES = 10
"""That a search tries."""
_HOPELESS = 2.0
"""Times as many missed requests as the target allows, at which a run is given up."""


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
    """One run each, of the rates that matter."""
    is_finite: bool = False
    """See `pdserve.planner.attainment.measure`."""
    overheads: Overheads = field(default_factory=Overheads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The highest rate that met the target, and all that was tried to find it."""

    rate: float
    """Requests per second of the whole layout, at which attainment falls to the target; 0 where none met it."""
    interval: Interval
    """Where it lies with 95 % confidence, for the requests that were simulated."""
    target: float
    """Attainment that was asked."""
    num_devices: int
    points: tuple[Attainment, ...]
    """Every rate that was simulated, in order; those stopped early are upper bounds (`Attainment.is_partial`)."""
    num_requests: int
    """Simulated, in all runs together."""
    is_capped: bool = False
    """The highest rate that may be tried met the target: the goodput is at least so high."""

    @property
    def at_rate(self) -> Attainment | None:
        """What was seen at the goodput: with the most seeds, at the nearest rate that was simulated to the end."""
        return min(
            (point for point in self.points if self.rate and not point.is_partial),
            key=lambda point: (-point.num_requests, abs(point.rate - self.rate)),
            default=None,
        )

    def nearest(self, rate: float) -> Attainment | None:
        """What was seen at the rate nearest to ``rate`` of those that were simulated to the end."""
        whole = (point for point in self.points if not point.is_partial)
        return min(whole, key=lambda point: abs(point.rate - rate), default=None)

    @property
    def rate_per_device(self) -> float:
        return self.rate / self.num_devices

    def requests_per_dollar(self, dollars_per_hour: float) -> float:
        """Requests within the SLO for each dollar, of a layout that costs so much."""
        return self.rate * 3600 / dollars_per_hour


class Run(NamedTuple):
    """One simulation that is asked for."""

    trial: Trial
    rate: float
    seed: int
    is_whole: bool
    """Run all of it, whatever comes out; else stop as soon as clearly too many requests missed."""


class Runner:
    """Carries out runs on one workload. What was drawn of it, and the costs that were worked out, serve all runs."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._drawn: dict[tuple[int, int, int], DrawnRequests] = {}
        self._costs: dict[tuple[PlannedModel, Pool], CostModel] = {}

    def carry_out(self, run: Run) -> Simulation:
        """Simulate it.

        Raises:
            ValueError: the layout cannot be run (`pdserve.planner.simulator.simulate`).
        """
        trial = run.trial
        num_seats = sum(pool.replicas * pool.pipeline_parallel * pool.max_batch_size for pool in trial.layout.pools)
        return simulate(
            trial.model,
            trial.layout,
            self._draw(trial, run.seed).at_rate(run.rate),
            slo=trial.slo,
            overheads=trial.overheads,
            # Placements are compared, not admission: a queue of any length that still meets the SLO is welcome.
            max_in_flight=max(1024, 2 * num_seats),
            max_missed=None if run.is_whole else _max_missed(trial),
            cost_of=lambda pool: self._cost(trial.model, pool),
        )

    def _draw(self, trial: Trial, seed: int) -> DrawnRequests:
        key = (trial.num_requests, seed, trial.model.max_model_len)
        if key not in self._drawn:
            self._drawn[key] = self._workload.draw(trial.num_requests, seed, max_model_len=trial.model.max_model_len)
        return self._drawn[key]

    def _cost(self, model: PlannedModel, pool: Pool) -> CostModel:
        key = (model, replace(pool, replicas=1))
        if key not in self._costs:
            self._costs[key] = pool.cost(model)
        return self._costs[key]


def _max_missed(trial: Trial) -> int:
    """Missed requests of a run that are so many more than the target allows that they tell no more of the goodput."""
    return int(_HOPELESS * (1 - trial.slo.attainment) * trial.num_requests) + 1


class Pursuit(Protocol):
    """What takes several runs to find out."""

    def wanted(self) -> list[Run]:
        """Runs that it needs now, in any order or side by side; none once all is known."""
        ...

    def saw(self, run: Run, simulation: Simulation) -> None:
        """What came of one of them."""
        ...

    @property
    def num_requests(self) -> int:
        """Simulated so far."""
        ...


def pursue(pursuit: Pursuit, runner: Runner) -> None:
    """Carry out all its runs, one after another.

    Raises:
        ValueError: the layout cannot be run.
    """
    while runs := pursuit.wanted():
        for run in runs:
            pursuit.saw(run, runner.carry_out(run))


class OneRate:
    """Finds what attainment a trial has at one rate; a `Pursuit`."""

    def __init__(self, trial: Trial, rate: float) -> None:
        self._trial = trial
        self._rate = rate
        self._seen: dict[int, Simulation] = {}

    def wanted(self) -> list[Run]:
        return [Run(self._trial, self._rate, seed, True) for seed in self._trial.seeds if seed not in self._seen]

    def saw(self, run: Run, simulation: Simulation) -> None:
        self._seen[run.seed] = simulation

    @property
    def num_requests(self) -> int:
        return sum(len(simulation.times.arrived_s) for simulation in self._seen.values())

    def attainment(self) -> Attainment:
        """Once nothing is wanted any more."""
        return _measured(self._trial, self._rate, [self._seen[seed] for seed in self._trial.seeds])


def _measured(trial: Trial, rate: float, runs: Sequence[Simulation]) -> Attainment:
    return measure(
        runs,
        trial.slo,
        rate,
        block_size=trial.model.block_size,
        num_offered=trial.num_requests,
        is_finite=trial.is_finite,
    )


def attain(trial: Trial, workload: Workload, rate: float) -> Attainment:
    """Serve the workload at ``rate``, once for each seed.

    Raises:
        ValueError: the layout cannot be run (`pdserve.planner.simulator.simulate`).
    """
    one = OneRate(trial, rate)
    pursue(one, Runner(workload))
    return one.attainment()


def find_goodput(
    trial: Trial, workload: Workload, start_rate: float, *, tolerance: float = 0.03, max_rate: float = inf
) -> Goodput:
    """See `GoodputSearch`.

    Raises:
        ValueError: the layout cannot be run.
    """
    search = GoodputSearch(trial, start_rate, tolerance, max_rate)
    pursue(search, Runner(workload))
    return search.goodput()


class GoodputSearch:
    """Finds the highest rate that meets the target; a `Pursuit`."""

    def __init__(
        self, trial: Trial, start_rate: float, tolerance: float, max_rate: float = inf, *, is_rough: bool = False
    ) -> None:
        """The search.

        Args:
            start_rate: a guess.
            tolerance: how far from a rate that was simulated the goodput may lie, as a share.
            max_rate: the highest to try.
            is_rough: be content with one run that was not stopped early, until `settle`.
        """
        assert start_rate > 0
        self._trial = trial
        self._tolerance = tolerance
        self._max_rate = max_rate
        self._start_rate = self._capped(start_rate)
        self._is_rough = is_rough
        self._allowed = max(1 - trial.slo.attainment, 0.5 / trial.num_requests)
        """Share of requests that may miss."""
        self._runs: dict[float, dict[int, Simulation]] = {}
        self._points: dict[float, Attainment] = {}
        """What all runs at a rate came to."""
        self._missed: dict[float, float] = {}
        """Share of requests that missed in the first seed's run, by which rates are compared."""

    @property
    def is_settled(self) -> bool:
        return not self._is_rough

    def settle(self) -> None:
        """Ask for all that the trial and the tolerance ask for."""
        self._is_rough = False

    def wanted(self) -> list[Run]:
        seeds = self._trial.seeds
        first = seeds[:1]
        if not self._points:
            return self._asked(self._start_rate, first)
        if len(self._points) >= _MAX_RATES:
            return []
        near = self._nearest()
        if near is None:
            # Ever longer steps: runs that are far too fast are all stopped at about the same share.
            power = _POWER_OF_STOPPED / max(1, len(self._points) - 1)
            return self._asked(self._crossing(self._points[min(self._points)], power), first)
        if not self._is_near(near):
            return self._asked(self._crossing(near), seeds if self._is_complete(near) else first)
        if self._is_rough:
            return []
        runs = self._asked(near.rate, seeds)
        return runs + self._asked(self._other_side(), first) if runs or first == seeds else []

    def saw(self, run: Run, simulation: Simulation) -> None:
        runs = self._runs.setdefault(run.rate, {})
        runs[run.seed] = simulation
        in_order = [runs[seed] for seed in self._trial.seeds if seed in runs]
        self._points[run.rate] = _measured(self._trial, run.rate, in_order)
        if run.seed == self._trial.seeds[0]:
            self._missed[run.rate] = self._missed_share(_measured(self._trial, run.rate, [simulation]), num_runs=1)

    @property
    def num_requests(self) -> int:
        return sum(point.num_requests for point in self._points.values())

    def _asked(self, rate: float, seeds: Sequence[int]) -> list[Run]:
        known = self._runs.get(rate, {})
        is_whole = (self._is_rough and len(self._trial.seeds) > 1) or len(seeds) > 1
        return [Run(self._trial, rate, seed, is_whole) for seed in seeds if seed not in known]

    def _missed_share(self, point: Attainment, num_runs: int) -> float:
        """Above 0. Where a run was stopped, of those that came until then, the least that it can be."""
        come_share = point.num_requests / (self._trial.num_requests * num_runs) if point.is_partial else 1.0
        return max((1 - point.share) / come_share, 0.5 / max(point.num_counted, 1))

    def _is_any_met(self) -> bool:
        return any(point.meets(self._trial.slo.attainment) for point in self._points.values())

    def _other_side(self) -> float:
        """A rate beyond the goodput, where all that were tried meet the target, or below it, where none does; else the
        lowest that was tried: only between two rates is it known where it lies."""
        lowest, highest = min(self._points), max(self._points)
        step = min(_SIDE_STEP, 1 - self._tolerance)
        if not self._is_any_met():
            return lowest * step
        if all(point.meets(self._trial.slo.attainment) for point in self._points.values()):
            return self._capped(highest / step)
        return lowest

    def _capped(self, rate: float) -> float:
        """What is as good as the highest rate is the highest rate."""
        return rate if rate * (1 + self._tolerance) < self._max_rate else self._max_rate

    def _nearest(self) -> Attainment | None:
        """Of the rates that were simulated to the end, with the most seeds, the one nearest to the goodput."""
        whole = [point for point in self._points.values() if not point.is_partial]
        return min(
            whole,
            key=lambda point: (-len(self._runs[point.rate]), abs(log(self._crossing(point) / point.rate))),
            default=None,
        )

    def _is_complete(self, point: Attainment) -> bool:
        return len(self._runs[point.rate]) == len(self._trial.seeds)

    def _is_near(self, point: Attainment) -> bool:
        """Whether the goodput lies within the tolerance; as long as seeds are lacking, they may move it as much."""
        if self._is_rough:
            return True
        tolerance = self._tolerance * (1 if self._is_complete(point) else 2)
        rate = self._crossing(point)
        is_within = abs(log(rate / point.rate)) <= log(1 + tolerance) + 1e-9
        return is_within and (rate < self._max_rate or point.rate == self._max_rate)

    def _crossing(self, point: Attainment, power: float | None = None) -> float:
        """The rate, ``max_rate`` at most, at which as many requests miss as may, told from one rate; on this side of
        rates that were seen to be beyond it."""
        missed, target = self._missed_share(point, len(self._runs[point.rate])), self._trial.slo.attainment
        is_up = missed < self._allowed
        if power is None:
            power = self._power(point.rate, _POWER if is_up else _POWER_BEYOND, is_up=is_up)
        rate = point.rate * exp(log(self._allowed / missed) / power)
        beyond = [each for each in self._points.values() if each.meets(target) is not is_up]
        if is_up:
            limits = [_inside(point, each) for each in beyond if each.rate > point.rate]
            # Of few that miss, hardly anything is told; ever longer steps, if it has to be.
            return min([rate, self._max_rate, point.rate * _LONGEST_STEP ** len(self._points), *limits])
        return max([rate, *(_inside(point, each) for each in beyond if each.rate < point.rate)])

    def _power(self, rate: float, default: float, *, is_up: bool) -> float:
        """Of the rate, as which missed requests grow: from ``rate`` to the next one that was tried above it, or below
        it, or where there is none, on the other side."""
        above = [each for each in self._missed if each > rate]
        below = [each for each in self._missed if each < rate]
        if not above and not below:
            return default
        other = min(above) if above and (is_up or not below) else max(below)
        power = log(self._missed[other] / self._missed[rate]) / log(other / rate)
        # It rises with the rate.
        least = _POWER if is_up and not above else _LEAST_POWER
        return min(max(power, least), _MOST_POWER)

    def goodput(self) -> Goodput:
        """Once nothing is wanted any more."""
        near, rates = self._nearest(), sorted(self._points)
        rate, interval = 0.0, Interval(0.0, rates[0])
        if near is not None and (self._is_rough or self._is_any_met()):
            rate = self._crossing(near) if self._is_near(near) else near.rate
            interval = self._interval(near, rate)
        return Goodput(
            rate=rate,
            interval=interval,
            target=self._trial.slo.attainment,
            num_devices=self._trial.layout.num_devices,
            points=tuple(self._points[each] for each in rates),
            num_requests=self.num_requests,
            is_capped=near is not None and near.rate == self._max_rate <= rate,
        )

    def _interval(self, near: Attainment, rate: float) -> Interval:
        """Rates at which the bounds of attainment cross the target, on curves whose power errs to the safe side, as far
        as nothing surer was seen."""
        target, ends = self._trial.slo.attainment, []
        for share, is_upper in zip(near.interval, (False, True), strict=True):
            missed = max(1 - share, 0.5 / max(near.num_counted, 1))
            is_up = missed < self._allowed
            if is_up is is_upper:  # outwards: the less the power, the further
                power = min(self._power(near.rate, _LEAST_POWER, is_up=is_up), _POWER)
            else:
                power = max(self._power(near.rate, _MOST_POWER, is_up=is_up), _POWER)
            ends.append(near.rate * exp(log(self._allowed / missed) / power))
        points = self._points.values()
        met = [point.rate for point in points if point.rate <= rate and point.interval.low >= target]
        beyond = [point.rate for point in points if point.rate >= rate and point.interval.high < target]
        return Interval(min(max([ends[0], *met]), rate), max(min([ends[1], self._max_rate, *beyond]), rate))


def _inside(point: Attainment, beyond: Attainment) -> float:
    """Most of the way from one to the other, in logarithm; half of it where a run that was stopped tells little."""
    return point.rate * float((beyond.rate / point.rate) ** (0.5 if beyond.is_partial else _MOST_OF_WAY))


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
