"""Goodput of one layout: the highest rate at which enough requests meet both objectives, by simulation.

Defines a trial (`Trial`), its runs (`Run`, executed by a `Runner`) and the result (`Goodput`). A `RateSearch` only
requests runs, through `ask` and `tell`; `pdserve.planner.process_pool` executes the runs of many searches in parallel.
`pdserve.planner.goodput_search` chooses the rates. All rates, and all layouts with the same workload and seeds, see the
same requests in the same pattern, only scaled in time (common random numbers), so that differences come from the
layouts alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple, Protocol

from pdserve.contracts.deployment import SloConfig
from pdserve.model.cost.cost_model import CostModel
from pdserve.planner.attainment import Attainment, Interval, measure
from pdserve.planner.layout import Layout, PlannedModel, Pool
from pdserve.planner.requests import SimulatedRequest
from pdserve.planner.simulation import Simulation
from pdserve.planner.simulator import Overheads, simulate
from pdserve.planner.workload import Clamped

_HOPELESS = 2.0
"""Missed requests at which a run is stopped, as a multiple of the number that the target allows."""


class DrawnRequests(Protocol):
    """Requests without a rate yet."""

    @property
    def clamped(self) -> Clamped:
        """Requests shortened to the model's length."""
        ...

    def at_rate(self, requests_per_s: float) -> Sequence[SimulatedRequest]:
        """The requests in order of arrival, at this rate."""
        ...


class Workload(Protocol):
    """Source of requests: `pdserve.planner.workload`."""

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
    """One run each, at the rates that matter."""
    is_finite: bool = False
    """See `pdserve.planner.attainment.measure`."""
    overheads: Overheads = field(default_factory=Overheads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The highest rate that met the target, and all points on the way to it."""

    rate: float
    """Requests per second of the whole layout at which attainment falls to the target; 0 if none met it."""
    interval: Interval
    """95 % confidence interval for the simulated requests."""
    target: float
    """Required attainment."""
    num_devices: int
    points: tuple[Attainment, ...]
    """Every simulated rate, in order; runs stopped early are upper bounds (`Attainment.is_partial`)."""
    num_requests: int
    """Simulated requests over all runs."""
    is_capped: bool = False
    """The highest allowed rate met the target: the goodput is at least that high."""

    @property
    def at_rate(self) -> Attainment | None:
        """Result at the goodput: the nearest rate simulated to the end, with the most seeds."""
        return min(
            (point for point in self.points if self.rate and not point.is_partial),
            key=lambda point: (-point.num_requests, abs(point.rate - self.rate)),
            default=None,
        )

    def nearest(self, rate: float) -> Attainment | None:
        """Result at the nearest rate to ``rate`` that was simulated to the end."""
        whole = (point for point in self.points if not point.is_partial)
        return min(whole, key=lambda point: abs(point.rate - rate), default=None)

    @property
    def rate_per_device(self) -> float:
        return self.rate / self.num_devices


class Run(NamedTuple):
    """One requested simulation."""

    trial: Trial
    rate: float
    seed: int
    is_whole: bool
    """Run to the end in any case; otherwise stop once clearly too many requests have missed."""


class Runner:
    """Executes runs on one workload; caches draws and cost models."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._drawn: dict[tuple[int, int, int], DrawnRequests] = {}
        self._costs: dict[tuple[PlannedModel, Pool], CostModel] = {}

    def carry_out(self, run: Run) -> Simulation:
        """Simulate ``run``.

        Raises:
            ValueError: the layout cannot run (`pdserve.planner.simulator.simulate`).
        """
        trial = run.trial
        num_slots = sum(pool.replicas * pool.pipeline_parallel * pool.max_batch_size for pool in trial.layout.pools)
        return simulate(
            trial.model,
            trial.layout,
            self._draw(trial, run.seed).at_rate(run.rate),
            slo=trial.slo,
            overheads=trial.overheads,
            # Placements are compared, not admission: accept a queue of any length.
            max_in_flight=max(1024, 2 * num_slots),
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
    """Misses so far above the target that the rest of the run adds no information on the goodput."""
    return int(_HOPELESS * (1 - trial.slo.attainment) * trial.num_requests) + 1


class RateSearch(Protocol):
    """A result that takes several runs."""

    def ask(self) -> list[Run]:
        """Runs needed next, in any order or in parallel; none once the result is known."""
        ...

    def tell(self, run: Run, simulation: Simulation) -> None:
        """Receive the result of one run."""
        ...

    @property
    def num_requests(self) -> int:
        """Simulated so far."""
        ...


def run_search(search: RateSearch, runner: Runner) -> None:
    """Execute all runs of ``search``, one after another.

    Raises:
        ValueError: the layout cannot run.
    """
    while runs := search.ask():
        for run in runs:
            search.tell(run, runner.carry_out(run))


class OneRate:
    """Finds a trial's attainment at one rate; a `RateSearch`."""

    def __init__(self, trial: Trial, rate: float) -> None:
        self._trial = trial
        self._rate = rate
        self._seen: dict[int, Simulation] = {}

    def ask(self) -> list[Run]:
        return [Run(self._trial, self._rate, seed, True) for seed in self._trial.seeds if seed not in self._seen]

    def tell(self, run: Run, simulation: Simulation) -> None:
        self._seen[run.seed] = simulation

    @property
    def num_requests(self) -> int:
        return sum(len(simulation.times.arrived_s) for simulation in self._seen.values())

    def attainment(self) -> Attainment:
        """The result; call once `ask` returns nothing."""
        return measured(self._trial, self._rate, [self._seen[seed] for seed in self._trial.seeds])


def measured(trial: Trial, rate: float, runs: Sequence[Simulation]) -> Attainment:
    """Attainment over a trial's runs at one rate, in order of their seeds."""
    return measure(
        runs,
        trial.slo,
        rate,
        num_offered=trial.num_requests,
        is_finite=trial.is_finite,
    )


def slowed(trial: Trial, time_factor: float) -> Trial:
    """The same trial on a clock that runs ``time_factor`` times as fast.

    If all steps and transfers take ``time_factor`` times as long, the run is unchanged in a time unit that is longer by
    the same factor: in that unit, objectives and overheads are shorter, and rates higher by the factor. The goodput of
    the slowed cluster is this trial's goodput divided by ``time_factor``.
    """
    slo, overheads = trial.slo, trial.overheads
    return replace(
        trial,
        slo=replace(slo, ttft_seconds=slo.ttft_seconds / time_factor, tpot_seconds=slo.tpot_seconds / time_factor),
        overheads=Overheads(**{each.name: getattr(overheads, each.name) / time_factor for each in fields(overheads)}),
    )
