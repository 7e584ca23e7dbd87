"""Where disaggregation wins and where it loses: the planner's answers on DistServe's settings and on current ones.

    python -m pdserve.bench.placements [--only NAME] [--quick] [--json FILE]

DistServe's settings (OSDI 2024, table 1): OPT on A100-80GB with ShareGPT, HumanEval and LongBench lengths. Current
settings: Llama-3 and Qwen3 on H100 with the presets' traffic and objectives. For each, on one host of 8 devices, the
same search on the same requests plans the best disaggregated placement and the best colocated one with chunked prefill,
and compares their sustained rates. Links and step times come from the catalogue; no GPU is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pdserve.bench.models import LLAMA_3_8B, LLAMA_3_70B, OPT_13B, OPT_66B, OPT_175B, QWEN3_32B
from pdserve.bench.script import publish, script_parser
from pdserve.contracts.deployment import SloConfig
from pdserve.model.cost.hardware import hardware
from pdserve.planner.layout import PlannedModel
from pdserve.planner.search.plan import Candidate, Effort, InfeasibleSloError, Plan, Question, Supply
from pdserve.planner.search.search import find_plan
from pdserve.planner.workload.presets import preset

QUICK = Effort(final_requests=5000, judge_requests=2000, seeds=(0, 1), num_screened=12, num_finalists=2)


@dataclass(frozen=True, slots=True)
class Setting:
    model: PlannedModel
    device: str
    workload: str
    ttft_s: float
    tpot_s: float
    num_nodes: int = 1

    @property
    def name(self) -> str:
        return f"{self.model.name} {self.workload}"

    def question(self, effort: Effort) -> Question:
        return Question(
            model=self.model,
            slo=SloConfig(ttft_seconds=self.ttft_s, tpot_seconds=self.tpot_s, attainment=0.9),
            fleet=(Supply(hardware=hardware(self.device), num_nodes=self.num_nodes, devices_per_node=8),),
            effort=effort,
        )


def settings() -> Iterator[Setting]:
    """DistServe's settings (its table 1), then current ones with the objectives of the presets."""
    yield Setting(OPT_13B, "a100-80gb", "sharegpt-synthetic", 0.25, 0.1)
    yield Setting(OPT_66B, "a100-80gb", "sharegpt-synthetic", 2.5, 0.15)
    yield Setting(OPT_66B, "a100-80gb", "humaneval-synthetic", 0.125, 0.2)
    yield Setting(OPT_66B, "a100-80gb", "longbench-synthetic", 15.0, 0.15)
    yield Setting(OPT_175B, "a100-80gb", "sharegpt-synthetic", 4.0, 0.2, num_nodes=2)
    for model in (LLAMA_3_8B, QWEN3_32B, LLAMA_3_70B):
        for name in ("chat", "code", "summarisation", "agent"):
            slo = preset(name).slo
            assert slo is not None
            yield Setting(model, "h100-sxm", name, slo.ttft_seconds, slo.tpot_seconds)


def plan(setting: Setting, effort: Effort) -> Plan | str:
    """The plan, or the reason why there is none."""
    with Progress(transient=True) as progress:
        task = progress.add_task(setting.name, total=1.0)
        try:
            return find_plan(
                setting.question(effort),
                preset(setting.workload),
                progress=lambda fraction, text: progress.update(task, completed=fraction),
            )
        except InfeasibleSloError as error:
            return str(error)


def _words(candidate: Candidate | None) -> str:
    if candidate is None:
        return "-"
    estimated = " (estimated)" if candidate.is_estimated else ""
    return f"{candidate.layout}: {candidate.rate_per_device:.2f}{estimated}"


def _record(setting: Setting, answer: Plan | str) -> dict[str, Any]:
    record: dict[str, Any] = {
        "setting": setting.name,
        "device": setting.device,
        "devices": 8 * setting.num_nodes,
        "slo": {"ttft_s": setting.ttft_s, "tpot_s": setting.tpot_s},
    }
    if isinstance(answer, str):
        return record | {"slo_infeasible": answer}
    verdict = answer.verdict
    for kind, candidate in (("disaggregated", verdict.best_disaggregated), ("colocated", verdict.best_colocated)):
        if candidate is not None:
            record[kind] = {
                "layout": str(candidate.layout),
                "devices": candidate.layout.num_devices,
                "requests_per_s_per_device": round(candidate.rate_per_device, 3),
                "is_estimated": candidate.is_estimated,
                "reasons": candidate.reasons,
            }
    return record | {"gain": verdict.gain, "is_clear": verdict.is_clear, "seconds": round(answer.elapsed_s, 1)}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument("--quick", action="store_true", help="shorter simulations, one seed")
    arguments = parser.parse_args()
    table = Table("setting", "TTFT / TPOT", "disaggregated, requests/s per device", "colocated", "gain", box=None)
    records = []
    for setting in settings():
        if arguments.only.lower() not in setting.name.lower():
            continue
        answer = plan(setting, QUICK if arguments.quick else Effort())
        records.append(_record(setting, answer))
        objectives = f"{setting.ttft_s:g} / {setting.tpot_s:g} s"
        if isinstance(answer, str):
            table.add_row(setting.name, objectives, answer)
            continue
        verdict = answer.verdict
        gain = "" if verdict.gain is None else f"{verdict.gain:+.0%}" + ("" if verdict.is_clear else " (not clear)")
        table.add_row(
            setting.name, objectives, _words(verdict.best_disaggregated), _words(verdict.best_colocated), gain
        )
    Console(stderr=True).print(table)
    publish({"settings": records}, arguments.json)


if __name__ == "__main__":
    main()
