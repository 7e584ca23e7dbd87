"""Figures of `pdserve bench serve`, under the names and in the layout of ``vllm bench serve``.

`pdserve.planner.report.serving_figures` defines them. For steady-state figures, make the run long enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pdserve.loadgen.load import Measurement
from pdserve.planner.report.serving_figures import METRICS, serving_figures

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
    health = measured.health
    return {
        **serving_figures(measured.times, measured.gap_s, measured.ended_s, objectives, metrics, percentiles),
        "errors": dict(measured.errors),
        "generator": {
            "cpu_share": round(health.cpu_share, 3),
            "send_late_p99_s": round(health.send_late_p99_s, 6),
            "send_late_max_s": round(health.send_late_max_s, 6),
            "loop_late_p99_s": round(health.loop_late_p99_s, 6),
        },
        "problems": health.problems(),
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
        _line("E2E interactivity, P90 (tok/s):", result["interactivity"]),
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
