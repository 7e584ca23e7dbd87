"""Disaggregated against colocated serving, in the simulator: attainment by rate of the best layout of each kind.

    python -m pdserve.bench.disaggregation [--only NAME] [--requests N] [--seeds N] [--json FILE]

Llama-3-8B on eight H100. For each workload the search finds the best layout of each kind, chunks tuned, and the judge
serves both at the same rates, with seeds that the search has not seen. `mixed` compares six prefill and two decode
workers, for code within a TPOT of 20 ms, with the same when two of the six are mixed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import Any

from pdserve.bench.models import LLAMA_3_8B
from pdserve.bench.plans_that_hold import FIRST_FRESH_SEED, Case, plan_of
from pdserve.bench.policies import MAX_IN_FLIGHT, layout
from pdserve.bench.script import publish, script_parser
from pdserve.contracts.deployment import DEFAULT_POLICY, PLANNED_POLICY, SloConfig
from pdserve.contracts.worker_config import WorkerRole
from pdserve.planner.layout import Layout
from pdserve.planner.simulate.attainment import Attainment, measure
from pdserve.planner.simulate.simulator import simulate
from pdserve.planner.workload.traffic import named_traffic

MODEL = replace(LLAMA_3_8B, max_model_len=8192)
WORKLOADS = ("chat", "code", "summarisation", "agent")
MIXED, MIXED_SLO = "mixed", SloConfig(ttft_seconds=0.45, tpot_seconds=0.02)
MIXED_RATES = (90.0, 105.0, 115.0, 125.0, 140.0)
NUM_PROCESSES = len(os.sched_getaffinity(0))
SHARES = (0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4)
"""Rates, as shares of the better kind's goodput."""
Served = tuple[Layout, str]
"""A layout and its policy."""


def attained(
    run: tuple[Served, float], *, workload: str, slo: SloConfig, num_requests: int, seeds: Sequence[int]
) -> Attainment:
    (used, policy), rate = run
    traffic = named_traffic(workload, max_model_len=MODEL.max_model_len)
    samples = (traffic.draw(num_requests, seed).at_rate(rate) for seed in seeds)
    runs = [simulate(MODEL, used, each, slo=slo, max_in_flight=MAX_IN_FLIGHT, policy=policy) for each in samples]
    return measure(runs, slo, rate)


def best_of_each_kind(name: str) -> tuple[dict[str, Served], SloConfig, tuple[float, ...]]:
    """Layouts by kind and text, their objectives, and rates around the higher goodput."""
    traffic = named_traffic(name, max_model_len=MODEL.max_model_len)
    plan = plan_of(Case(model=MODEL, gpu="h100-sxm", num_gpus=8, traffic=name), traffic, NUM_PROCESSES)
    cases: dict[str, Served] = {}
    for candidate in filter(None, (plan.verdict.best_disaggregated, plan.verdict.best_colocated)):
        chunks = "/".join(str(pool.max_batch_tokens) for pool in candidate.layout.pools)
        text = f"{candidate.layout}, chunks of {chunks}, goodput {candidate.rate:.1f}/s"
        cases[text] = candidate.layout, PLANNED_POLICY
    return cases, plan.question.slo, tuple(round(share * plan.best.rate, 1) for share in SHARES)


def with_two_mixed() -> tuple[dict[str, Served], SloConfig, tuple[float, ...]]:
    """Both clusters under the default policy and that of plans."""
    pure, fewer = layout(6, 2), layout(4, 2)
    partly_mixed = replace(fewer, mixed=replace(fewer.decode_pool, role=WorkerRole.MIXED))
    served = product((pure, partly_mixed), (DEFAULT_POLICY, PLANNED_POLICY))
    return {", ".join(map(str, each)): each for each in served}, MIXED_SLO, MIXED_RATES


def curves(name: str, num_requests: int, seeds: Sequence[int], pool: ProcessPoolExecutor) -> dict[str, Any]:
    """Attainment by layout and rate."""
    cases, slo, rates = with_two_mixed() if name == MIXED else best_of_each_kind(name)
    run = partial(attained, workload="code" if name == MIXED else name, slo=slo, num_requests=num_requests, seeds=seeds)
    runs = pool.map(run, list(product(cases.values(), rates)))
    found = {text: [next(runs) for _ in rates] for text in cases}
    return {
        "name": name,
        "ttft_s": slo.ttft_seconds,
        "tpot_s": slo.tpot_seconds,
        "rates": rates,
        "attainment": {text: [round(at.share, 4) for at in curve] for text, curve in found.items()},
        "saturated_at": {text: [at.rate for at in curve if at.is_saturated] for text, curve in found.items()},
    }


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--only", choices=[*WORKLOADS, MIXED], help="one of the comparisons")
    parser.add_argument("--requests", type=int, default=10_000, help="of each run")
    parser.add_argument("--seeds", type=int, default=1, help="runs for each layout and rate")
    arguments = parser.parse_args()
    seeds = range(FIRST_FRESH_SEED, FIRST_FRESH_SEED + arguments.seeds)
    names = [arguments.only] if arguments.only else [*WORKLOADS, MIXED]
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=get_context("spawn")) as pool:
        records = [curves(name, arguments.requests, seeds, pool) for name in names]
    publish({"requests_per_run": arguments.requests, "seeds": list(seeds), "curves": records}, arguments.json)


if __name__ == "__main__":
    main()
