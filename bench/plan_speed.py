"""Wall-clock time of the planner's search, for Llama-3-70B on four hosts of eight H100.

    python -m pdserve.bench.plan_speed [--nodes 4] [--processes 4] [--workload chat] [--json FILE]

Compares it with DistServe's search for OPT-13B on two hosts of eight GPUs, 208 layouts of one prefill and one decode
instance, measured earlier on a machine of the same kind.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.console import Console

from pdserve.bench.models import LLAMA_3_70B
from pdserve.bench.script import publish, script_parser
from pdserve.contracts.deployment import SloConfig
from pdserve.model.cost.hardware import hardware
from pdserve.planner.search.plan import Effort, Question, Supply
from pdserve.planner.search.search import find_plan
from pdserve.planner.workload.presets import preset

DISTSERVE = {"layouts": 208, "elapsed_s": 371}


def measure(
    num_nodes: int, num_processes: int, workload_name: str, effort: Effort, devices_per_node: int = 8
) -> dict[str, Any]:
    """Figures of one plan."""
    workload = preset(workload_name)
    question = Question(
        model=replace(LLAMA_3_70B, max_model_len=8192),
        slo=workload.slo or SloConfig(),
        fleet=(Supply(hardware=hardware("h100-sxm"), num_nodes=num_nodes, devices_per_node=devices_per_node),),
        effort=effort,
    )
    plan = find_plan(question, workload, num_processes=num_processes)
    return {
        "devices": num_nodes * devices_per_node,
        "workload": workload.name,
        "processes": num_processes,
        "layouts": plan.screening.num_layouts,
        "simulated_layouts": plan.screening.num_simulated,
        "simulated_requests": plan.screening.num_requests,
        "elapsed_s": round(plan.elapsed_s, 2),
        "best": str(plan.best.layout),
        "requests_per_s": round(plan.best.rate, 2),
        "verdict": plan.verdict.text,
    }


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--nodes", type=int, default=4, help="hosts of eight GPUs")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--workload", default="chat", help="a preset")
    arguments = parser.parse_args()
    result = measure(arguments.nodes, arguments.processes, arguments.workload, Effort())
    Console(stderr=True).print(
        f"{result['layouts']} layouts, {result['simulated_requests']:,} simulated requests: {result['elapsed_s']} s "
        f"(DistServe's search: {DISTSERVE['elapsed_s']} s for {DISTSERVE['layouts']}). {result['verdict']}"
    )
    publish({**result, "distserve": DISTSERVE}, arguments.json)


if __name__ == "__main__":
    main()
