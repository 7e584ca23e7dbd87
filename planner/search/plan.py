"""The planner's question and answer as plain values: requirements, ranked candidates, reasons and figures.

`pdserve.planner.search.search` fills them in, the CLI and the reports render them, and a candidate's layout becomes a
deployment file. Decides nothing. Rates are requests per second of the whole layout; money is in US dollars.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import ceil, inf

from pdserve.contracts.deployment import DEFAULT_POLICY, SloConfig
from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.cost.hardware import Hardware
from pdserve.planner.layout import Layout, PlannedModel, Pool
from pdserve.planner.search.estimates import Estimate, Resource
from pdserve.planner.search.goodput import Goodput, Trial
from pdserve.planner.simulate.attainment import Attainment


class Objective(Enum):
    """Ranking criterion."""

    RATE = "rate"
    """Highest goodput of the whole fleet; ties go to fewer devices."""
    RATE_PER_DEVICE = "rate-per-device"
    """Highest goodput per device of the layout, which may use part of the fleet: a unit to replicate."""
    FEWEST_DEVICES = "fewest-devices"
    """Fewest devices whose goodput is at least `Question.rate`; ties go to the higher goodput."""
    LEAST_COST = "least-cost"
    """Fewest dollars per hour for that rate."""

    @property
    def has_rate(self) -> bool:
        """Whether a required rate is part of the objective."""
        return self in (Objective.FEWEST_DEVICES, Objective.LEAST_COST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """Devices of one kind, on uniform hosts."""

    hardware: Hardware
    num_nodes: int = 1
    devices_per_node: int = 8
    dollars_per_hour: float | None = None
    """Per device; ``None`` uses the catalogue's price, if it has one."""

    @property
    def price(self) -> float | None:
        """Dollars per hour of one device; ``None`` if unknown."""
        return self.hardware.price_per_hour_usd if self.dollars_per_hour is None else self.dollars_per_hour

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What the search may vary, besides degrees and replicas."""

    tensor_parallel: tuple[int, ...] = ()
    """Degrees to try; empty tries powers of two up to a host's devices, and divisors of that number, if they divide the
    model."""
    pipeline_parallel: tuple[int, ...] = (1, 2, 4)
    mixed_batch_tokens: tuple[int, ...] = ()
    """Chunk budgets of colocated workers; empty: the best power of two, as screened."""
    may_disaggregate: bool = True
    running: tuple[Pool, ...] = ()
    """Pools of a running cluster. Prefill and decode workers have the limits of theirs."""
    keeps_pools: bool = False
    """Only the numbers of workers of those pools vary."""

    def like(self, role: WorkerRole) -> Pool | None:
        """The running pool of that role."""
        return next((pool for pool in self.running if pool.role is role), None)


LEAST_FINAL_REQUESTS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Amount of simulation."""

    screen_requests: int = 10_000
    """Per screened layout and rate."""
    final_requests: int | None = None
    """Most of a finalist's run; it ends earlier if that covers its residences (`pdserve.planner.search.search`).
    ``None`` for twice as many as that takes, `LEAST_FINAL_REQUESTS` at least."""
    most_requests: int | None = None
    """Maximum of any simulation: a trace has no more. ``None`` for no limit."""
    seed: int = 0
    """All candidates see the same requests."""
    num_screened: int = 8
    num_finalists: int = 3
    """At most, unless none of them answers the question, or a rate is required."""
    tolerance: float = 0.04
    """Ratio, less 1, of two neighbouring rates of which one meets the target and the other does not."""

    def requests_of_run(self, rate: float, run_s: float) -> int:
        """Most requests of a finalist's run at about that ``rate``, of which one of usual length takes ``run_s``."""
        return self.limited(self.final_requests or max(LEAST_FINAL_REQUESTS, ceil(2 * rate * run_s)))

    def limited(self, num_requests: int) -> int:
        """At most as many as the workload has."""
        return num_requests if self.most_requests is None else min(num_requests, self.most_requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The planning task, apart from the workload."""

    model: PlannedModel
    slo: SloConfig
    fleet: tuple[Supply, ...]
    objective: Objective = Objective.RATE
    rate: float = 0.0
    """Required rate, for objectives that have one."""
    policy: str = DEFAULT_POLICY
    """Of the router that will serve; all simulations of finalists have it."""
    space: Space = Space()
    effort: Effort = Effort()

    def trial(self, layout: Layout, num_requests: int, run_s: float = inf) -> Trial:
        """Of ``layout``, in runs of at most so many requests; see `Trial.run_s`."""
        return Trial(
            model=self.model,
            layout=layout,
            slo=self.slo,
            policy=self.policy,
            num_requests=num_requests,
            run_s=run_s,
            seed=self.effort.seed,
        )

    @property
    def guesses_note(self) -> str:
        """What is assumed of guesses, which is said of CPUs alone; empty if there are none."""
        has_cpus = any(supply.hardware.is_host for supply in self.fleet)
        return "Assumes no guesses: with speculation, answers may be faster." if has_cpus else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFigures:
    """Figures of one pool of a candidate; per worker unless stated otherwise."""

    role: WorkerRole
    weight_bytes_per_device: float
    kv_bytes_per_device: float
    """The whole block pool."""
    memory_bytes_per_device: int
    """Capacity of the device."""
    num_kv_blocks: int
    max_concurrency: int
    """Sequences of the workload's mean length that decode together, within KV and the batch limit."""
    max_long_sequences: int
    """Sequences of ``max_model_len`` that fit in KV."""
    busy_share: float
    """At the goodput; 0 without a simulation."""
    kv_share: float


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Goodput if every step and transfer took longer or shorter than predicted."""

    time_factor: float
    """1.1 is 10 % slower."""
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One layout and its results."""

    layout: Layout
    estimate: Estimate
    goodput: Goodput | None
    """``None``: not searched; the rate is an estimate."""
    resource: Resource
    pools: tuple[PoolFigures, ...]
    dollars_per_hour: float | None
    at_winners_rate: Attainment | None = None
    """Result at the winner's rate, if it was simulated there."""
    saturation_rate: float | None = None
    """Rate at which attainment falls to half of its target, or answers lag behind arrivals; winner only."""
    sensitivity: tuple[Sensitivity, ...] = ()
    """Winner only."""
    reasons: tuple[str, ...] = ()
    """Sentences: the binding objective and resource; for all but the winner, why it lost."""

    @property
    def is_estimated(self) -> bool:
        return self.goodput is None

    @property
    def rate(self) -> float:
        """Goodput, simulated or estimated."""
        return self.estimate.rate if self.goodput is None else self.goodput.rate

    @property
    def rate_per_device(self) -> float:
        return self.rate / self.layout.num_devices

    @property
    def saturation_margin(self) -> float | None:
        """Saturation rate over goodput: 1.2 is 20 % of headroom before saturation."""
        return None if self.saturation_rate is None or not self.rate else self.saturation_rate / self.rate

    def dollars_per_million_tokens(self, output_tokens_per_request: float) -> float | None:
        """Per million answer tokens at the goodput; ``None`` without a price or a rate."""
        if self.dollars_per_hour is None or not self.rate:
            return None
        return self.dollars_per_hour / 3600 / (self.rate * output_tokens_per_request) * 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Disaggregated or colocated, by the question's objective."""

    best_disaggregated: Candidate | None
    best_colocated: Candidate | None
    gain: float | None
    """Goodput of the best disaggregated layout over the best colocated one's, minus 1: 0.3 is 30 % more. Depending on
    the objective, goodput per device, or requests per device or dollar at the required rate. ``None`` if a kind is
    missing."""
    is_clear: bool
    """The confidence intervals do not overlap; for devices or dollars, the cheaper layout surely serves the rate."""
    text: str
    """One sentence."""

    @property
    def serve_colocated(self) -> bool:
        return self.gain < 0 if self.gain is not None else self.best_colocated is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Screening:
    """Number of layouts by outcome."""

    num_layouts: int
    num_without_memory: int
    num_infeasible: int
    """Miss the SLO even on an idle cluster."""
    num_estimated: int
    """Estimate too low to be worth more."""
    num_screened: int
    """Ranked by the scout, and not worth a simulation."""
    num_simulated: int
    num_requests: int
    """Simulated requests over all runs, without the scout's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Answer of the planner."""

    question: Question
    candidates: tuple[Candidate, ...]
    """In order of rank: simulated ones, then estimates."""
    verdict: Verdict
    screening: Screening
    mean_prompt_tokens: float
    mean_output_tokens: float
    elapsed_s: float = field(compare=False)
    notes: tuple[str, ...] = ()
    """Assumptions and limits that the reader should know."""

    @property
    def best(self) -> Candidate:
        return self.candidates[0]


class FitsNowhereError(ValueError):
    """No layout of the fleet holds the weights and one sequence of ``max_model_len``; the message names the smallest
    that would."""


class InfeasibleError(ValueError):
    """No layout answers the question."""


class InfeasibleSloError(InfeasibleError):
    """Even an idle cluster misses the SLO; the message names the best possible latencies."""


class InfeasibleRateError(InfeasibleError):
    """The fleet is too small for the required rate; the message names the rate that it serves."""
