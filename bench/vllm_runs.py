"""Predictions of open-loop runs of vLLM by the simulator, and vLLM's host costs fitted to them.

Used by `pdserve.bench.cost_check`. Reads ``vllm_h100_open_loop.csv``, runs of vLLM 0.15.1 on H100 published by
inference-sim, whose rows stay outside the project for want of a licence. The prompts of a run are of 45 kinds, so that
after the first of each kind nearly all of a prompt is cached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pdserve.bench.models import LLAMA_3_70B, MISTRAL_NEMO, QWEN_25_7B
from pdserve.bench.script import csv_records
from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.cost.hardware import Hardware, hardware
from pdserve.planner.arrays import FloatArray
from pdserve.planner.cost_fit import best_fit
from pdserve.planner.layout import Layout, Pool
from pdserve.planner.simulate.simulator import simulate
from pdserve.planner.workload.requests import Segment, SimulatedRequest

HOST_COSTS: Mapping[str, Any] = {"step_overhead_s": 300e-6, "ranks_overhead_s": 500e-6, "row_overhead_s": 15e-6}
"""Fitted figures, with starting values about those of a CPU in the catalogue, which pull weakly."""
_MODELS = {
    "Qwen/Qwen2.5-7B-Instruct": QWEN_25_7B,
    "meta-llama/Llama-3.1-70B-Instruct": LLAMA_3_70B,
    "mistralai/Mistral-Nemo-Instruct-2407": MISTRAL_NEMO,
}
_NUM_KINDS = 45
_NUM_REQUESTS, _NUM_WARM_UP = 700, 100


class Times(NamedTuple):
    """Means of a run."""

    ttft_s: float
    itl_s: float


class Run(NamedTuple):
    model: str
    tensor_parallel: int
    requests_per_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    max_batch_tokens: int
    times: Times


def read_runs(path: Path) -> list[Run]:
    return [
        Run(
            record["model"],
            int(record["tensor_parallel"]),
            float(record["requests_per_s"]),
            int(record["input_tokens"]),
            int(record["output_tokens"]),
            int(record["max_batch_tokens"]),
            Times(float(record["ttft_mean"]) / 1e3, float(record["itl_mean"]) / 1e3),
        )
        for record in csv_records(path)
    ]


def simulated(run: Run, device: Hardware) -> Times:
    """Means of the run's requests after a warm-up, on a worker that prefills and decodes."""
    random = np.random.default_rng(0)
    arrived_s = np.cumsum(random.exponential(1 / run.requests_per_s, _NUM_REQUESTS)).tolist()
    kinds = random.integers(0, _NUM_KINDS, _NUM_REQUESTS).tolist()
    requests = [
        SimulatedRequest(at_s, run.num_prompt_tokens, run.num_output_tokens, (Segment(kind, run.num_prompt_tokens),))
        for at_s, kind in zip(arrived_s, kinds, strict=True)
    ]
    pool = Pool(
        role=WorkerRole.MIXED,
        replicas=1,
        hardware=device,
        tensor_parallel=run.tensor_parallel,
        max_batch_tokens=run.max_batch_tokens,
    )
    times = simulate(_MODELS[run.model], Layout(mixed=pool), requests, slo=SloConfig()).times
    decoded_s = (times.last_token_s - times.first_token_s) / (run.num_output_tokens - 1)
    return Times(float(times.ttft_s[_NUM_WARM_UP:].mean()), float(decoded_s[_NUM_WARM_UP:].mean()))


class HostCosts:
    """Host costs fitted to some of ``runs``: least squares of log(predicted / measured), linearised around their start.

    The start pulls weakly, as in `pdserve.planner.cost_fit`.
    """

    def __init__(self, runs: Sequence[Run], device: Hardware) -> None:
        self._device = device
        self._measured_s = np.array([run.times for run in runs])
        self._start_s = self._times(runs, HOST_COSTS)
        self._slopes = np.array(
            [
                (self._times(runs, {**HOST_COSTS, name: 1.3 * cost}) - self._start_s) / (0.3 * cost)
                for name, cost in HOST_COSTS.items()
            ]
        )

    def _times(self, runs: Sequence[Run], costs: Mapping[str, Any]) -> FloatArray:
        """``[runs, 2]``: TTFT and ITL."""
        return np.array([simulated(run, replace(self._device, **costs)) for run in runs])

    def fit(self, rows: Sequence[int]) -> dict[str, Any]:
        """The host costs that predict these runs best."""
        start = np.array(list(HOST_COSTS.values()))

        def errors(logs: FloatArray) -> FloatArray:
            by_cost = np.tensordot(np.exp(logs) - start, self._slopes[:, rows], 1)
            found: FloatArray = np.log((self._start_s[rows] + by_cost) / self._measured_s[rows]).ravel()
            return found

        fitted = np.exp(best_fit(errors, [np.log(start)])).tolist()
        return {name: float(f"{cost:.2g}") for name, cost in zip(HOST_COSTS, fitted, strict=True)}


def check_runs(path: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Errors of each run's means by the catalogue, and by host costs fitted to the runs of other models; and the costs
    fitted to all runs."""
    runs, catalogue = read_runs(path), hardware("h100")
    costs = HostCosts(runs, catalogue)
    found: list[dict[str, Any]] = []
    for run in runs:
        fitted = costs.fit([row for row, other in enumerate(runs) if other.model != run.model])
        row = {"model": run.model, "tensor_parallel": run.tensor_parallel, "requests_per_s": run.requests_per_s}
        for kind, device in (("catalogue", catalogue), ("held_out", replace(catalogue, **fitted))):
            errors = (at_s / of_s - 1 for at_s, of_s in zip(simulated(run, device), run.times, strict=True))
            row[kind] = dict(zip(("ttft", "itl"), (round(error, 3) for error in errors), strict=True))
        found.append(row)
    return found, costs.fit(range(len(runs)))
