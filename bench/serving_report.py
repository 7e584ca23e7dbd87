"""Figures of `pdserve bench serve`, under the names and in the layout of ``vllm bench serve``.

All requests count, the first ones too: for steady-state figures, make the run long enough. As in vLLM, latencies are of
completed requests, TPOT of those with at least two tokens; attainment is of all requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pdserve.bench.load import Measurement
from pdserve.planner.arrays import FloatArray

METRICS: Mapping[str, str] = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
OBJECTIVES = ("ttft", "tpot", "e2el")
"""Metrics of one request, which an objective can bound."""
_WIDTH = 50


def parse_objectives(pairs: Sequence[str]) -> dict[str, float]:
    """Parse objectives such as ``ttft:250`` to milliseconds by metric.

    Raises:
        ValueError: not such a pair.
    """
    objectives = {}
    for pair in " ".join(pairs).split():
        name, _, text = pair.partition(":")
        try:
            limit_ms = float(text)
        except ValueError:
            limit_ms = 0.0
        if name not in OBJECTIVES or not 0 < limit_ms < np.inf:
            raise ValueError(
                f"--goodput {pair!r}: write pairs of {', '.join(OBJECTIVES)} and ms, such as ttft:250 tpot:50"
            )
        objectives[name] = limit_ms
    return objectives


def parse_metrics(text: str) -> list[str]:
    """Parse metrics such as ``ttft,tpot``.

    Raises:
        ValueError: unknown metric.
    """
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in METRICS]:
        raise ValueError(f"--percentile-metrics {', '.join(unknown)}: use some of {', '.join(METRICS)}")
    return names


def parse_percentiles(text: str) -> list[float]:
    """Parse percentiles such as ``25,99.9``.

    Raises:
        ValueError: not numbers from 0 to 100.
    """
    try:
        percentiles = [float(part) for part in text.split(",")]
    except ValueError:
        percentiles = [-1.0]
    if not all(0 <= percentile <= 100 for percentile in percentiles):
        raise ValueError(f"--metric-percentiles {text!r}: use numbers from 0 to 100, such as 25,50,99")
    return percentiles


def serving_result(
    measured: Measurement, objectives: Mapping[str, float], metrics: Sequence[str], percentiles: Sequence[float]
) -> dict[str, Any]:
    """The figures of a measurement, for JSON; None for a latency that nothing was measured of.

    Args:
        objectives: limits in milliseconds by metric. ``request_goodput`` counts requests that meet all of them.
        metrics: those of `METRICS` to report.
    """
    times, health = measured.times, measured.health
    num_requests = len(times.arrived_s)
    is_completed = ~np.isnan(times.last_token_s)
    seconds = {
        "ttft": times.ttft_s,
        "tpot": times.tpot_s,
        "itl": measured.gap_s,
        "e2el": times.last_token_s - times.arrived_s,
    }
    meets = {name: 1e3 * seconds[name] <= limit_ms for name, limit_ms in objectives.items()}
    meets_all = np.logical_and.reduce([is_completed, *meets.values()])
    total_input = int(times.num_prompt_tokens[is_completed].sum())
    total_output = int(times.num_output_tokens[is_completed].sum())
    duration_s = max(0.0, measured.ended_s - float(times.arrived_s[0]))
    arrival_s = float(times.arrived_s[-1] - times.arrived_s[0])

    def per_s(count: float) -> float:
        return round(count / duration_s, 4) if duration_s else 0.0

    reported = {name: seconds[name] if name == "itl" else seconds[name][is_completed] for name in metrics}
    if "tpot" in reported:
        reported["tpot"] = seconds["tpot"][is_completed & (times.num_output_tokens > 1)]
    return {
        "duration": round(duration_s, 4),
        "completed": measured.num_finished,
        "failed": num_requests - measured.num_finished,
        "rejected": measured.num_rejected,
        "num_prompts": num_requests,
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": per_s(measured.num_finished),
        "request_goodput": per_s(float(meets_all.sum())),
        "output_throughput": per_s(total_output),
        "total_token_throughput": per_s(total_input + total_output),
        **{key: value for name in metrics for key, value in _latency(name, reported[name], percentiles).items()},
        "offered_rate": round((num_requests - 1) / arrival_s, 4) if arrival_s else None,
        "goodput_ms": dict(objectives),
        "attainment": {"joint": float(meets_all.mean()), **{name: float(met.mean()) for name, met in meets.items()}},
        "errors": dict(measured.errors),
        "generator": {
            "cpu_share": round(health.cpu_share, 3),
            "send_late_p99_s": round(health.send_late_p99_s, 6),
            "send_late_max_s": round(health.send_late_max_s, 6),
            "loop_late_p99_s": round(health.loop_late_p99_s, 6),
        },
        "problems": health.problems(),
    }


def _latency(name: str, seconds: FloatArray, percentiles: Sequence[float]) -> dict[str, float | None]:
    keys = ["mean", "median", "std", *(f"p{percentile:g}" for percentile in percentiles)]
    values = [np.nan] * len(keys)
    if seconds.size:
        middle = [seconds.mean(), float(np.median(seconds)), seconds.std()]
        values = [*middle, *np.percentile(seconds, percentiles)]
    return {
        f"{key}_{name}_ms": None if np.isnan(value) else round(1e3 * float(value), 3)
        for key, value in zip(keys, values, strict=True)
    }


def result_lines(result: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> list[str]:
    """Lines of vLLM's block, with attainment and the state of the load generator at its end."""
    lines = [
        " Serving Benchmark Result ".center(_WIDTH, "="),
        _line("Successful requests:", result["completed"]),
        _line("Failed requests:", result["failed"]),
    ]
    if result["rejected"]:
        lines.append(_line("Rejected requests (of the failed):", result["rejected"]))
    configured = {"max_concurrency": "Maximum request concurrency:", "request_rate": "Request rate configured (RPS):"}
    for key, name in configured.items():
        if isinstance(result.get(key), int | float):
            lines.append(_line(name, result[key]))
    lines += [
        _line("Benchmark duration (s):", result["duration"]),
        _line("Total input tokens:", result["total_input_tokens"]),
        _line("Total generated tokens:", result["total_output_tokens"]),
        _line("Request throughput (req/s):", result["request_throughput"]),
        _line("Request goodput (req/s):", result["request_goodput"]),
        _line("Output token throughput (tok/s):", result["output_throughput"]),
        _line("Total token throughput (tok/s):", result["total_token_throughput"]),
    ]
    for name in metrics:
        lines.append(METRICS[name].center(_WIDTH, "-"))
        keys = {"mean": "Mean", "median": "Median", **{f"p{value:g}": f"P{value:g}" for value in percentiles}}
        lines += [_line(f"{word} {name.upper()} (ms):", result[f"{key}_{name}_ms"]) for key, word in keys.items()]
    lines.append("SLO attainment".center(_WIDTH, "-"))
    for name, limit_ms in result["goodput_ms"].items():
        lines.append(_line(f"{name.upper()} <= {limit_ms:g} ms (%):", 100 * result["attainment"][name]))
    lines.append(_line("All objectives (%):", 100 * result["attainment"]["joint"]))
    lines.append("Load generator".center(_WIDTH, "-"))
    lines.append(_line("CPU (% of a core):", 100 * result["generator"]["cpu_share"]))
    lines.append(_line("P99 of lateness (ms):", 1e3 * result["generator"]["send_late_p99_s"]))
    lines.append("=" * _WIDTH)
    return lines + [f"failed {count} x: {error[:200]}" for error, count in result["errors"].items()]


def _line(name: str, value: float | None) -> str:
    shown = "-" if value is None else str(value) if isinstance(value, int) else f"{value:.2f}"
    return f"{name:<40} {shown:<10}".rstrip()
