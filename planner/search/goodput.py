"""Goodput of one layout: the highest rate at which enough requests meet both objectives, by simulation.

Defines a trial (`Trial`), who simulates it (`Runner`) and the result (`Goodput`), and searches the rate. A search is a
generator that asks for one run after the other and is sent what it attained: `pdserve.planner.search.process_pool`
advances several at once. All rates, and all layouts with the same workload and seed, see the same requests in the same
pattern, only scaled in time (common random numbers), so that differences come from the layouts alone. Figures of a plan
are those of the simulator that drives the live schedulers and the router's own policy; the scout
(`pdserve.planner.simulate.scout`) only screens (`find_best`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import pairwise
from math import ceil, exp, inf, log, sqrt
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from pdserve.contracts.deployment import DEFAULT_POLICY, SloConfig
from pdserve.model.cost.cost_model import CostModel
from pdserve.planner.layout import Layout, PlannedModel, Pool
from pdserve.planner.simulate.attainment import NUM_LOOKS, Attainment, Interval, measure, seems_over
from pdserve.planner.simulate.simulator import simulate
from pdserve.planner.workload.requests import DrawnRequests, SimulatedRequest

if TYPE_CHECKING:
    from pdserve.planner.simulate.scout import ScoutRequests

LEAST_REQUESTS = 4000
"""Of a run of usual length, however short its requests are, if the workload has as many."""
LOOKS = (0.5, 1.0, 2.0)
"""Lengths of a run in terms of the usual one (`Trial.run_s`): at the first it ends if it is sure, at the second also if
the third is hardly enough to be."""
assert len(LOOKS) == NUM_LOOKS
_STEP = 1.1
"""Ratio of the first two rates of a search for a goodput."""
_MOST_END_RUNS = 3
"""To find the rate that surely misses the target, where no simulated one is within the tolerance."""
_SCREEN_STEP, _CHUNK_STEP = 1.5, 1.05
"""The same for a search by the scout, and if only the chunk budget of a layout is another."""
_LEAST_SHARE = 1 / 200
"""Share of the first rate below which the goodput counts as 0; a search up ends at its inverse."""


class Workload(Protocol):
    """Source of requests: `pdserve.planner.workload.workload`."""

    def draw(self, num_requests: int, seed: int, *, max_model_len: int) -> DrawnRequests:
        """``num_requests`` requests, shortened to ``max_model_len`` tokens; equal arguments draw equal ones."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Parameters common to all rates. A run ends early if it is sure whether it attains ``slo.attainment``."""

    model: PlannedModel
    layout: Layout
    slo: SloConfig
    policy: str = DEFAULT_POLICY
    """Of the router; the scout models ``least-time`` whatever it is."""
    num_requests: int = 20_000
    """Most of a run."""
    run_s: float = inf
    """Time that the arrivals of a run of usual length take, if that leaves `LEAST_REQUESTS`."""
    seed: int = 0

    @property
    def most_rate(self) -> float:
        """The highest rate that may be stated: beyond it all requests arrive before the first of the `LOOKS`, most of
        them at a cluster that was idle."""
        return self.num_requests / (LOOKS[0] * self.run_s)


class Run(NamedTuple):
    """What a search asks for."""

    trial: Trial
    rate: float


Result = TypeVar("Result")
Search = Generator[Sequence[Run], Sequence[Attainment], Result]
"""Asks for runs that can be simulated at once, is sent what each attained, and returns its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The highest rate that met the target, and all points on the way to it."""

    rate: float
    """Highest simulated rate, in requests per second of the whole layout, that meets the target with 95 % confidence.
    If none is sure, because even a slow rate barely does, the highest that met it; 0 if none did."""
    interval: Interval
    """From ``rate``, or 0 if that is not sure, to the rate that misses the target with 95 % confidence."""
    target: float
    """Required attainment."""
    num_devices: int
    points: tuple[Attainment, ...]
    """Every simulated rate, in order."""

    @property
    def at_rate(self) -> Attainment | None:
        """Result at the goodput; ``None`` if no rate met the target."""
        return next((point for point in self.points if point.rate == self.rate), None)

    def is_met(self, seen: Attainment) -> bool:
        """Whether ``seen`` meets the target as surely as the goodput does."""
        return seen.surely_meets(self.target) if self.interval.low else seen.meets(self.target)

    @property
    def rate_per_device(self) -> float:
        return self.rate / self.num_devices


