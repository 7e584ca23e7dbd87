"""Prints a simulated run in a terminal and as JSON: latencies, attainment, throughput and worker utilisation."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

import numpy as np
from rich.console import Console
from rich.markup import escape

from pdserve.contracts.codec import to_plain
from pdserve.contracts.worker_config import WorkerRole
from pdserve.planner import wording
from pdserve.planner.report.page import Column
from pdserve.planner.report.plan_json import Json, attainment_json, layout_json, model_json
from pdserve.planner.report.serving_figures import serving_figures
from pdserve.planner.report.tables import text_table
from pdserve.planner.search.hosts import host_sentence
from pdserve.planner.simulate.simulated_run import RunResult

_PERCENTILES = (50, 90, 95, 99)
_LATENCY_COLUMNS = (
    Column("latency", is_number=False), *(Column(f"p{percent}") for percent in _PERCENTILES),
    Column("objective"), Column("met by"),
)  # fmt: skip
_POOL_COLUMNS = (Column("phase", is_number=False), *map(Column, ("busy", "batch", "KV blocks", "KV used", "preempted")))


def print_run(result: RunResult, console: Console, traffic: str, notes: tuple[str, ...]) -> None:
    """Print the whole report of a run.

    Args:
        traffic: description of the traffic.
        notes: notes for the reader.
    """
    for line in _introduction(result, traffic):
        console.print(escape(line), highlight=False, soft_wrap=True)
    console.print()
    console.print(text_table(_LATENCY_COLUMNS, _latencies(result), console.width))
    console.print()
    for line in _judgement(result):
        console.print(escape(line), highlight=False, soft_wrap=True)
    console.print()
    console.print(text_table(_POOL_COLUMNS, _pools(result), console.width))
    for note in notes:
        console.print(escape(note), highlight=False, soft_wrap=True)
    at = result.attainment
    counts = f"{at.num_requests:,} requests simulated in {wording.seconds(result.elapsed_s)}"
    console.print(f"{counts}; {at.num_requests - at.num_counted:,} of them are warm-up.", style="dim", highlight=False)


def run_json(result: RunResult, traffic: str, notes: tuple[str, ...]) -> Json:
    """The report as JSON: vLLM's figures of all requests, and those of the steady state. ITL is that of decode steps;
    the handoff before token 1 counts in TPOT only."""
    run, simulation = result.run, result.simulation
    return {
        "model": model_json(run.model),
        "layout": layout_json(run.layout),
        "traffic": traffic,
        "slo": to_plain(run.slo),
        "concurrency": run.concurrency or None,
        "seed": run.seed,
        **serving_figures(
            simulation.times,
            np.repeat(simulation.gap_s, simulation.gap_weights.astype(np.int64)),
            simulation.ended_s,
            {"ttft": 1e3 * run.slo.ttft_seconds, "tpot": 1e3 * run.slo.tpot_seconds},
        ),
        "steady_state": attainment_json(result.attainment),
        "notes": list(notes),
        "elapsed_s": result.elapsed_s,
    }


def _introduction(result: RunResult, traffic: str) -> Iterator[str]:
    run = result.run
    kinds = ", ".join(f"{wording.ROLE_NAMES[pool.role]} on {pool.hardware.name}" for pool in run.layout.pools)
    yield f"{run.model.name or 'The model'}, {run.model.precision.dtype}: {run.layout} ({kinds})"
    if run.layout.spans_hosts:
        yield host_sentence(run.layout, result.attainment)
    load = f"{run.concurrency} at a time" if run.concurrency else wording.rate(run.rate)
    yield f"{traffic}; {load}"


def _latencies(result: RunResult) -> Iterator[tuple[str, ...]]:
    at, slo = result.attainment, result.run.slo
    rows = (
        ("TTFT", at.ttft, wording.seconds(slo.ttft_seconds), wording.share(at.ttft_share)),
        ("TPOT", at.tpot, wording.seconds(slo.tpot_seconds), wording.share(at.tpot_share)),
        ("ITL", at.itl, "", ""),
    )
    for name, latency, objective, met in rows:
        yield name, *(wording.seconds(latency.percentile(each)) for each in _PERCENTILES), objective, met


def _judgement(result: RunResult) -> Iterator[str]:
    at, target = result.attainment, result.run.slo.attainment
    low, high = at.interval
    verdict = "met"
    if not at.meets(target):
        ttft, tpot = (wording.seconds(each.percentile(ceil(100 * target))) for each in (at.ttft, at.tpot))
        verdict = f"missed; {wording.share(target)} have a TTFT of {ttft} or less, and a TPOT of {tpot} or less"
    yield (
        f"Both objectives are met by {wording.share(at.share)} of requests ({wording.share(low)} to "
        f"{wording.share(high)} with 95 % confidence): the target of {wording.share(target)} is {verdict}."
    )
    rejected = f"; {at.num_rejected:,} requests were rejected" if at.num_rejected else ""
    yield (
        f"Throughput: {wording.rate(result.requests_per_s)}, {wording.number(at.output_tokens_per_s)} answer tokens/s"
        f"{rejected}. Interactivity, 1 / p90 of E2E over answer tokens: {wording.number(at.interactivity)} tokens/s."
    )


def _pools(result: RunResult) -> Iterator[tuple[str, ...]]:
    for use in result.attainment.pools:
        num_blocks = sum(worker.num_kv_blocks for worker in result.simulation.workers if worker.role is use.role)
        yield (
            wording.ROLE_NAMES[use.role],
            wording.share(use.busy_share),
            "-" if use.role is WorkerRole.PREFILL else wording.number(use.mean_batch_size),
            f"{num_blocks:,}",
            wording.share(use.kv_share),
            str(use.num_preemptions),
        )
