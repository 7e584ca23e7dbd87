"""``pdserve plan --live``: watches a running cluster and compares its placement with the best one.

Reads placement, model, objectives and devices from the router's admin port; options override them.
`pdserve.planner.live.replan` compares. With ``--apply``, the cluster's supervisor carries out what is proposed.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import typer

from pdserve.contracts.errors import DeployError
from pdserve.deploy.cluster.control import send_command
from pdserve.deploy.cluster.folder import ClusterNote, admin_headers, find_cluster
from pdserve.deploy.commands import plan_options as options
from pdserve.deploy.commands.plan_answer import Outputs, search, write_files
from pdserve.deploy.commands.plan_options import ModelOptions, Objectives
from pdserve.deploy.commands.status import fetch_status, other_routers

if TYPE_CHECKING:
    from pdserve.model.cost.hardware import Hardware
    from pdserve.planner.layout import Layout
    from pdserve.planner.live.live import ObservedTraffic
    from pdserve.planner.live.replan import Proposal
    from pdserve.planner.live.running import RunningCluster, RunningWorker
    from pdserve.planner.search.plan import Effort, Plan, Question

_TIMEOUT_S = 10.0
_LOOK_S = 0.5
"""Between two steps of the bar while the cluster is watched."""
_NUMBERS_TOLERANCE = 0.1
"""`Effort.tolerance` where only numbers of workers are compared: as large as the gain that justifies a change."""


class Watch(NamedTuple):
    """Cluster to watch, and the gain that justifies a change."""

    url: str
    window_s: float
    hysteresis: float
    gpu: str
    """Kind of GPU of every worker; empty takes the cluster's."""
    hardware_file: Path | None
    applies: bool = False
    """Carry out what is proposed. Then, and for a preview of it, only numbers of workers are compared."""
    previews: bool = False


def plan_live(
    watch: Watch, model_options: ModelOptions, objectives: Objectives, effort: Effort, outputs: Outputs
) -> int:
    """Watch, search, compare and print; returns the exit status. Options override the cluster's settings."""
    from pdserve.planner.live.numbers import best_numbers
    from pdserve.planner.live.replan import propose
    from pdserve.planner.live.running import observed_traffic, running_cluster, running_layout, supplies
    from pdserve.planner.search.plan import Question, Space

    added = options.added_hardware(watch.hardware_file)
    with options.failure():
        status = fetch_status(watch.url, "--live")
        cluster = running_cluster(status)
        layout = running_layout(cluster.workers, lambda worker: _device(worker, cluster, watch.gpu, added))
    keeps_pools = watch.applies or watch.previews
    if keeps_pools:
        _check_may_change(find_cluster(watch.url), status, layout)
    folder = outputs.model or _served_folder(cluster)
    served = dataclasses.replace(cluster.model, path=str(folder))
    question = Question(
        model=options.planned_model(options.model_config(served, model_options), cluster.transport),
        slo=options.objectives(cluster.slo, objectives),
        fleet=supplies(layout, cluster.workers),
        policy=cluster.policy,
        space=Space(running=tuple(layout.pools), keeps_pools=keeps_pools),
        effort=dataclasses.replace(effort, tolerance=_NUMBERS_TOLERANCE) if keeps_pools else effort,
    )
    overrides = list(_overrides(cluster, question, model_options, objectives))
    observed = _observe(watch, [watch.url, *other_routers(status)])
    traffic = observed_traffic(observed, question.model)
    num_processes = outputs.num_processes or options.num_cores()
    if keeps_pools:
        with options.failure(), options.shown_progress() as report:
            found = best_numbers(question, traffic.workload, layout, num_processes=num_processes, progress=report)
    else:
        found = search(question, traffic, num_processes=num_processes)
    with options.failure(), options.shown_progress() as report:
        report(0.0, "comparing with the placement that runs")
        proposal = propose(
            found,
            layout,
            traffic.workload,
            observed_rate=observed.requests_per_s,
            hysteresis=watch.hysteresis,
            num_processes=num_processes,
        )
    _print_proposal(proposal, found, (_words(observed), _question_words(question), *overrides), outputs)
    write_files(found, _words(observed), outputs._replace(model=folder))
    _show(watch.url, proposal)
    if keeps_pools and proposal.is_proposed:
        _apply(watch, layout, proposal.best.layout, to_stderr=outputs.is_json_alone)
    return 0


def _check_may_change(note: ClusterNote, status: Mapping[str, Any], layout: Layout) -> None:
    """Check that all workers are up, of roles whose numbers the search varies, and that nothing else varies these.

    Raises:
        DeployError: they are not.
    """
    if note.follows_load:
        raise DeployError(
            "the numbers of workers of this cluster follow its load (max_replicas), and would soon undo the change: "
            "leave out --apply and --dry-run to compare only, or start the cluster without max_replicas"
        )
    if down := sorted({*note.down_since_s, *(each["worker_id"] for each in status["workers"] if not each["up"])}):
        raise DeployError(f"{' and '.join(down)} is down; try again when pdserve status shows all workers up")
    roles = [pool.role.value for pool in layout.pools]
    if roles not in (["prefill", "decode"], ["mixed"]):
        raise DeployError(
            f"the cluster has {' and '.join(roles)} workers, and --apply plans for prefill and decode workers, or "
            "mixed ones alone; change it with pdserve scale"
        )


