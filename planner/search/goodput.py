"""Goodput of one layout: the highest rate at which enough requests meet both objectives, by simulation.

Defines a trial (`Trial`), who simulates it (`Runner`) and the result (`Goodput`), and searches the rate
(`find_goodput`). All rates, and all layouts with the same workload and seeds, see the same requests in the same
pattern, only scaled in time (common random numbers), so that differences come from the layouts alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import pairwise
from math import exp, inf, log
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pdserve.contracts.deployment import SloConfig
from pdserve.model.cost.cost_model import CostModel
from pdserve.planner.layout import Layout, PlannedModel, Pool
from pdserve.planner.simulate.attainment import Attainment, Interval, measure
from pdserve.planner.simulate.simulation import Simulation
from pdserve.planner.simulate.simulator import simulate
from pdserve.planner.workload.requests import DrawnRequests

if TYPE_CHECKING:
    from pdserve.planner.simulate.scout import ScoutRequests

_COARSE_STEP, _COARSE_TOLERANCE = 1.6, 1.1
"""Of the first seed's search: ratio of neighbouring rates, and of the two rates that it ends with."""
_FINE_STEP = 1.04
"""Ratio of neighbouring rates of the search with all seeds."""
_JUDGE_STEP = 1.05
"""Of searches from the other simulator's goodput."""
_LEAST_SHARE = 1 / 200
"""Share of the first rate below which the goodput counts as 0; a search up ends at its inverse."""


class Workload(Protocol):
    """Source of requests: `pdserve.planner.workload.workload`."""

    def draw(self, num_requests: int, seed: int, *, max_model_len: int) -> DrawnRequests:
        """``num_requests`` requests, shortened to ``max_model_len`` tokens; equal arguments draw equal ones."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Parameters common to all rates."""

    model: PlannedModel
    layout: Layout
    slo: SloConfig
    num_requests: int = 1500
    """Per run."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One run each."""
    is_scouted: bool = False
    """Simulated by the scout (`pdserve.planner.simulate.scout`) instead of the judge
    (`pdserve.planner.simulate.simulator`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The highest rate that met the target, and all points on the way to it."""

    rate: float
    """Highest simulated rate, in requests per second of the whole layout, that meets the target, with 95 % confidence
    if it was simulated with several seeds; 0 if none does."""
    interval: Interval
    """From ``rate`` to the rate at which a further run misses the target with 95 % confidence."""
    target: float
    """Required attainment."""
    num_devices: int
    points: tuple[Attainment, ...]
    """Every simulated rate, in order."""
    num_requests: int
    """Simulated requests over all runs."""
    is_scouted: bool = False
    """The points are the scout's."""
    judged: Attainment | None = None
    """The judge's result at ``rate``, if the scout found it."""

    @property
    def at_rate(self) -> Attainment | None:
        """Result at the goodput; ``None`` if no rate met the target."""
        return self.judged or next((point for point in self.points if point.rate == self.rate), None)

    @property
    def rate_per_device(self) -> float:
        return self.rate / self.num_devices

    @property
    def is_unbounded(self) -> bool:
        """Whether no simulated rate missed the target: there were too few requests."""
        return all(point.meets(self.target) for point in self.points)


