"""Speed of the planner's simulator: simulated requests per second of CPU time, on one core.

    python -m pdserve.bench.simulator_speed [--runs 3] [--json FILE]

The time covers everything that a search computes for a point: scaling a drawn workload to a rate, `simulate`, and the
latencies and attainment. Each case runs several times; the fastest run counts, as the least disturbed, and all are
kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import process_time
from typing import Any

import numpy as np
from rich.console import Console

from pdserve.bench.models import LLAMA_3_8B, OPT_13B
from pdserve.bench.script import publish, script_parser
from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.placement import WorkerRole
from pdserve.model.cost.hardware import hardware
from pdserve.planner.layout import Layout, PlannedModel, Pool
from pdserve.planner.simulate import simulator
from pdserve.planner.workload.conversations import Conversations, SystemPrompts
from pdserve.planner.workload.presets import preset
from pdserve.planner.workload.workload import Workload, WorkloadSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A point of a search: a workload at a rate on a layout."""

    name: str
    model: PlannedModel
    layout: Layout
    workload: Workload
    requests_per_s: float
    num_requests: int


def pools(gpu: str, replicas: int, prefill_tensor_parallel: int = 1) -> Layout:
    """As many prefill as decode workers."""

    def pool(role: WorkerRole, tensor_parallel: int) -> Pool:
        return Pool(role=role, replicas=replicas, hardware=hardware(gpu), tensor_parallel=tensor_parallel)

    return Layout(prefill=pool(WorkerRole.PREFILL, prefill_tensor_parallel), decode=pool(WorkerRole.DECODE, 1))


def cases() -> list[Case]:
    """DistServe's example, and two with prefixes to share."""
    sharegpt = preset("sharegpt-synthetic")
    assert isinstance(sharegpt.contents, Conversations)
    system_prompts = Workload(
        name="sharegpt-synthetic after 8 system prompts of 1,024 tokens",
        contents=Conversations(lengths=sharegpt.contents.lengths, system_prompts=SystemPrompts(8, 1024)),
        slo=sharegpt.slo,
    )
    return [
        Case(
            name="1 prefill, 1 decode, nothing shared",
            model=OPT_13B,
            layout=pools("a100-80gb-sxm", 1, prefill_tensor_parallel=2),
            workload=sharegpt,
            requests_per_s=4.7,
            num_requests=5000,
        ),
        Case(
            name="4 prefill, 4 decode, shared system prompts",
            model=replace(LLAMA_3_8B, max_model_len=131072),
            layout=pools("h100-sxm", 4),
            workload=system_prompts,
            requests_per_s=60.0,
            num_requests=5000,
        ),
        Case(
            name="4 prefill, 4 decode, agents",
            model=replace(LLAMA_3_8B, max_model_len=131072),
            layout=pools("h100-sxm", 4),
            workload=preset("agent"),
            requests_per_s=20.0,
            num_requests=2000,
        ),
    ]


def run_once(case: Case, sample: WorkloadSample) -> tuple[float, float]:
    """CPU seconds, and the attainment that a search would learn."""
    slo = case.workload.slo or SloConfig()
    began_s = process_time()
    times = simulator.simulate(case.model, case.layout, sample.at_rate(case.requests_per_s), slo=slo).times
    is_met = (times.ttft_s <= slo.ttft_seconds) & (times.tpot_s <= slo.tpot_seconds)
    attainment = float(is_met.mean())
    return process_time() - began_s, attainment


def measure(case: Case, num_runs: int) -> dict[str, Any]:
    """Figures of a case."""
    sample = case.workload.draw(case.num_requests, max_model_len=case.model.max_model_len)
    statistics = sample.statistics()
    runs = [run_once(case, sample) for _ in range(num_runs)]
    fastest_s = min(cpu_s for cpu_s, _ in runs)
    return {
        "name": case.name,
        "layout": str(case.layout),
        "workload": case.workload.name,
        "requests_per_s": case.requests_per_s,
        "num_requests": sample.num_requests,
        "mean_prompt_tokens": round(statistics.mean_prompt_tokens, 1),
        "mean_output_tokens": round(statistics.mean_output_tokens, 1),
        "cacheable_share": round(statistics.cacheable_share, 3),
        "attainment": round(runs[0][1], 4),
        "simulated_requests_per_s": round(sample.num_requests / fastest_s),
        "simulated_tokens_per_s": round(int(np.sum(statistics.num_output_tokens)) / fastest_s),
        "cpu_s": [round(cpu_s, 3) for cpu_s, _ in runs],
    }


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--runs", type=int, default=3, help="of each case")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    results = []
    for case in cases():
        result = measure(case, arguments.runs)
        results.append(result)
        console.print(
            f"{result['name']}: {result['simulated_requests_per_s']:,} requests/s "
            f"({result['simulated_tokens_per_s']:,} tokens/s), attainment {result['attainment']:.3f}"
        )
    publish({"cases": results}, arguments.json)


if __name__ == "__main__":
    main()
