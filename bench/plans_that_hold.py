"""Whether plans hold: the planned layout under long runs that the search has not seen.

    python -m pdserve.bench.plans_that_hold [--only NUMBER ...] [--data FOLDER] [--seeds 5] [--requests 20000]
        [--json FILE]

Plans for questions over models, GPUs, workloads and objectives, and then simulates each winner with the live schedulers
(`pdserve.planner.simulate.simulator`) at the answer's rate, on fresh seeds. A plan holds if at least four of five runs
reach the target in a steady state. Its interval holds if the runs meet the target at its lower end and miss it at its
upper end, on average; its cliff is right if they fall to half the target or saturate within 5 % of it. The real traces
are those of ``--data``: Azure's conversations of 2023, and Mooncake's, also as closed loops, one for each conversation.
``--json`` keeps the rows that FILE has of other cases; each row says when and at which commit it was measured.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from math import inf
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from pdserve.bench.models import (
    DEEPSEEK_V3,
    GEMMA_3_27B,
    LLAMA_3_8B,
    LLAMA_3_70B,
    MISTRAL_NEMO,
    MIXTRAL_8X7B,
    QWEN3_14B,
    QWEN3_32B,
    QWEN3_CODER_30B,
    QWEN_25_7B,
)
from pdserve.bench.policies import CODER
from pdserve.bench.script import commit, publish, script_parser
from pdserve.contracts.deployment import SloConfig
from pdserve.model.cost.hardware import hardware
from pdserve.planner.layout import PlannedModel
from pdserve.planner.search.goodput import Runner
from pdserve.planner.search.plan import Effort, Objective, Plan, Question, Supply
from pdserve.planner.search.search import find_plan
from pdserve.planner.simulate.attainment import Attainment, Interval
from pdserve.planner.workload.traffic import Traffic, named_traffic
from pdserve.planner.workload.workload import Workload

FIRST_FRESH_SEED = 100
_CLIFF_TOLERANCE = 1.05
_MIN_TRAFFIC_REQUESTS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A question, as somebody asks it."""

    model: PlannedModel
    gpu: str
    num_gpus: int = 4
    traffic: str = "chat"
    """A preset, or a file of ``--data``."""
    sessions: bool = False
    """Turns of the file's conversations are sent after the answers before them."""
    workload: Workload | None = None
    """In place of ``traffic``."""
    slo: SloConfig | None = None
    """Defaults to the traffic's."""
    objective: Objective = Objective.RATE
    rate: float = 0.0

    def __str__(self) -> str:
        goal = f", {self.objective.value} for {self.rate:g}/s" if self.rate else ""
        name = self.workload.name if self.workload else Path(self.traffic).stem + " in sessions" * self.sessions
        return f"{self.model.name} on {self.num_gpus} x {self.gpu}, {name}{goal}"

    def requests(self, data: Path) -> Traffic:
        """What is served."""
        max_model_len = self.model.max_model_len
        if self.workload:
            return Traffic(workload=self.workload, max_model_len=max_model_len)
        is_file = "." in self.traffic
        name, reading = (str(data / self.traffic), {"sessions": self.sessions}) if is_file else (self.traffic, {})
        return named_traffic(name, max_model_len=max_model_len, **reading).with_at_least(_MIN_TRAFFIC_REQUESTS)


AZURE, MOONCAKE = "AzureLLMInferenceTrace_conv.csv", "mooncake_conversation_trace.jsonl"
CASES = (
    Case(model=LLAMA_3_8B, gpu="h100-sxm"),
    Case(model=LLAMA_3_8B, gpu="a100-80gb-sxm", traffic="code"),
    Case(model=LLAMA_3_8B, gpu="l40s", num_gpus=8, objective=Objective.FEWEST_DEVICES, rate=20.0),
    Case(model=LLAMA_3_8B, gpu="h100-sxm", traffic="summarisation"),
    Case(model=LLAMA_3_8B, gpu="h100-sxm", traffic="agent"),
    Case(model=QWEN3_32B, gpu="a100-80gb-sxm", num_gpus=8),
    Case(model=QWEN3_32B, gpu="h100-sxm", num_gpus=8, traffic="code"),
    Case(model=QWEN3_32B, gpu="h100-sxm", num_gpus=8, objective=Objective.LEAST_COST, rate=10.0),
    Case(model=LLAMA_3_70B, gpu="h100-sxm", num_gpus=8),
    Case(model=LLAMA_3_70B, gpu="a100-80gb-sxm", num_gpus=16, traffic="summarisation"),
    Case(model=LLAMA_3_8B, gpu="a100-80gb-sxm", traffic=AZURE, slo=SloConfig(ttft_seconds=0.5, tpot_seconds=0.05)),
    Case(
        model=LLAMA_3_8B, gpu="h100-sxm", num_gpus=8, traffic=MOONCAKE, slo=SloConfig(ttft_seconds=5, tpot_seconds=0.05)
    ),
    Case(model=QWEN3_14B, gpu="l40s", num_gpus=8, traffic="summarisation"),
    Case(model=MIXTRAL_8X7B, gpu="h100-sxm", num_gpus=8),
    Case(model=GEMMA_3_27B, gpu="h100-sxm", num_gpus=8, traffic="summarisation"),
    Case(model=DEEPSEEK_V3, gpu="h200", num_gpus=16, slo=SloConfig(ttft_seconds=2, tpot_seconds=0.05)),
    Case(
        model=QWEN3_CODER_30B,
        gpu="h100-sxm",
        num_gpus=8,
        workload=CODER.workload,
        slo=CODER.slo,
    ),
    Case(
        model=LLAMA_3_8B,
        gpu="h100-sxm",
        num_gpus=8,
        traffic=MOONCAKE,
        sessions=True,
        slo=SloConfig(ttft_seconds=5, tpot_seconds=0.05),
    ),
    Case(model=MISTRAL_NEMO, gpu="h100-sxm", traffic="code"),
    Case(model=QWEN_25_7B, gpu="l40s", traffic="sharegpt-synthetic"),
)


