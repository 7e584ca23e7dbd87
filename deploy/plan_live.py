"""``pdserve plan --live``: watches a running cluster, and says whether another placement would do better.

Fetches what the router's admin port tells; the comparison is `pdserve.planner.replan`'s. Changes nothing.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import httpx

from pdserve.deploy import plan_options as options
from pdserve.deploy.errors import DeployError
from pdserve.deploy.plan_answer import Outputs, search, write_files
from pdserve.deploy.plan_options import Objectives
from pdserve.deploy.status import fetch_status

if TYPE_CHECKING:
    from pdserve.contracts.deployment import ModelConfig
    from pdserve.planner.live import ObservedTraffic
    from pdserve.planner.plan import Effort, Plan
    from pdserve.planner.replan import Proposal
    from pdserve.planner.running import RunningWorker

_TIMEOUT_S = 10.0


class Watch(NamedTuple):
    """Which cluster is watched, and what would be reason enough to change it."""

    url: str
    window_s: float
    hysteresis: float
    gpu: str
    """That every worker is on; empty takes what they say."""
    hardware_file: Path | None


def plan_live(watch: Watch, held: ModelConfig, objectives: Objectives, effort: Effort, outputs: Outputs) -> int:
    """Watch, search, compare, print; returns the exit status."""
    from pdserve.contracts.deployment import SloConfig
    from pdserve.planner.plan import Question
    from pdserve.planner.replan import propose
    from pdserve.planner.running import observed_traffic, running_layout, running_workers, supplies

    added = options.added_hardware(watch.hardware_file)
    with options.failure():
        workers = running_workers(fetch_status(watch.url, "--live"))
        layout = running_layout(workers, lambda name: options.device(watch.gpu or name, added))
    planned = options.planned_model(_as_running(held, workers[0]))
    observed = _observe(watch)
    question = Question(
        model=planned,
        slo=options.objectives(SloConfig(), objectives),
        fleet=supplies(layout, workers),
        effort=effort,
    )
    traffic = observed_traffic(observed, planned)
    found = search(question, traffic, num_processes=outputs.num_processes)
    with options.failure(), options.working("comparing with the placement that runs"):
        proposal = propose(
            found,
            layout,
            workers,
            traffic.workload,
            observed_rate=observed.requests_per_s,
            hysteresis=watch.hysteresis,
            num_processes=outputs.num_processes or options.num_cores(),
        )
    _tell(proposal, found, _words(observed), outputs)
    write_files(found, traffic, _words(observed), outputs)
    return 0


def _tell(proposal: Proposal, plan: Plan, observed: str, outputs: Outputs) -> None:
    from pdserve.planner.replan import proposal_json, sentences

    said = (observed, *sentences(proposal))
    if not outputs.is_json_alone:
        console = options.console()
        for sentence in said:
            console.print(sentence, highlight=False, markup=False, soft_wrap=True)
    if outputs.json is not None:
        options.write_json(outputs.json, {**proposal_json(proposal, plan), "text": list(said)})


def _as_running(held: ModelConfig, worker: RunningWorker) -> ModelConfig:
    return dataclasses.replace(held, max_model_len=worker.max_model_len, block_size=worker.block_size)


def _observe(watch: Watch) -> ObservedTraffic:
    """What happens in the window."""
    from pdserve.planner.live import observe

    before, begun_s = _fetch_metrics(watch.url), time.monotonic()
    with options.working(f"watching {watch.url} for {watch.window_s:g} s"):
        time.sleep(watch.window_s)
    after, ended_s = _fetch_metrics(watch.url), time.monotonic()
    with options.failure():
        return observe(before, after, ended_s - begun_s)


def _fetch_metrics(url: str) -> str:
    try:
        answer = httpx.get(f"{url.rstrip('/')}/metrics", timeout=_TIMEOUT_S, trust_env=False)
        return answer.raise_for_status().text
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DeployError(f"no pdserve router answers at {url}: {error}; check --live") from error


def _words(observed: ObservedTraffic) -> str:
    from pdserve.planner import wording

    met = f"; {wording.share(observed.attainment)} met its objectives" if observed.attainment >= 0 else ""
    return (
        f"Observed in {wording.seconds(observed.seconds)}: {wording.rate(observed.requests_per_s)}, prompts of "
        f"{observed.prompt_tokens.mean:,.0f} tokens and answers of {observed.output_tokens.mean:,.0f} on average, "
        f"{wording.share(observed.cached_share)} of prompt tokens from caches{met}."
    )