class Runner:
    """Simulates trials of one workload; caches draws and cost models."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._drawn = lru_cache(maxsize=32)(self._draw)
        self._unit_rate = lru_cache(maxsize=32)(self._at_unit_rate)
        self._cost = lru_cache(maxsize=None)(_cost)

    def attainment(self, trial: Trial, rate: float, *, num_seeds: int = 0) -> Attainment:
        """Attainment at ``rate`` over the first ``num_seeds`` seeds; 0 for all of them.

        Raises:
            ValueError: the layout cannot run (`pdserve.planner.simulate.simulator.simulate`).
        """
        run = self._scouted if trial.is_scouted else self._judged
        seeds = trial.seeds[: num_seeds or len(trial.seeds)]
        return measure([run(trial, rate, seed) for seed in seeds], trial.slo, rate)

    def _judged(self, trial: Trial, rate: float, seed: int) -> Simulation:
        return simulate(
            trial.model,
            trial.layout,
            self._drawn(trial.num_requests, seed, trial.model.max_model_len).at_rate(rate),
            slo=trial.slo,
            max_in_flight=_max_in_flight(trial),
            cost_of=lambda pool: self._cost(trial.model, replace(pool, replicas=1)),
        )

    def _scouted(self, trial: Trial, rate: float, seed: int) -> Simulation:
        # Loads compiled code, which a simulation by the judge alone does not need.
        from pdserve.planner.simulate.scout import scout

        requests = self._unit_rate(trial.num_requests, seed, trial.model.max_model_len)
        found = scout(
            trial.model,
            trial.layout,
            requests.faster(rate),
            slo=trial.slo,
            max_in_flight=_max_in_flight(trial),
        )
        return found.simulation()

    def _draw(self, num_requests: int, seed: int, max_model_len: int) -> DrawnRequests:
        return self._workload.draw(num_requests, seed, max_model_len=max_model_len)

    def _at_unit_rate(self, num_requests: int, seed: int, max_model_len: int) -> ScoutRequests:
        """Requests of the scout, at one per second."""
        from pdserve.planner.simulate.scout import ScoutRequests

        return ScoutRequests.of(self._drawn(num_requests, seed, max_model_len).at_rate(1.0))


def _cost(model: PlannedModel, pool: Pool) -> CostModel:
    return pool.cost(model)


def _max_in_flight(trial: Trial) -> int:
    """Placements are compared, not admission: accept long queues."""
    num_slots = sum(pool.replicas * pool.pipeline_parallel * pool.max_batch_size for pool in trial.layout.pools)
    return max(1024, 2 * num_slots)


def find_goodput(
    runner: Runner,
    trial: Trial,
    start_rate: float,
    *,
    step: float = 0.0,
    tolerance: float = 0.02,
    known: Sequence[Attainment] = (),
) -> Goodput:
    """Goodput of ``trial``: the first seed finds the rate roughly, all seeds precisely.

    One run meets the target by its share, several with 95 % confidence; of several, the upper end of the interval is
    simulated too.

    Args:
        start_rate: a guess; any rate above 0 leads to the same goodput, within the tolerance.
        step: ratio of the first two rates; 0 for a guess that may be far off.
        tolerance: ratio, less 1, of the lowest rate that missed the target and the highest that met it.
        known: results of all seeds.

    Raises:
        ValueError: the layout cannot run.
    """
    assert start_rate > 0
    target, points, num_requests = trial.slo.attainment, {point.rate: point for point in known}, 0

    def meets(num_seeds: int) -> Callable[[float], bool]:
        def meets(rate: float) -> bool:
            nonlocal num_requests
            point = points.get(rate)
            if point is None or point.num_runs < num_seeds:
                points[rate] = point = runner.attainment(trial, rate, num_seeds=num_seeds)
                num_requests += point.num_requests
            return point.surely_meets(target) if num_seeds > 1 else point.meets(target)

        return meets

    num_seeds, rate = len(trial.seeds), start_rate
    if num_seeds > 1:
        rate = highest_rate(meets(1), rate, step or _COARSE_STEP, _COARSE_TOLERANCE) or start_rate * _LEAST_SHARE
        step = _FINE_STEP
    rate = highest_rate(meets(num_seeds), rate, step or _COARSE_STEP, 1 + tolerance)
    whole = [point for point in points.values() if point.num_runs == num_seeds]
    if rate and num_seeds > 1:
        more = _until_missed(runner, trial, whole, target)
        num_requests += sum(point.num_requests for point in more)
        points |= {point.rate: point for point in more}
        whole += more
    return Goodput(
        rate=rate,
        interval=Interval(rate, surely_missed_rate(whole, rate, target)),
        target=target,
        num_devices=trial.layout.num_devices,
        points=tuple(points[each] for each in sorted(points)),
        num_requests=num_requests,
        is_scouted=trial.is_scouted,
    )


def find_best(
    runner: Runner, trials: Sequence[Trial], first: int, start_rate: float, tolerance: float
) -> tuple[int, Goodput]:
    """The trial with the highest goodput in an ordered sequence with one peak, climbed from trial ``first``."""

    @cache
    def goodput(index: int) -> Goodput:
        step = _JUDGE_STEP if len(trials) > 1 else 0.0
        return find_goodput(runner, trials[index], start_rate, step=step, tolerance=tolerance)

    best = first
    while True:
        near = [index for index in (best, best + 1, best - 1) if 0 <= index < len(trials)]
        higher = max(near, key=lambda index: goodput(index).rate)
        if higher == best:
            return best, goodput(best)
        best = higher


def _until_missed(runner: Runner, trial: Trial, known: Sequence[Attainment], target: float) -> list[Attainment]:
    """Results of all seeds at rates above those of ``known``, up to one at which a further run surely misses
    ``target``."""
    more: list[Attainment] = []
    point, step = max(known, key=lambda point: point.rate), _FINE_STEP
    most = point.rate / _LEAST_SHARE
    while not point.surely_misses(target) and point.rate < most:
        point = runner.attainment(trial, point.rate * step)
        more.append(point)
        step **= 1.5
    return more


class Confirmed(NamedTuple):
    """The judge's answer to a goodput that the scout found."""

    goodput: Goodput
    """The scout's, with the judge's result at that rate; the judge's own if it misses the target. Where it attains more
    than the scout, the interval ends later by as much as its rate exceeds the scout's at equal attainment."""
    judge: Attainment
    """Results of both at the scout's goodput, on the same requests."""
    scout: Attainment


