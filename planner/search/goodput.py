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
from math import inf
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from pdserve.contracts.deployment import DEFAULT_POLICY, SloConfig
from pdserve.planner.layout import Layout, PlannedModel
from pdserve.planner.search.rates import bracketing, fall_rate, highest_rate
from pdserve.planner.simulate.attainment import NUM_LOOKS, Attainment, Interval, measure, seems_over
from pdserve.planner.simulate.simulator import NO_LOOKS, simulate
from pdserve.planner.workload.requests import DrawnRequests, SimulatedRequest

if TYPE_CHECKING:
    from pdserve.planner.simulate.scout import ScoutRequests

LEAST_REQUESTS = 8000
"""Of a run of usual length, however short its requests are, if the workload has as many."""
LOOKS = (1.0, 2.0)
"""Lengths of a run in terms of the usual one (`Trial.run_s`): it ends at the first unless the second may decide."""
assert len(LOOKS) == NUM_LOOKS
LEAST_RUN = 0.375
"""Length of the shortest run that states a rate, alike, where the workload has no more requests."""
_STEP = 1.1
"""Ratio of the first two rates of a search for a goodput."""
_MOST_END_RUNS = 3
"""To find the rate that surely misses the target, where no simulated one is within the tolerance."""
_SCREEN_STEP, _CHUNK_STEP = 1.5, 1.05
"""The same for a search by the scout, and if only the chunk budget of a layout is another."""


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
    policy: str = DEFAULT_POLICY
    """Of the router; the scout models ``least-time`` whatever it is."""
    num_requests: int = 20_000
    """Most of a run."""
    run_s: float = inf
    """Time that the arrivals of a run of usual length take, if that leaves `LEAST_REQUESTS`."""
    seed: int = 0

    @property
    def most_rate(self) -> float:
        """The highest rate that may be stated: beyond it all requests arrive within less than `LEAST_RUN`, most of them
        at a cluster that was idle. Infinite if the usual length is."""
        return self.num_requests / (LEAST_RUN * self.run_s) if self.run_s < inf else inf


class Run(NamedTuple):
    """What a search asks for."""

    trial: Trial
    rate: float


Result = TypeVar("Result")
Search = Generator[Run, Attainment, Result]
"""Asks for one run after the other, is sent what each attained, and returns its result."""


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


class Runner:
    """Simulates trials of one workload; caches draws and cost models."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._drawn = lru_cache(maxsize=32)(self._draw)
        self._unit_rate = lru_cache(maxsize=32)(self._at_unit_rate)
        self._cost = cache(lambda model, pool: pool.cost(model))

    def attainment(self, trial: Trial, rate: float) -> Attainment:
        """What the live schedulers and the policy attain at ``rate``.

        Raises:
            ValueError: the layout cannot run (`pdserve.planner.simulate.simulator.simulate`).
        """
        requests = self._drawn(trial.num_requests, trial.seed, trial.model.max_model_len).at_rate(rate)
        usual, longest = run_lengths(trial, requests)
        may_end = usual < longest
        simulation = simulate(
            trial.model,
            trial.layout,
            requests[:longest],
            slo=trial.slo,
            max_in_flight=_max_in_flight(trial),
            policy=trial.policy,
            cost_of=lambda pool: self._cost(trial.model, replace(pool, replicas=1)),
            looks={usual: partial(seems_over, slo=trial.slo, growth=longest / usual)} if may_end else NO_LOOKS,
        )
        return measure(simulation, trial.slo, rate, num_looks=NUM_LOOKS if may_end else 1)

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
        return measure(found.simulation(), trial.slo, rate)

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


def _max_in_flight(trial: Trial) -> int:
    """Placements are compared, not admission: accept long queues."""
    num_slots = sum(pool.replicas * pool.pipeline_parallel * pool.max_batch_size for pool in trial.layout.pools)
    return max(1024, 2 * num_slots)


# Searches


def search_goodput(
    trial: Trial, start_rate: float, *, tolerance: float = 0.02, known: Iterable[Attainment] = ()
) -> Search[Goodput]:
    """Goodput of ``trial``: the highest rate that surely meets the target, and about the first one that surely misses
    it, by runs near that; or a rate that meets it and is too high to be stated (`Trial.most_rate`).

    Args:
        start_rate: a guess; any rate above 0 leads to the same goodput, within the tolerance.
        tolerance: ratio, less 1, of the lowest rate that missed the target and the highest that met it.
        known: results of runs of ``trial``, which are not simulated again.

    Raises:
        ValueError: the layout cannot run.
    """
    target = trial.slo.attainment
    points = {point.rate: point for point in known}
    rates = bracketing(start_rate, _STEP, 1 + tolerance, most=trial.most_rate)
    rate = sure_rate = yield from answered(rates, trial, lambda seen: seen.surely_meets(target), points)
    met = [each for each, seen in points.items() if seen.meets(target)]
    if not rate and met:
        rates = bracketing(max(met), _STEP, 1 + tolerance)
        rate = yield from answered(rates, trial, lambda seen: seen.meets(target), points)
    most_runs = _MOST_END_RUNS if 0 < rate <= trial.most_rate else 0
    high = yield from search_fall(trial, rate, points, lambda seen: seen.interval.high, 1 + tolerance, most_runs)
    in_order = tuple(points[each] for each in sorted(points))
    return Goodput(
        rate=rate,
        interval=Interval(sure_rate, high),
        target=target,
        num_devices=trial.layout.num_devices,
        points=in_order,
    )


def search_better(
    trial: Trial, rate: float, is_met: Callable[[Attainment], bool], *, tolerance: float
) -> Search[Goodput | Attainment]:
    """Goodput of ``trial`` if its run at ``rate``, the goodput of another one, is met; otherwise that run."""
    seen = yield from single_run(trial, rate)
    if not is_met(seen):
        return seen
    return (yield from search_goodput(trial, rate, tolerance=tolerance, known=(seen,)))


def single_run(trial: Trial, rate: float) -> Search[Attainment]:
    """What ``trial`` attains at ``rate``."""
    return (yield Run(trial, rate))


def answered(
    rates: Generator[float, bool, float],
    trial: Trial,
    meets: Callable[[Attainment], bool],
    known: dict[float, Attainment],
) -> Search[float]:
    """The result of ``rates``, which asks whether ``trial`` ``meets`` the target at each.

    Args:
        known: results by rate, which are not simulated again; further ones are added.
    """
    try:
        rate = next(rates)
        while True:
            if rate not in known:
                known[rate] = yield from single_run(trial, rate)
            rate = rates.send(meets(known[rate]))
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
        found, highest = fall_rate(points.values(), rate, trial.slo.attainment, figure, tolerance), max(points)
        if found > highest:
            found = max(found, highest * tolerance**2)  # a guess, which a run must confirm
        if any(1 / tolerance < point / found < tolerance for point in points):
            break
        points[found] = yield from single_run(trial, found)
    return fall_rate(points.values(), rate, trial.slo.attainment, figure, tolerance)
