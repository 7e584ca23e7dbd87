"""How fast is the planner's simulator? Simulated requests per second of CPU time, on one core.

    python -m pdserve.bench.simulator_speed [--runs 3] [--json FILE]

Timed is all that a search pays for a point: putting a drawn workload at a rate, `simulate`, and the latencies and
attainment taken from it. Each case runs some times; the fastest run counts, as the one least disturbed by whatever else
the machine does, and all are kept.

Beside it are figures of DistServe's simulator for one prefill and one decode worker and 5,000 requests, measured before
on a machine of the same kind: of its event loop alone, and with the tables that it makes of the result.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
from rich.console import Console

from pdserve.bench.distserve import OPT_13B
from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.placement import WorkerRole
from pdserve.model.hardware import hardware
from pdserve.model.shape import ModelShape
from pdserve.planner.conversations import Conversations, SystemPrompts
from pdserve.planner.layout import Layout, PlannedModel, Pool
from pdserve.planner.presets import preset
from pdserve.planner.simulator import simulate
from pdserve.planner.workload import Workload, WorkloadSample

DISTSERVE = {"event_loop_requests_per_s": 2056, "whole_requests_per_s": 628}

LLAMA_3_8B = PlannedModel(
    shape=ModelShape.from_hf_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        }
    ),
    max_model_len=131072,
)


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
            model=LLAMA_3_8B,
            layout=pools("h100-sxm", 4),
            workload=system_prompts,
            requests_per_s=60.0,
            num_requests=5000,
        ),
        Case(
            name="4 prefill, 4 decode, agents",
            model=LLAMA_3_8B,
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
    times = simulate(case.model, case.layout, sample.at_rate(case.requests_per_s), slo=slo).times
    is_met = (times.ttft_s <= slo.ttft_seconds) & (times.tpot_s <= slo.tpot_seconds)
    attainment = float(is_met.mean())
    return process_time() - began_s, attainment


def measure(case: Case, num_runs: int) -> dict[str, Any]:
    """What is kept of a case."""
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="of each case")
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    console = Console()
    results = []
    for case in cases():
        result = measure(case, arguments.runs)
        results.append(result)
        console.print(
            f"{result['name']}: {result['simulated_requests_per_s']:,} requests/s "
            f"({result['simulated_tokens_per_s']:,} tokens/s), attainment {result['attainment']:.3f}"
        )
    report = {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "cases": results,
        "distserve": DISTSERVE,
        "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(),
        "num_cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
