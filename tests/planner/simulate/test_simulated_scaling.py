"""Simulated clusters whose numbers of workers follow the load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.worker_config import WorkerRole
from pdserve.planner.autoscale import Autoscaler, Bounds
from pdserve.planner.layout import Layout
from pdserve.planner.simulate.simulation import Simulation
from pdserve.planner.simulate.simulator import simulate
from pdserve.planner.workload.requests import SimulatedRequest
from tests.planner.plans import MODEL
from tests.planner.stand_ins import a_pool

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
SLO = SloConfig(ttft_seconds=1.0, tpot_seconds=0.02)


def requests(rates: Sequence[float], num_prompt: int, num_output: int) -> list[SimulatedRequest]:
    """At these rates for a minute each."""
    random = np.random.default_rng(0)
    return [
        SimulatedRequest(60.0 * minute + float(at_s), num_prompt, num_output)
        for minute, rate in enumerate(rates)
        for at_s in np.sort(random.uniform(0, 60, round(rate * 60)))
    ]


def run(rates: Sequence[float], *lengths: int, replicas: tuple[int, int], most: int) -> Simulation:
    pools = [
        replace(a_pool(role, number), max_batch_size=16)
        for role, number in zip((PREFILL, DECODE), replicas, strict=True)
    ]
    layout = Layout(prefill=pools[0], decode=pools[1])
    bounds = {PREFILL: Bounds(1, most), DECODE: Bounds(1, most)}
    found = simulate(
        MODEL,
        layout,
        requests(rates, *lengths),
        slo=SLO,
        autoscaler=Autoscaler(bounds),
        start_s=10.0,
        max_in_flight=10**6,
    )
    assert not found.times.is_rejected.any()
    assert np.isfinite(found.times.last_token_s).all(), "no answer is lost when workers leave"
    return found


def test_workers_come_and_go_with_the_load() -> None:
    found = run([1, 14, 1, 1, 1, 1], 6000, 10, replicas=(1, 1), most=6)
    numbers = [tuple(each.replicas.values()) for each in found.scaled]
    assert max(prefill for prefill, _ in numbers) >= 3
    assert numbers[-1] == (1, 1)
    assert {each.reason for each in found.scaled} == {"prefill_short", "surplus"}
    num_most = max(map(sum, numbers))
    assert 2 * found.ended_s < found.worker_s < 0.8 * num_most * found.ended_s


def test_workers_take_the_role_that_is_short_before_any_starts() -> None:
    found = run([10], 50, 400, replicas=(3, 1), most=3)
    use = {worker.worker_id: worker.role for worker in found.workers}
    assert found.scaled
    assert len(use) == 4, "none was started"
    assert sum(role is DECODE for role in use.values()) > 1
