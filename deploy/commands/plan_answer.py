"""Answers a question of ``pdserve plan``: searches with a progress bar, prints, and writes files.

`pdserve.planner` defines the contents of the files.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pdserve.contracts.errors import DeployError
from pdserve.deploy.commands import plan_options as options
from pdserve.deploy.commands.ray_file import ray_cluster_path, ray_cluster_text

if TYPE_CHECKING:
    from pdserve.model.cost.hardware import Hardware
    from pdserve.planner.layout import PlannedModel, Pool
    from pdserve.planner.search.plan import Plan, Question
    from pdserve.planner.workload.traffic import Traffic


_NUM_EXPLAINED = 1000
"""Number of requests from which mean lengths are taken."""


class Outputs(NamedTuple):
    """Files to write, and how to search and print."""

    deployment: Path | None
    ray_cluster: str
    """Provider for which to write a file for ``ray up`` beside the deployment; empty writes none."""
    report: Path | None
    json: Path | None
    """``-`` writes to standard output, and nothing else goes there."""
    num_rows: int
    num_processes: int
    """Processes that simulate in parallel; 0 uses one for each core."""
    model: Path | None
    """Path as the user gave it; a deployment file points to it."""

    @property
    def is_json_alone(self) -> bool:
        return str(self.json) == "-"


def answer(question: Question, traffic: Traffic, outputs: Outputs) -> int:
    """Find the plan, print it and write the requested files; returns the exit status."""
    from pdserve.planner.report.plan_json import plan_json
    from pdserve.planner.report.tables import print_plan

    words, notes = traffic.described()
    found = search(question, traffic, num_processes=outputs.num_processes)
    if not outputs.is_json_alone:
        console = options.console()
        for line in (words, *traffic.notes):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        print_plan(found, console, num_rows=outputs.num_rows)
    if outputs.json is not None:
        options.write_json(outputs.json, {**plan_json(found, words), "traffic_notes": list(notes)})
    write_files(found, words, outputs)
    return 0


def show_worker(question: Question, traffic: Traffic, outputs: Outputs) -> int:
    """Print memory and times of a worker by part, on the fewest GPUs of each kind that hold the model."""
    from pdserve.planner.report.explain import explain
    from pdserve.planner.report.tables import print_explanations

    statistics = traffic.draw(traffic.at_most(_NUM_EXPLAINED), 0).statistics()
    found = {}
    for supply in question.fleet:
        pool = _smallest_worker(supply.hardware, question.model)
        worker = f"{pool.hardware.name}, {pool.degrees}"
        found[worker] = explain(
            question.model,
            pool,
            prompt_tokens=round(statistics.mean_prompt_tokens),
            context_tokens=round(statistics.mean_prompt_tokens + statistics.mean_output_tokens / 2),
        )
    if not outputs.is_json_alone:
        for worker, lines in found.items():
            print_explanations(f"{question.model.name} on {worker}", lines, options.console())
    if outputs.json is not None:
        document = {worker: [line._asdict() for line in lines] for worker, lines in found.items()}
        options.write_json(outputs.json, document)
    return 0


def _smallest_worker(hardware: Hardware, model: PlannedModel) -> Pool:
    from pdserve.planner.search.layouts import smallest_worker

    pool = smallest_worker(hardware, model)
    if pool is None:
        raise DeployError(
            f"no number of {hardware.name} holds {model.name or 'the model'} and one sequence of {model.max_model_len} "
            "tokens: use larger devices, or --set a smaller model.max_model_len, or model.quantization=int4"
        )
    return pool


def search(question: Question, traffic: Traffic, *, num_processes: int) -> Plan:
    """Search a plan, and show the progress.

    Raises:
        DeployError: no plan exists; the text names the reason and a remedy.
    """
    from pdserve.planner.extrapolation import extrapolations
    from pdserve.planner.search.search import find_plan

    with options.failure(), options.shown_progress() as report:
        plan = find_plan(question, traffic.workload, num_processes=num_processes, progress=report)
    beyond = extrapolations(question.model, plan.best.layout, question.model.max_model_len)
    return dataclasses.replace(plan, notes=(*plan.notes, *(f"{text}." for text in beyond)))


def write_files(plan: Plan, words: str, outputs: Outputs) -> None:
    """Write the deployment and the report if requested."""
    if outputs.deployment is not None:
        _write_deployment(plan, outputs)
    if outputs.report is not None:
        from pdserve.planner.report.report import report_html

        options.write_text(outputs.report, report_html(plan, words))


def _write_deployment(plan: Plan, outputs: Outputs) -> None:
    from pdserve.planner.report.deployment_file import deployment_text, problems

    path, model = outputs.deployment, outputs.model
    assert path is not None
    options.write_text(path, deployment_text(plan, plan.best, _model_path(model)))
    if outputs.ray_cluster:
        _write_ray_cluster(plan, path, outputs.ray_cluster)
    found = problems(plan.best.layout, plan.question.model)
    if found and not outputs.is_json_alone:
        note = f"{path} cannot be started yet: {'; '.join(found)}; pdserve simulate reads it"
        options.console().print(note, highlight=False, markup=False, soft_wrap=True)


def _write_ray_cluster(plan: Plan, deployment: Path, provider: str) -> None:
    layout, (supply, *_) = plan.best.layout, plan.question.fleet
    text = ray_cluster_text(
        provider,
        deployment,
        num_hosts=layout.num_hosts,
        gpus_per_host=supply.devices_per_node,
        gpu=supply.hardware.name,
    )
    options.write_text(ray_cluster_path(deployment, provider), text)


def _model_path(model: Path | None) -> str:
    """Folder of a config.json, because a folder can be served; the path itself for a file of another name."""
    if model is None:
        return ""
    return str((model.parent if model.name == "config.json" else model).resolve())
