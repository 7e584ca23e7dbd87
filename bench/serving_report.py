"""Report of `pdserve bench serve`: latencies, throughput, and SLO attainment.

All requests count, the first ones too: for steady-state figures, make the run long enough. Times are in seconds, in the
printed text in milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdserve.bench.load import Measurement
from pdserve.contracts.deployment import SloConfig
from pdserve.planner.simulation import FloatArray

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """A distribution in seconds; NaN where nothing was measured."""

    mean_s: float
    percentiles_s: Mapping[int, float]

    @classmethod
    def of(cls, seconds: FloatArray) -> Latency:
        known = seconds[~np.isnan(seconds)]
        if not known.size:
            return cls(mean_s=float("nan"), percentiles_s=dict.fromkeys(PERCENTILES, float("nan")))
        values = np.percentile(known, PERCENTILES)
        return cls(mean_s=float(known.mean()), percentiles_s=dict(zip(PERCENTILES, map(float, values), strict=True)))

    def as_dict(self) -> dict[str, float | None]:
        values = {"mean_s": self.mean_s, **{f"p{key}_s": value for key, value in self.percentiles_s.items()}}
        return {name: None if np.isnan(value) else round(value, 6) for name, value in values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingReport:
    """A measurement in a few figures."""

    num_requests: int
    num_finished: int
    num_rejected: int
    num_failed: int
    duration_s: float
    """From the first request to the last token."""
    offered_rate: float
    """Requests per second over the time in which they arrived."""
    prompt_tokens: int
    """Of finished requests, as the next."""
    output_tokens: int
    ttft: Latency
    tpot: Latency
    """Of answers of two tokens and more."""
    itl: Latency
    slo: SloConfig
    ttft_share: float
    """Of all requests, rejected and failed ones included, those that met the objective."""
    tpot_share: float
    joint_share: float
    """Those that met both."""
    errors: Mapping[str, int]
    problems: tuple[str, ...]
    """Of the load generator; with any, the figures do not count."""
    generator: Mapping[str, float]

    @classmethod
    def of(cls, measured: Measurement, slo: SloConfig) -> ServingReport:
        times = measured.times
        is_finished = ~np.isnan(times.last_token_s)
        meets_ttft = times.ttft_s <= slo.ttft_seconds
        meets_tpot = times.tpot_s <= slo.tpot_seconds  # False where there was no last token
        num_requests = len(times.arrived_s)
        arrival_s = float(times.arrived_s[-1] - times.arrived_s[0])
        health = measured.health
        return cls(
            num_requests=num_requests,
            num_finished=measured.num_finished,
            num_rejected=measured.num_rejected,
            num_failed=num_requests - measured.num_finished - measured.num_rejected,
            duration_s=max(0.0, measured.ended_s - float(times.arrived_s[0])),
            offered_rate=(num_requests - 1) / arrival_s if arrival_s else float("nan"),
            prompt_tokens=int(times.num_prompt_tokens[is_finished].sum()),
            output_tokens=int(times.num_output_tokens[is_finished].sum()),
            ttft=Latency.of(times.ttft_s),
            tpot=Latency.of(times.tpot_s[times.num_output_tokens > 1]),
            itl=Latency.of(measured.gap_s),
            slo=slo,
            ttft_share=float(meets_ttft.mean()),
            tpot_share=float(meets_tpot.mean()),
            joint_share=float((meets_ttft & meets_tpot).mean()),
            errors=dict(measured.errors),
            problems=tuple(health.problems()),
            generator={
                "cpu_share": round(health.cpu_share, 3),
                "send_late_p99_s": round(health.send_late_p99_s, 6),
                "send_late_max_s": round(health.send_late_max_s, 6),
                "loop_late_p99_s": round(health.loop_late_p99_s, 6),
            },
        )

    @property
    def request_throughput(self) -> float:
        """Finished requests per second."""
        return self.num_finished / self.duration_s if self.duration_s else 0.0

    @property
    def goodput(self) -> float:
        """Requests per second that met both objectives."""
        return self.joint_share * self.num_requests / self.duration_s if self.duration_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        seconds = self.duration_s or float("nan")
        values = {
            "num_requests": self.num_requests,
            "num_finished": self.num_finished,
            "num_rejected": self.num_rejected,
            "num_failed": self.num_failed,
            "duration_s": round(self.duration_s, 4),
            "offered_rate": _rounded(self.offered_rate),
            "request_throughput": round(self.request_throughput, 4),
            "output_token_throughput": _rounded(self.output_tokens / seconds),
            "total_token_throughput": _rounded((self.prompt_tokens + self.output_tokens) / seconds),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "goodput": round(self.goodput, 4),
            "slo": {"ttft_seconds": self.slo.ttft_seconds, "tpot_seconds": self.slo.tpot_seconds},
            "attainment": {"joint": self.joint_share, "ttft": self.ttft_share, "tpot": self.tpot_share},
        }
        latencies = {name: getattr(self, name).as_dict() for name in ("ttft", "tpot", "itl")}
        return {
            **values,
            **latencies,
            "errors": dict(self.errors),
            "generator": dict(self.generator),
            "problems": list(self.problems),
        }

    def lines(self) -> list[str]:
        """For people."""
        seconds = self.duration_s or float("nan")
        figures: list[tuple[str, str]] = [
            ("Requests", f"{self.num_finished} finished, {self.num_rejected} rejected, {self.num_failed} failed"),
            ("Duration", f"{self.duration_s:.2f} s, offered {self.offered_rate:.2f} requests/s"),
            ("Request throughput", f"{self.request_throughput:.2f} requests/s"),
            ("Output throughput", f"{self.output_tokens / seconds:.1f} tokens/s"),
            ("Total throughput", f"{(self.prompt_tokens + self.output_tokens) / seconds:.1f} tokens/s"),
        ]
        for name, latency in (("TTFT", self.ttft), ("TPOT", self.tpot), ("ITL", self.itl)):
            shown = "  ".join(f"p{key} {value * 1e3:.2f}" for key, value in latency.percentiles_s.items())
            figures.append((f"{name} (ms)", f"mean {latency.mean_s * 1e3:.2f}  {shown}"))
        slo = self.slo
        figures += [
            (f"TTFT within {slo.ttft_seconds * 1e3:g} ms", f"{self.ttft_share:.1%}"),
            (f"TPOT within {slo.tpot_seconds * 1e3:g} ms", f"{self.tpot_share:.1%}"),
            ("Both, jointly", f"{self.joint_share:.1%}, {self.goodput:.2f} requests/s"),
            (
                "Load generator",
                f"{self.generator['cpu_share']:.0%} of a core, 99 % sent within "
                f"{self.generator['send_late_p99_s'] * 1e3:.1f} ms",
            ),
        ]
        width = max(len(name) for name, _ in figures)
        shown_errors = [f"failed {count} x: {error[:200]}" for error, count in self.errors.items()]
        return [f"{name:<{width}}  {value}" for name, value in figures] + shown_errors


def _rounded(value: float) -> float | None:
    return None if np.isnan(value) else round(value, 4)