def plan_of(case: Case, traffic: Traffic, num_processes: int) -> Plan:
    num_nodes = -(-case.num_gpus // 8)
    question = Question(
        model=case.model,
        slo=case.slo or traffic.usual_slo,
        fleet=(Supply(hardware=hardware(case.gpu), num_nodes=num_nodes, devices_per_node=case.num_gpus // num_nodes),),
        objective=case.objective,
        rate=case.rate,
        effort=replace(Effort(), most_requests=traffic.max_requests),
    )
    return find_plan(question, traffic.workload, num_processes=num_processes)


def judged(run: tuple[float, int], *, plan: Plan, traffic: Traffic, num_requests: int) -> Attainment:
    """The winner at a rate, with a seed."""
    rate, seed = run
    trial = replace(plan.question.trial(plan.best.layout, traffic.at_most(num_requests)), seed=seed)
    return Runner(traffic.workload).attainment(trial, rate)


def what_holds(
    runs: Mapping[tuple[float, int], Attainment], rate: float, interval: Interval, cliff: float, target: float
) -> dict[str, bool]:
    """Whether plan, interval and saturation rate hold in ``runs``, by rate and seed."""

    def of_rate(rate: float) -> list[Attainment]:
        return [seen for (each, _), seen in runs.items() if each == rate]

    def is_met(rate: float, share: float) -> bool:
        """On average, if all runs have a steady state: what the search counts as goodput."""
        seen = of_rate(rate)
        return not any(each.is_saturated for each in seen) and fmean(each.share for each in seen) >= share

    met = [each.meets(target) for each in of_rate(rate)]
    return {
        "holds": sum(met) >= 0.8 * len(met),
        "interval_holds": is_met(interval.low, target) and not is_met(interval.high, target),
        "cliff_holds": is_met(cliff / _CLIFF_TOLERANCE, target / 2)
        and not is_met(cliff * _CLIFF_TOLERANCE, target / 2),
    }


def answer(plan: Plan) -> dict[str, Any]:
    """What a plan says, and what it took."""
    best = plan.best
    assert best.goodput is not None
    return {
        "layout": str(best.layout),
        "rate": round(plan.question.rate or best.rate, 2),
        "interval": [round(each, 2) for each in best.goodput.interval],
        "cliff": round(best.saturation_rate or inf, 2),
        "planned_s": round(plan.elapsed_s, 1),
        "num_requests": plan.screening.num_requests,
        "others": {str(each.layout): round(each.rate, 2) for each in plan.candidates[1:] if not each.is_estimated},
        "notes": list(plan.notes),
    }


def measure(plan: Plan, traffic: Traffic, num_requests: int, seeds: Sequence[int]) -> dict[str, Any]:
    """The attainment of a plan on each of the seeds, and what holds."""
    num_processes = len(os.sched_getaffinity(0))
    rate = plan.question.rate or plan.best.rate
    assert plan.best.goodput is not None
    low, high = plan.best.goodput.interval
    cliff = plan.best.saturation_rate or inf
    wanted = {(each, seed) for each in (rate, low, high) for seed in seeds}
    wanted |= {(each, seed) for each in (cliff / _CLIFF_TOLERANCE, cliff * _CLIFF_TOLERANCE) for seed in seeds[:2]}
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        run = partial(judged, plan=plan, traffic=traffic, num_requests=num_requests)
        runs = dict(zip(sorted(wanted), pool.map(run, sorted(wanted)), strict=True))
    return {
        "attainment": {
            f"{each:.2f}": [round(seen.share, 4) for (at, _), seen in runs.items() if at == each]
            for each in sorted({each for each, _ in runs})
        },
        "saturated_at": sorted({round(each, 2) for (each, _), seen in runs.items() if seen.is_saturated}),
        **what_holds(runs, rate, Interval(low, high), cliff, plan.question.slo.attainment),
        "runs_of": traffic.at_most(num_requests),
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "load_average": round(os.getloadavg()[0], 1),
    }


def updated(rows: Iterable[Mapping[str, Any]], measured: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """A result: ``rows`` of an earlier one, those of the same numbers replaced by what was ``measured``, in order."""
    by_number = {int(row["case"].split()[0]): row for row in (*rows, *measured)}
    cases = [by_number[number] for number in sorted(by_number)]
    held = {f"num_{what}": sum(bool(row[what]) for row in cases) for what in ("holds", "interval_holds", "cliff_holds")}
    return {**held, "num_cases": len(cases), "cases": cases}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the cases to run, from 1")
    parser.add_argument("--data", type=Path, default=Path(), help="folder of the real traces")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=20_000, help="of each run")
    arguments = parser.parse_args()
    terminal, results = Console(stderr=True), []
    seeds = range(FIRST_FRESH_SEED, FIRST_FRESH_SEED + arguments.seeds)
    for number, case in enumerate(CASES, 1):
        if arguments.only is None or number in arguments.only:
            traffic = case.requests(arguments.data)
            plan = plan_of(case, traffic, len(os.sched_getaffinity(0)))
            planned = {"case": f"{number} {case}", **answer(plan)}
            terminal.print(planned)
            results.append(planned | measure(plan, traffic, arguments.requests, seeds))
            terminal.print(results[-1])
    file: Path | None = arguments.json
    earlier = json.loads(file.read_text(encoding="utf-8"))["cases"] if file and file.exists() else ()
    publish(updated(earlier, results), file)


if __name__ == "__main__":
    main()
