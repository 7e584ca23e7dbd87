"""Goodput of one layout: the highest rate at which enough requests meet both objectives, by simulation.

Defines a trial (`Trial`), its runs (`Run`, executed by a `Runner`) and the result (`Goodput`). A `RateSearch` is a task
of several runs that only requests them; `pdserve.planner.process_pool` executes the runs of many in parallel.
`pdserve.planner.goodput_search` decides where to look. All rates, and all layouts with the same workload and seeds, see
the same requests in the same pattern, only closer together (common random numbers), so that differences come from the
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


class RateSearch(Protocol):
    """What takes several runs to find out."""

    def ask(self) -> list[Run]:
        """Runs that it needs now, in any order or side by side; none once all is known."""
        ...

    def tell(self, run: Run, simulation: Simulation) -> None:
        """What came of one of them."""
        ...

    @property
    def num_requests(self) -> int:
        """Simulated so far."""
        ...


def run_search(search: RateSearch, runner: Runner) -> None:
    """Carry out all its runs, one after another.

    Raises:
        ValueError: the layout cannot be run.
    """
    while runs := search.ask():
        for run in runs:
            search.tell(run, runner.carry_out(run))


class OneRate:
    """Finds what attainment a trial has at one rate; a `RateSearch`."""

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
        """Once nothing is wanted any more."""
        return measured(self._trial, self._rate, [self._seen[seed] for seed in self._trial.seeds])


def measured(trial: Trial, rate: float, runs: Sequence[Simulation]) -> Attainment:
    """What runs of a trial at one rate came to, in order of their seeds."""
    return measure(
        runs,
        trial.slo,
        rate,
        num_offered=trial.num_requests,
        is_finite=trial.is_finite,
    )


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
