"""A small plan for tests of what is made of plans: real simulations of three layouts, put together by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.worker_config import WorkerRole
from pdserve.planner.layout import Layout
from pdserve.planner.search.estimates import Estimate, Resource
from pdserve.planner.search.goodput import Goodput
from pdserve.planner.search.plan import (
    Candidate,
    Plan,
    PoolFigures,
    Question,
    Screening,
    Sensitivity,
    Supply,
    Verdict,
)
from pdserve.planner.simulate.attainment import Attainment, Interval, measure
from pdserve.planner.simulate.simulator import simulate
from pdserve.planner.workload.requests import SimulatedRequest
from tests.planner.stand_ins import H100, LLAMA_3_8B, a_pool

MODEL = replace(LLAMA_3_8B, name="Llama-3-8B <i>")
SLO = SloConfig(ttft_seconds=0.25, tpot_seconds=0.02)
RATES = (4.0, 8.0, 16.0)


APART = Layout(prefill=a_pool(WorkerRole.PREFILL), decode=a_pool(WorkerRole.DECODE))
TOGETHER = Layout(mixed=a_pool(WorkerRole.MIXED, 2))
WIDE = Layout(prefill=a_pool(WorkerRole.PREFILL, 1, 2), decode=a_pool(WorkerRole.DECODE, 1, 2))


@cache
def a_plan() -> Plan:
    """Disaggregated, colocated, and a layout with tensor parallelism that was only estimated, in this order."""
    winner, runner_up = _simulated(APART, 16.0), _simulated(TOGETHER, 8.0)
    last = Candidate(
        layout=WIDE,
        estimate=Estimate(rate=6.0, resource=Resource.LINK),
        goodput=None,
        resource=Resource.LINK,
        pools=(_figures(WorkerRole.PREFILL), _figures(WorkerRole.DECODE)),
        dollars_per_hour=None,
    )
    return Plan(
        question=Question(model=MODEL, slo=SLO, fleet=(Supply(hardware=H100, devices_per_node=4),)),
        candidates=(winner, runner_up, last),
        verdict=Verdict(
            best_disaggregated=winner,
            best_colocated=runner_up,
            gain=1.0,
            is_clear=True,
            text="Disaggregate: 100 % more goodput than the best colocated layout.",
        ),
        screening=Screening(
            num_layouts=4,
            num_without_memory=1,
            num_infeasible=0,
            num_estimated=1,
            num_screened=0,
            num_simulated=2,
            num_requests=1200,
        ),
        mean_prompt_tokens=500.0,
        mean_output_tokens=50.0,
        elapsed_s=1.5,
        notes=("Prices are of a list.",),
    )


def _simulated(layout: Layout, rate: float) -> Candidate:
    points = tuple(_attainment(layout, each) for each in RATES)
    return Candidate(
        layout=layout,
        estimate=Estimate(rate=rate, resource=Resource.PREFILL_COMPUTE),
        goodput=Goodput(
            rate=rate,
            interval=Interval(rate * 0.9, rate * 1.1),
            target=SLO.attainment,
            num_devices=layout.num_devices,
            points=points,
        ),
        resource=Resource.PREFILL_COMPUTE,
        pools=tuple(_figures(pool.role) for pool in layout.pools),
        dollars_per_hour=6.0,
        saturation_rate=rate * 1.5,
        sensitivity=(Sensitivity(0.9, rate * 1.2), Sensitivity(1.1, rate * 0.8)),
        reasons=(f"At most {rate} requests/s: prefill compute.",),
    )


def _attainment(layout: Layout, rate: float) -> Attainment:
    random = np.random.default_rng(1)
    arrived_s = np.cumsum(random.exponential(1 / rate, 200))
    requests = [SimulatedRequest(float(at_s), 500, 50) for at_s in arrived_s]
    return measure(simulate(MODEL, layout, requests, slo=SLO), SLO, rate)


def _figures(role: WorkerRole) -> PoolFigures:
    return PoolFigures(
        role=role,
        weight_bytes_per_device=16e9,
        kv_bytes_per_device=56e9,
        memory_bytes_per_device=80 * 10**9,
        num_kv_blocks=26_000,
        max_concurrency=256,
        max_long_sequences=50,
        busy_share=0.7,
        kv_share=0.1,
    )