def _apply(watch: Watch, old: Layout, new: Layout, *, to_stderr: bool) -> None:
    """Have the cluster's supervisor say what the change takes, and make it."""

    def say(text: str) -> None:
        typer.echo(text, err=to_stderr)

    before, after = ({pool.role.value: pool.replicas for pool in layout.pools} for layout in (old, new))
    folder = Path(find_cluster(watch.url).folder)
    for said in send_command(folder, {"preview": after}):
        say(f"to do: {said}")
    if watch.applies:
        for said in send_command(folder, {"scale": after}):
            say(said)
    numbers = " ".join(f"{role}={count}" for role, count in before.items())
    say(f"What undoes it: pdserve scale {numbers} --admin-url {watch.url}")


def _print_proposal(proposal: Proposal, plan: Plan, introduction: Sequence[str], outputs: Outputs) -> None:
    from pdserve.planner.live.replan import proposal_json, sentences

    lines = (*introduction, *sentences(proposal))
    if not outputs.is_json_alone:
        console = options.console()
        for line in lines:
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    if outputs.json is not None:
        options.write_json(outputs.json, {**proposal_json(proposal, plan), "text": list(lines)})


def _show(url: str, proposal: Proposal) -> None:
    """Show the comparison on the dashboards of the cluster."""
    assert proposal.best.goodput is not None
    workers: Counter[str] = Counter()
    for pool in proposal.best.layout.pools:
        workers[pool.role.value] += pool.replicas
    figures = {"running": proposal.running.goodput.rate, "best": proposal.best.goodput.rate, "workers": workers}
    with _asking(url) as client:
        client.put("/plan", json=figures).raise_for_status()


def _device(worker: RunningWorker, cluster: RunningCluster, gpu: str, added: Mapping[str, Hardware]) -> Hardware:
    """Device of a worker's ranks: the option's, or as the router predicts them."""
    name = options.device(gpu, added).name if gpu else worker.hardware
    reported = cluster.devices.get(worker.role)
    if reported is not None and reported.name == name and name not in added:
        return reported
    return options.device(name, added)


def _served_folder(cluster: RunningCluster) -> Path:
    """Folder of the served model, which must be readable here."""
    folder = Path(cluster.model.path)
    if not os.access(folder / "config.json", os.R_OK):
        raise DeployError(
            f"the cluster serves {cluster.model.served_name} from {folder}, which cannot be read on this machine; give "
            "--model its folder, or its config.json"
        )
    return folder


def _overrides(
    cluster: RunningCluster, question: Question, model_options: ModelOptions, objectives: Objectives
) -> Iterator[str]:
    """One sentence for each option that contradicts the cluster."""
    from pdserve.planner.planned_model import read_planned_model

    running = {**dataclasses.asdict(cluster.model), **dataclasses.asdict(cluster.slo)}
    for name, given in {**model_options._asdict(), **objectives._asdict()}.items():
        if given not in (None, running[name]):
            option = name.removesuffix("_seconds").replace("_", "-")
            yield f"--{option} {given} overrides {running[name]}, which the cluster has."
    present, given_kinds = {each.hardware for each in cluster.workers}, {each.hardware.name for each in question.fleet}
    if present != given_kinds:
        yield f"--gpu {', '.join(given_kinds)} overrides {', '.join(sorted(present))}, which the cluster has."
    served = Path(cluster.model.path)
    if os.access(served / "config.json", os.R_OK):
        with options.failure():
            shape = read_planned_model(served).shape
        if shape != question.model.shape:
            yield f"--model names another model than the one in {served}, which the cluster serves."


def _observe(watch: Watch, routers: Sequence[str]) -> ObservedTraffic:
    from pdserve.planner.live.live import observe

    before, begun_s = "".join(map(_fetch_metrics, routers)), time.monotonic()
    with options.shown_progress() as report:
        while (passed_s := time.monotonic() - begun_s) < watch.window_s:
            report(passed_s / watch.window_s, f"watching {watch.url} for {watch.window_s:g} s")
            time.sleep(min(_LOOK_S, watch.window_s - passed_s))
    after, ended_s = "".join(map(_fetch_metrics, routers)), time.monotonic()
    with options.failure():
        return observe(before, after, ended_s - begun_s)


def _fetch_metrics(url: str) -> str:
    with _asking(url) as client:
        return client.get("/metrics").raise_for_status().text


@contextmanager
def _asking(url: str) -> Iterator[httpx.Client]:
    """Client of the router's admin port."""
    try:
        with httpx.Client(base_url=url, headers=admin_headers(url), timeout=_TIMEOUT_S, trust_env=False) as client:
            yield client
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DeployError(f"no pdserve router answers at {url}: {error}; check --live") from error


def _question_words(question: Question) -> str:
    from pdserve.planner import wording

    slo = question.slo
    return (
        f"Planned for {question.model.held_name}, a TTFT of {wording.seconds(slo.ttft_seconds)} and a TPOT of "
        f"{wording.seconds(slo.tpot_seconds)} for {wording.share(slo.attainment)} of requests. {question.guesses_note}"
    ).rstrip()


def _words(observed: ObservedTraffic) -> str:
    from pdserve.planner import wording

    met = f"; {wording.share(observed.attainment)} met its objectives" if observed.attainment >= 0 else ""
    return (
        f"Observed in {wording.seconds(observed.seconds)}: {wording.rate(observed.requests_per_s)}, prompts of "
        f"{observed.prompt_tokens.mean:,.0f} tokens and answers of {observed.output_tokens.mean:,.0f} on average, "
        f"{wording.share(observed.cached_share)} of prompt tokens from caches{met}."
    )
