"""Two published measurements in which disaggregation lost, or traded one latency for the other, simulated from their
descriptions.

    python -m pdserve.bench.losing_cases [--only NAME] [--requests N] [--policy NAME] [--plan] [--json FILE]

``agents``: a coder's sessions on eight H20 (gahow/agentic-kvc, May 2026): 2.1 million requests of 34,000 prompt tokens,
most of them of earlier turns. With one cache-aware router for both, PD had 72 % more TTFT and no better TPOT.
``long-prompts``: Qwen3-32B on six H100 in either layout, 16 requests at a time (GPUStack Operator 0.9.2, walkthrough of
prefill and decode): with PD the 99th percentile of gaps was 25.6 to 27.8 times as good and TTFT much worse.

What the sources do not say is assumed, and stands in ``assumed`` of each case. ``--plan`` asks the planner, too, for
which the agents' requests are too few.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from pdserve.bench.models import QWEN3_32B, QWEN3_CODER_30B
from pdserve.bench.script import publish, script_parser
from pdserve.contracts.deployment import POLICIES, SloConfig
from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.cost.hardware import Hardware, hardware
from pdserve.planner.layout import Layout, PlannedModel, Pool
from pdserve.planner.search.plan import Effort, Question, Supply
from pdserve.planner.search.search import find_plan
from pdserve.planner.simulate.simulated_run import Run, carry_out
from pdserve.planner.workload.conversations import Conversations, SystemPrompts, Turns
from pdserve.planner.workload.lengths import FixedLengths, LogNormalLengths
from pdserve.planner.workload.traffic import Traffic
from pdserve.planner.workload.workload import Workload

H100 = hardware("h100-sxm")
H20 = replace(
    H100,
    name="h20",
    peak_flops={**H100.peak_flops, "bfloat16": 148e12},
    memory_bytes=96 * 10**9,
    memory_bandwidth=4.0e12,
)
EFFORT = Effort(screen_requests=1500, final_requests=1500, num_screened=4, num_finalists=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    published: str
    assumed: str
    model: PlannedModel
    device: Hardware
    workload: Workload
    slo: SloConfig
    layouts: tuple[Layout, ...]
    """The first is colocated, as published."""
    rate: float = 0.0
    """Requests per second, every turn counted."""
    concurrency: int = 0
    policy: str = "cache-aware"
    num_requests: int = 0


def _layout(
    device: Hardware, *, prefill: int = 0, decode: int = 0, mixed: int = 0, chunk: int = 8192, degree: int = 1
) -> Layout:
    """Numbers of workers by role, each of ``degree`` tensor-parallel ranks, with chunks of ``chunk`` tokens."""

    def pool(role: WorkerRole, replicas: int) -> Pool | None:
        if not replicas:
            return None
        return Pool(role=role, replicas=replicas, hardware=device, tensor_parallel=degree, max_batch_tokens=chunk)

    return Layout(
        prefill=pool(WorkerRole.PREFILL, prefill),
        decode=pool(WorkerRole.DECODE, decode),
        mixed=pool(WorkerRole.MIXED, mixed),
    )


CASES = (
    Case(
        name="agents",
        published="TTFT +72 % by PD, TPOT no better; p50 of TTFT 1.01 s colocated, 1.99 s by 4 P + 4 D, 1.48 by 6 + 2",
        assumed="20 turns of 1,500 new and 250 answer tokens on average, 5 s of tools between them; system prompts of "
        "2,000; a rate at which colocated workers are busy for 30 % of the time, as published",
        model=QWEN3_CODER_30B,
        device=H20,
        workload=Workload(
            name="agents",
            contents=Conversations(
                lengths=LogNormalLengths(
                    mean_prompt_tokens=1500, mean_output_tokens=250, prompt_variation=1.5, output_variation=1.0
                ),
                system_prompts=SystemPrompts(num_prompts=4, num_tokens=2000),
                turns=Turns(mean_turns=20, mean_think_s=5.0),
            ),
        ),
        slo=SloConfig(ttft_seconds=2.0, tpot_seconds=0.05),
        layouts=(_layout(H20, mixed=8), _layout(H20, prefill=4, decode=4), _layout(H20, prefill=6, decode=2)),
        rate=2.0,
        num_requests=1500,
    ),
    Case(
        name="long-prompts",
        published="p99 of gaps 25.6 to 27.8 times as good with PD, TTFT much worse",
        assumed="8,192 prompt and 256 answer tokens, TP 2, chunks of 8,192 tokens",
        model=QWEN3_32B,
        device=H100,
        workload=Workload(name="long-prompts", contents=Conversations(lengths=FixedLengths(8192, 256))),
        slo=SloConfig(ttft_seconds=2.0, tpot_seconds=0.05),
        layouts=(
            _layout(H100, degree=2, mixed=3),
            _layout(H100, degree=2, prefill=1, decode=2),
            _layout(H100, degree=2, prefill=2, decode=1),
            _layout(H100, degree=2, mixed=3, chunk=512),
        ),
        concurrency=16,
        policy="least-time",
        num_requests=500,
    ),
)


def figures(case: Case, layout: Layout, num_requests: int, policy: str = "") -> dict[str, Any]:
    """Latencies in milliseconds, and shares, of one layout.

    Args:
        policy: in place of the case's.
    """
    result = carry_out(
        Run(
            model=case.model,
            layout=layout,
            traffic=Traffic(workload=case.workload, max_model_len=case.model.max_model_len),
            slo=case.slo,
            num_requests=num_requests,
            rate=case.rate,
            concurrency=case.concurrency,
            policy=policy or case.policy,
        )
    )
    times, attainment = result.simulation.times, result.attainment
    latencies = {"ttft": attainment.ttft, "tpot": attainment.tpot, "itl": attainment.itl}
    return {
        **{
            f"{name}_p{percent}_ms": round(1e3 * latency.percentile(percent), 1)
            for name, latency in latencies.items()
            for percent in (50, 90, 99)
        },
        "requests_per_s": round(result.requests_per_s, 2),
        "cached": round(float(times.num_cached_tokens.sum() / times.num_prompt_tokens.sum()), 3),
        "busy": {pool.role.value: round(pool.busy_share, 2) for pool in attainment.pools},
    }


def verdict(case: Case) -> str:
    """What the planner says of the same GPUs, by its default policy."""
    fleet = (Supply(hardware=case.device, num_nodes=1, devices_per_node=case.layouts[0].num_devices),)
    question = Question(model=case.model, slo=case.slo, fleet=fleet, effort=EFFORT)
    return find_plan(question, case.workload).verdict.text


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--only", choices=[case.name for case in CASES])
    parser.add_argument("--requests", type=int, default=0, help="per layout; by default as many as the case has")
    parser.add_argument("--policy", choices=POLICIES, default="", help="placement; by default that of each case")
    parser.add_argument("--plan", action="store_true", help="also ask the planner")
    arguments = parser.parse_args()
    console, found = Console(stderr=True, width=150), {}
    for case in CASES:
        if arguments.only not in (None, case.name):
            continue
        num_requests = arguments.requests or case.num_requests
        results = {}
        for layout in case.layouts:
            chunk = max(pool.max_batch_tokens for pool in layout.pools)
            results[f"{layout}, chunks of {chunk}"] = figures(case, layout, num_requests, arguments.policy)
        table = Table("layout", *next(iter(results.values())), title=f"{case.name}: {case.published}")
        for name, row in results.items():
            table.add_row(name, *map(str, row.values()))
        console.print(table)
        found[case.name] = {"published": case.published, "assumed": case.assumed, "layouts": results}
        if arguments.plan:
            found[case.name]["plan"] = verdict(case)
            console.print(found[case.name]["plan"])
    publish({"cases": found}, arguments.json)


if __name__ == "__main__":
    main()
