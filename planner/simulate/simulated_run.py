"""Simulates one placement under one kind of traffic once, and evaluates the run.

Called by `pdserve simulate` and by the comparison of a proposal with a running cluster. The search uses
`pdserve.planner.search.goodput` instead, which does the same at many rates.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.contracts.deployment import DEFAULT_POLICY, SloConfig
from pdserve.planner.layout import Layout, PlannedModel
from pdserve.planner.simulate.attainment import Attainment, measure
from pdserve.planner.simulate.simulation import RequestTimes, Simulation
from pdserve.planner.simulate.simulator import Look, simulate
from pdserve.planner.workload.traffic import Traffic

_NUM_REPORTS = 20
"""Of the progress of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Arguments of one simulation."""

    model: PlannedModel
    layout: Layout
    traffic: Traffic
    slo: SloConfig
    num_requests: int
    rate: float = 0.0
    """Requests per second; 0 in a closed loop."""
    concurrency: int = 0
    """Sessions at once in a closed loop; a request without a next turn is one."""
    max_in_flight: int = 1024
    """Limit at the router."""
    policy: str = DEFAULT_POLICY
    """Placement policy of the router."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Result of one simulation."""

    run: Run
    attainment: Attainment
    """Its rate is the offered one or, in a closed loop, the achieved one."""
    simulation: Simulation
    elapsed_s: float = field(compare=False)

    @property
    def requests_per_s(self) -> float:
        """Finished requests per second, from the first arrival to the end."""
        times = self.simulation.times
        span_s = self.simulation.ended_s - float(times.arrived_s[0])
        return float((~times.is_rejected).sum()) / span_s if span_s > 0 else 0.0


def carry_out(run: Run, progress: Callable[[float, str], None] = lambda fraction, text: None) -> RunResult:
    """Simulate ``run``.

    Args:
        progress: receives the share of the requests that have arrived, and what is being done.

    Raises:
        ValueError: the model does not fit or divide by the layout's degrees, or the traffic has too few requests.
    """
    began_s = time.perf_counter()
    # A closed loop ignores arrival times.
    requests = run.traffic.draw(run.num_requests, run.seed).at_rate(run.rate or 1.0)
    activity, num_first = f"simulating {run.num_requests:,} requests", len(requests)
    progress(0.0, activity)

    def look_at(number: int) -> Look:
        def look(times: RequestTimes, now_s: float) -> bool:
            progress(number / num_first, activity)
            return False

        return look

    simulation = simulate(
        run.model,
        run.layout,
        requests,
        slo=run.slo,
        concurrency=run.concurrency,
        max_in_flight=run.max_in_flight,
        policy=run.policy,
        looks={number: look_at(number) for number in range(1, num_first, -(-num_first // _NUM_REPORTS))},
    )
    num_seen = len(simulation.times.arrived_s)
    rate = run.rate or num_seen / max(simulation.ended_s - float(simulation.times.arrived_s[0]), 1e-9)
    attainment = measure(simulation, run.slo, rate)
    return RunResult(run=run, attainment=attainment, simulation=simulation, elapsed_s=time.perf_counter() - began_s)