def confirmed(runner: Runner, trial: Trial, scouted: Goodput) -> Confirmed:
    """Let the judge serve what the scout found.

    Args:
        trial: of the judge.
    """
    judge, scout = (
        runner.attainment(replace(trial, is_scouted=is_scouted), scouted.rate) for is_scouted in (False, True)
    )
    goodput, lead = replace(scouted, judged=judge), 1.0
    if not judge.meets(trial.slo.attainment):
        goodput = find_goodput(runner, trial, scouted.rate, step=_JUDGE_STEP, known=[judge])
    elif judge.share > scout.share:
        lead = _lead(runner, trial, scouted.rate)
    high = max(goodput.interval.high, scouted.interval.high * lead)
    return Confirmed(replace(goodput, interval=Interval(goodput.rate, high)), judge, scout)


def _lead(runner: Runner, trial: Trial, start_rate: float) -> float:
    """Factor, 1 or more, by which the judge's rate exceeds the scout's at equal attainment of the same requests, where
    the scout just meets the target.

    Args:
        trial: of the judge.
    """
    same = replace(trial, is_scouted=True)
    rate = find_goodput(runner, same, start_rate, step=_JUDGE_STEP).rate
    if not rate:
        return 1.0
    judge = runner.attainment(trial, rate)
    if not judge.meets(runner.attainment(same, rate).share):
        return 1.0
    equal = highest_rate(lambda each: runner.attainment(same, each).meets(judge.share), rate, _JUDGE_STEP, 1.01)
    if equal:
        return max(1.0, rate / equal)
    return find_goodput(runner, trial, rate, step=_JUDGE_STEP, known=[judge]).rate / rate


def highest_rate(meets: Callable[[float], bool], start_rate: float, step: float, tolerance: float) -> float:
    """Highest tried rate that meets the target, below one that does not and is at most ``tolerance`` times as high; 0
    if no rate does. The steps to bracket it grow, then the bracket is halved."""
    low, high, rate = 0.0, inf, start_rate
    while not low or high == inf:
        if meets(rate):
            low = rate
            if rate > start_rate / _LEAST_SHARE:
                return rate
        else:
            high = rate
            if rate < start_rate * _LEAST_SHARE:
                return 0.0
        rate = rate * step if low else rate / step
        step **= 1.5
    while high / low > tolerance:
        rate = (low * high) ** 0.5
        if meets(rate):
            low = rate
        else:
            high = rate
    return low


def surely_missed_rate(points: Sequence[Attainment], rate: float, target: float) -> float:
    """Rate at which the most that a further run attains falls to ``target``, or the first that saturates the cluster:
    between two simulated rates in proportion, beyond the highest one along the line through the last two."""
    in_order = sorted((point for point in points if point.rate >= rate), key=lambda point: point.rate)
    if len(in_order) < 2 or in_order[0].of_further_run.high <= target:
        return in_order[0].rate if in_order else rate
    pairs = list(pairwise(in_order))
    below, above = next((pair for pair in pairs if pair[1].surely_misses(target)), pairs[-1])
    high, low = below.of_further_run.high, above.of_further_run.high
    if above.is_saturated or high <= low or high <= target:
        return above.rate
    steps = (high - target) / (high - low)
    return below.rate * exp(min(steps, 3.0) * log(above.rate / below.rate))