class Runner:
    """Simulates trials of one workload; caches draws and cost models."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._drawn = lru_cache(maxsize=32)(self._draw)
        self._unit_rate = lru_cache(maxsize=32)(self._at_unit_rate)
        self._cost = lru_cache(maxsize=None)(_cost)

    def attainment(self, trial: Trial, rate: float) -> Attainment:
        """What the live schedulers and the policy attain at ``rate``.

        Raises:
            ValueError: the layout cannot run (`pdserve.planner.simulate.simulator.simulate`).
        """
        requests = self._drawn(trial.num_requests, trial.seed, trial.model.max_model_len).at_rate(rate)
        half, usual, longest = run_lengths(trial, requests)
        looks = {
            half: partial(seems_over, slo=trial.slo),
            usual: partial(seems_over, slo=trial.slo, growth=longest / usual),
        }
        num_looks = NUM_LOOKS if half < longest else 1

        def seen_at(lengths: Sequence[int]) -> tuple[Attainment, bool]:
            """What a run that may end at ``lengths`` attains, and whether it is shorter than usual."""
            simulation = simulate(
                trial.model,
                trial.layout,
                requests[:longest],
                slo=trial.slo,
                max_in_flight=_max_in_flight(trial),
                policy=trial.policy,
                cost_of=lambda pool: self._cost(trial.model, replace(pool, replicas=1)),
                looks={length: looks[length] for length in lengths if length < longest},
            )
            is_short = half < longest and simulation.offered_until_s < requests[usual - 1].arrived_s
            return measure([simulation], trial.slo, rate, num_looks=num_looks, is_short=is_short), is_short

        seen, is_short = seen_at((half, usual))
        target = trial.slo.attainment
        if is_short and not (seen.surely_meets(target) or seen.surely_misses(target)):
            # The look was a guess: with the last answers it is not sure.
            seen, _ = seen_at((usual,))
        return seen

    def scouted(self, trial: Trial, rate: float) -> Attainment:
        """What the scout attains at ``rate``, by ``least-time`` and with all of ``num_requests``.

        Raises:
            ValueError: the layout cannot run.
        """
        # Loads compiled code, which other simulations do not need.
        from pdserve.planner.simulate.scout import scout

        requests = self._unit_rate(trial.num_requests, trial.seed, trial.model.max_model_len)
        found = scout(
            trial.model,
            trial.layout,
            requests.faster(rate),
            slo=trial.slo,
            max_in_flight=_max_in_flight(trial),
        )
        return measure([found.simulation()], trial.slo, rate)

    def _draw(self, num_requests: int, seed: int, max_model_len: int) -> DrawnRequests:
        return self._workload.draw(num_requests, seed, max_model_len=max_model_len)

    def _at_unit_rate(self, num_requests: int, seed: int, max_model_len: int) -> ScoutRequests:
        """Requests of the scout, at one per second."""
        from pdserve.planner.simulate.scout import ScoutRequests

        return ScoutRequests.of(self._drawn(num_requests, seed, max_model_len).at_rate(1.0))


def run_lengths(trial: Trial, requests: Sequence[SimulatedRequest]) -> list[int]:
    """Numbers of ``requests`` after which a run of ``trial`` may end, one for each of `LOOKS`; the same number where
    there are no more."""
    lengths = []
    for look in LOOKS:
        ends_s = requests[0].arrived_s + look * trial.run_s
        num_arrived = bisect_right(requests, ends_s, key=lambda request: request.arrived_s)
        lengths.append(min(len(requests), max(num_arrived, round(look * LEAST_REQUESTS))))
    return lengths


def _cost(model: PlannedModel, pool: Pool) -> CostModel:
    return pool.cost(model)


def _max_in_flight(trial: Trial) -> int:
    """Placements are compared, not admission: accept long queues."""
    num_slots = sum(pool.replicas * pool.pipeline_parallel * pool.max_batch_size for pool in trial.layout.pools)
    return max(1024, 2 * num_slots)


# Searches


def search_goodput(trial: Trial, start_rate: float, *, tolerance: float = 0.02) -> Search[Goodput]:
    """Goodput of ``trial``: the highest rate that surely meets the target, and about the first one that surely misses
    it, by runs near that.

    Args:
        start_rate: a guess; any rate above 0 leads to the same goodput, within the tolerance.
        tolerance: ratio, less 1, of the lowest rate that missed the target and the highest that met it.

    Raises:
        ValueError: the layout cannot run.
    """
    target = trial.slo.attainment
    points: dict[float, Attainment] = {}
    rates = bracketing(start_rate, _STEP, 1 + tolerance)
    rate = sure_rate = yield from answered(rates, trial, lambda seen: seen.surely_meets(target), points)
    met = [each for each, seen in points.items() if seen.meets(target)]
    if not rate and met:
        rates = bracketing(max(met), _STEP, 1 + tolerance)
        rate = yield from answered(rates, trial, lambda seen: seen.meets(target), points)
    most_runs = _MOST_END_RUNS if rate else 0
    high = yield from search_fall(trial, rate, points, lambda seen: seen.interval.high, 1 + tolerance, most_runs)
    in_order = tuple(points[each] for each in sorted(points))
    return Goodput(
        rate=rate,
        interval=Interval(sure_rate, high),
        target=target,
        num_devices=trial.layout.num_devices,
        points=in_order,
    )


def single_run(trial: Trial, rate: float) -> Search[Attainment]:
    """What ``trial`` attains at ``rate``."""
    (seen,) = yield [Run(trial, rate)]
    return seen


def answered(
    rates: Generator[Sequence[float], Sequence[bool], float],
    trial: Trial,
    meets: Callable[[Attainment], bool],
    known: dict[float, Attainment],
) -> Search[float]:
    """The result of ``rates``, which asks whether ``trial`` ``meets`` the target at each.

    Args:
        known: results by rate, which are not simulated again; further ones are added.
    """
    try:
        asked = next(rates)
        while True:
            if new := [rate for rate in asked if rate not in known]:
                known.update(zip(new, (yield [Run(trial, rate) for rate in new]), strict=True))
            asked = rates.send([meets(known[rate]) for rate in asked])
    except StopIteration as stop:
        found: float = stop.value
        return found


class Screened(NamedTuple):
    """What the scout found of a layout. It ranks layouts, and is no figure of a plan."""

    rate: float
    """Highest rate at which the scout meets the target; 0 if none does."""
    mean_residence_s: float
    """Mean time from arrival to last token at that rate."""
    num_requests: int
    """Scouted requests over all runs."""


def find_best(
    runner: Runner, trials: Sequence[Trial], first: int, start_rate: float, tolerance: float
) -> tuple[int, Screened]:
    """By the scout, the trial with the highest rate in an ordered sequence with one peak, climbed from ``first``."""

    @cache
    def screened(index: int) -> Screened:
        step = _CHUNK_STEP if len(trials) > 1 else _SCREEN_STEP
        return _screened(runner, trials[index], start_rate, step, 1 + tolerance)

    best = first
    while True:
        near = [index for index in (best, best + 1, best - 1) if 0 <= index < len(trials)]
        higher = max(near, key=lambda index: screened(index).rate)
        if higher == best:
            return best, screened(best)
        best = higher


def _screened(runner: Runner, trial: Trial, start_rate: float, step: float, tolerance: float) -> Screened:
    points: dict[float, Attainment] = {}

    def meets(rate: float) -> bool:
        points[rate] = runner.scouted(trial, rate)
        return points[rate].meets(trial.slo.attainment)

    rate = highest_rate(meets, start_rate, step, tolerance)
    residence_s = points[rate or min(points)].mean_residence_s
    return Screened(rate, residence_s, sum(point.num_requests for point in points.values()))


def bracketing(start_rate: float, step: float, tolerance: float) -> Generator[Sequence[float], Sequence[bool], float]:
    """Ask of one or two rates at a time, lowest first, whether they meet the target; return the highest that does,
    below one that does not and is at most ``tolerance`` times as high, or 0 if no rate does. What is answered of a rate
    above one that does not meet the target is ignored. The steps to bracket the result grow, then the bracket is
    divided. Two rates at a time, because they can be simulated at once, and cost as much as two after one another.
    """
    assert start_rate > 0
    low, high = 0.0, inf
    asked = [start_rate, start_rate * step]
    while not low or high / low > tolerance:
        answers = yield asked
        num_met = [*answers, False].index(False)
        low, high = ([low, *asked][num_met], [*asked, high][num_met])
        if low > start_rate / _LEAST_SHARE and high == inf:
            return low
        if high < start_rate * _LEAST_SHARE and not low:
            return 0.0
        if low and high < inf:
            num_parts = min(3, ceil(log(high / low) / log(tolerance) - 1e-9))
            asked = [low * (high / low) ** (part / num_parts) for part in range(1, num_parts)]
        else:
            near, far = step**1.5, step**3.75
            asked = [low * near, low * far] if low else [high / far, high / near]
            step = step**2.25
    return low


def highest_rate(meets: Callable[[float], bool], start_rate: float, step: float, tolerance: float) -> float:
    """The result of `bracketing`, whose questions ``meets`` answers, one after the other and none in vain."""
    rates = bracketing(start_rate, step, tolerance)
    try:
        asked = next(rates)
        while True:
            answers = [True]
            for rate in asked:
                answers.append(answers[-1] and meets(rate))
            asked = rates.send(answers[1:])
    except StopIteration as stop:
        found: float = stop.value
        return found


def search_fall(
    trial: Trial,
    rate: float,
    points: dict[float, Attainment],
    figure: Callable[[Attainment], float],
    tolerance: float,
    most_runs: int,
) -> Search[float]:
    """Rate at which ``figure`` falls to the target of ``trial``, or the first that saturates the cluster.

    Args:
        rate: one at which it has not fallen; results of lower ones are left out.
        points: results by rate; those of at most ``most_runs`` further runs are added, until one is near.
        tolerance: ratio of the result to a near one.
    """
    for _ in range(most_runs):
        found = fall_rate(points.values(), rate, trial.slo.attainment, figure, tolerance)
        if any(1 / tolerance < point / found < tolerance for point in points):
            break
        points[found] = yield from single_run(trial, found)
    return fall_rate(points.values(), rate, trial.slo.attainment, figure, tolerance)


def fall_rate(
    points: Iterable[Attainment],
    rate: float,
    target: float,
    figure: Callable[[Attainment], float] = lambda seen: seen.interval.high,
    tolerance: float = inf,
) -> float:
    """Rate at which ``figure``, by default the upper confidence limit, falls to ``target``: between two simulated
    rates in proportion, beyond the highest one along the line through the last two. If the cluster is saturated at the
    higher one, that, or the middle if the other one is not within ``tolerance``.
    """
    in_order = sorted((point for point in points if point.rate >= rate), key=lambda point: point.rate)
    if len(in_order) < 2 or figure(in_order[0]) <= target:
        return in_order[0].rate if in_order else rate
    pairs = list(pairwise(in_order))
    below, above = next((pair for pair in pairs if figure(pair[1]) < target or pair[1].is_saturated), pairs[-1])
    high, low = figure(below), figure(above)
    if above.is_saturated:
        return above.rate if above.rate <= below.rate * tolerance else sqrt(below.rate * above.rate)
    if high <= low or high <= target:
        return above.rate
    steps = (high - target) / (high - low)
    return below.rate * exp(min(steps, 3.0) * log(above.rate / below.rate))
