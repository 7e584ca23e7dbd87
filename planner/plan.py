"""The planner's question and answer as plain values: requirements, ranked candidates, reasons and figures.

`pdserve.planner.search` fills them in; the CLI and the reports render them; a deployment file is written from a
candidate's layout. Decides nothing. Rates are requests per second of the whole layout; money is in US dollars.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.placement import WorkerRole
from pdserve.model.cost.hardware import Hardware
from pdserve.planner.attainment import Attainment
from pdserve.planner.bounds import Bounds, Resource
from pdserve.planner.goodput import Goodput
from pdserve.planner.layout import Layout, PlannedModel


class Objective(Enum):
    """By what candidates are ranked."""

    RATE = "rate"
    """The highest goodput that the fleet as a whole can give; ties to fewer devices."""
    RATE_PER_DEVICE = "rate-per-device"
    """The highest goodput per device of the layout, which may use a part of the fleet: a unit to replicate."""
    FEWEST_DEVICES = "fewest-devices"
    """The fewest devices whose goodput is at least `Question.rate`; ties to the higher goodput."""
    LEAST_COST = "least-cost"
    """The fewest dollars an hour for it."""

    @property
    def has_rate(self) -> bool:
        """Whether it asks for the means to serve a given rate."""
        return self in (Objective.FEWEST_DEVICES, Objective.LEAST_COST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """Devices of one kind: so many hosts, of so many each."""

    hardware: Hardware
    num_nodes: int = 1
    devices_per_node: int = 8
    dollars_per_hour: float | None = None
    """Of one device; ``None`` takes the catalogue's price, if it has one."""

    @property
    def price(self) -> float | None:
        """Dollars an hour of one device; ``None`` where none is known."""
        return self.hardware.price_per_hour_usd if self.dollars_per_hour is None else self.dollars_per_hour

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What the search may vary, beside degrees and replicas."""

    tensor_parallel: tuple[int, ...] = ()
    """Degrees to try; empty takes powers of two up to a host's devices, and what divides those, as far as they divide
    the model."""
    pipeline_parallel: tuple[int, ...] = (1, 2, 4)
    prefill_batch_tokens: tuple[int, ...] = (8192,)
    mixed_batch_tokens: tuple[int, ...] = (512, 2048)
    """Chunk budgets of colocated workers: a step's decode rows wait for it."""
    decode_batch_size: tuple[int, ...] = (256,)
    may_disaggregate: bool = True
    may_colocate: bool = True
    max_replicas: int = 0
    """Of each pool; 0 is no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is simulated for the answer."""

    screen_requests: int = 400
    """At least, of each layout that is screened, at each rate that is tried: more where many are in flight."""
    final_requests: int = 1000
    """At least, of each finalist, for each seed, at each rate."""
    most_requests: int | None = None
    """Of any simulation, where requests are many in flight: a trace has no more. ``None`` for no limit."""
    seeds: tuple[int, ...] = (0, 1)
    """Of the workloads of the best finalists; all candidates see the same. Others, and screening, take the first."""
    num_screened: int = 8
    num_finalists: int = 4
    tolerance: float = 0.06
    """How far, as a share, the goodput of the best finalists may lie from a rate that was simulated with all seeds."""
    is_finite: bool = False
    """Count all requests of a short run, and hold each objective's own percentile against it instead of both jointly:
    as papers do, and for comparison with theirs only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be planned; the workload is an argument of its own."""

    model: PlannedModel
    slo: SloConfig
    fleet: tuple[Supply, ...]
    objective: Objective = Objective.RATE
    rate: float = 0.0
    """That has to be served, where the objective asks for one."""
    space: Space = Space()
    effort: Effort = Effort()


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFigures:
    """What one pool of a candidate holds; of each worker unless said otherwise."""

    role: WorkerRole
    weight_bytes_per_device: float
    kv_bytes_per_device: float
    """Of its whole pool of blocks."""
    memory_bytes_per_device: int
    """What the device has."""
    num_kv_blocks: int
    max_concurrency: int
    """Sequences of the workload's mean length whose KV fits, as far as the batch limit lets them decode together."""
    max_long_sequences: int
    """Sequences of ``max_model_len`` whose KV fits."""
    busy_share: float
    """At the goodput; estimated where nothing was simulated."""
    kv_share: float


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What the goodput would be if every step and transfer took another time than predicted."""

    time_factor: float
    """1.1 is 10 % slower."""
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One layout, and what is known of it."""

    layout: Layout
    bounds: Bounds
    goodput: Goodput | None
    """``None``: it was not simulated, and its rate is an estimate."""
    resource: Resource
    pools: tuple[PoolFigures, ...]
    dollars_per_hour: float | None
    is_final: bool = False
    """Simulated at length, the best of a kind with several seeds; ``goodput.interval`` is a confidence interval."""
    at_winners_rate: Attainment | None = None
    """What it makes of the rate of the first in rank, or of one that is within `Effort.tolerance`; finalists only."""
    saturation_rate: float | None = None
    """Rate at which attainment falls to half of its target; the winner only."""
    sensitivity: tuple[Sensitivity, ...] = ()
    """The winner only."""
    reasons: tuple[str, ...] = ()
    """Sentences: what binds; for all but the first in rank, why it lost."""

    @property
    def is_estimated(self) -> bool:
        return self.goodput is None

    @property
    def rate(self) -> float:
        """Its goodput, simulated or estimated."""
        return self.bounds.estimate if self.goodput is None else self.goodput.rate

    @property
    def rate_per_device(self) -> float:
        return self.rate / self.layout.num_devices

    @property
    def saturation_margin(self) -> float | None:
        """Cliff rate over goodput: 1.2 is 20 % of head-room before it falls apart."""
        return None if self.saturation_rate is None or not self.rate else self.saturation_rate / self.rate

    def dollars_per_million_tokens(self, output_tokens_per_request: float) -> float | None:
        """Of answers, at its goodput; ``None`` without a price or a rate."""
        if self.dollars_per_hour is None or not self.rate:
            return None
        return self.dollars_per_hour / 3600 / (self.rate * output_tokens_per_request) * 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Disaggregated or colocated, by the objective that was asked."""

    best_disaggregated: Candidate | None
    best_colocated: Candidate | None
    gain: float | None
    """Goodput of the best disaggregated layout over that of the best colocated one, less 1: 0.3 is 30 % more. Per
    device, or for the devices or dollars it takes for the rate that was asked, where these are the objective. ``None``
    where there are not both."""
    is_clear: bool
    """Their confidence intervals do not overlap; of devices or dollars, the cheaper surely serves the rate."""
    text: str
    """One sentence."""

    @property
    def serve_colocated(self) -> bool:
        return self.gain < 0 if self.gain is not None else self.best_colocated is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Screening:
    """How many layouts there were, and why some were not simulated."""

    num_layouts: int
    num_without_memory: int
    num_infeasible: int
    """Even an idle cluster of theirs would miss the SLO."""
    num_bounded: int
    """Their bound is below what another was seen to reach."""
    num_estimated: int
    """Their estimates were too low to be worth a simulation."""
    num_simulated: int
    num_requests: int
    """Simulated, in all runs together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer."""

    question: Question
    candidates: tuple[Candidate, ...]
    """In order of rank: finalists, then those that were screened, then estimates."""
    verdict: Verdict
    screening: Screening
    mean_prompt_tokens: float
    mean_output_tokens: float
    elapsed_s: float = field(compare=False)
    notes: tuple[str, ...] = ()
    """What the reader should know: assumptions, limits that were hit."""

    @property
    def best(self) -> Candidate:
        return self.candidates[0]


class FitsNowhereError(ValueError):
    """No layout of the fleet holds the weights and one sequence of ``max_model_len``; the message names the smallest
    that would."""


class InfeasibleSloError(ValueError):
    """Not even an idle cluster meets the SLO; the message names the best that can be had."""


class InfeasibleRateError(ValueError):
    """The fleet is too small for the rate that was asked; the message says what it can serve."""
