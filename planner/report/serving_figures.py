"""Figures of requests that were served, measured or simulated, under the names of ``vllm bench serve``.

Used by ``pdserve simulate --json`` and by `pdserve.loadgen.figures`. All requests count, the first ones too. As in
vLLM, latencies are of completed requests, TPOT of those with at least two tokens; attainment is of all requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pdserve.planner.arrays import FloatArray
from pdserve.planner.simulate.simulation import RequestTimes, interactivity

METRICS: Mapping[str, str] = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
PERCENTILES = (50.0, 90.0, 95.0, 99.0)


def serving_figures(
    times: RequestTimes,
    gap_s: FloatArray,
    ended_s: float,
    objectives: Mapping[str, float],
    metrics: Sequence[str] = tuple(METRICS),
    percentiles: Sequence[float] = PERCENTILES,
) -> dict[str, Any]:
    """The figures, for JSON; None for a latency that nothing was measured of.

    Args:
        gap_s: seconds between tokens of an answer.
        ended_s: end of the run, on the clock of ``times``.
        objectives: limits in milliseconds by metric. ``request_goodput`` counts requests that meet all of them.
        metrics: those of `METRICS` to report.
    """
    num_requests = len(times.arrived_s)
    is_completed = ~np.isnan(times.last_token_s)
    seconds = {
        "ttft": times.ttft_s,
        "tpot": times.tpot_s,
        "itl": gap_s,
        "e2el": times.last_token_s - times.arrived_s,
    }
    meets = {name: 1e3 * seconds[name] <= limit_ms for name, limit_ms in objectives.items()}
    meets_all = np.logical_and.reduce([is_completed, *meets.values()])
    num_completed = int(is_completed.sum())
    total_input = int(times.num_prompt_tokens[is_completed].sum())
    total_output = int(times.num_output_tokens[is_completed].sum())
    duration_s = max(0.0, ended_s - float(times.arrived_s[0]))
    arrival_s = float(times.arrived_s[-1] - times.arrived_s[0])

    def per_s(count: float) -> float:
        return round(count / duration_s, 4) if duration_s else 0.0

    reported = {name: seconds[name] if name == "itl" else seconds[name][is_completed] for name in metrics}
    if "tpot" in reported:
        reported["tpot"] = seconds["tpot"][is_completed & (times.num_output_tokens > 1)]
    return {
        "duration": round(duration_s, 4),
        "completed": num_completed,
        "failed": num_requests - num_completed,
        "rejected": int(times.is_rejected.sum()),
        "num_prompts": num_requests,
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": per_s(num_completed),
        "request_goodput": per_s(float(meets_all.sum())),
        "output_throughput": per_s(total_output),
        "total_token_throughput": per_s(total_input + total_output),
        **{key: value for name in metrics for key, value in _latency(name, reported[name], percentiles).items()},
        "interactivity": _rounded(interactivity(times.e2e_per_token_s[is_completed])),
        "offered_rate": round((num_requests - 1) / arrival_s, 4) if arrival_s else None,
        "goodput_ms": dict(objectives),
        "attainment": {"joint": float(meets_all.mean()), **{name: float(met.mean()) for name, met in meets.items()}},
    }


def _rounded(value: float) -> float | None:
    return None if np.isnan(value) else round(value, 3)


def _latency(name: str, seconds: FloatArray, percentiles: Sequence[float]) -> dict[str, float | None]:
    keys = ["mean", "median", "std", *(f"p{percentile:g}" for percentile in percentiles)]
    values = [np.nan] * len(keys)
    if seconds.size:
        middle = [seconds.mean(), float(np.median(seconds)), seconds.std()]
        values = [*middle, *np.percentile(seconds, percentiles)]
    return {f"{key}_{name}_ms": _rounded(1e3 * float(value)) for key, value in zip(keys, values, strict=True)}
