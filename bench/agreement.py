"""Error of the simulator against a measurement of the same requests: attainment and percentiles.

Pure; used by the benchmarks that compare `pdserve.planner.simulator` with real and emulated clusters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np

from pdserve.contracts.deployment import SloConfig
from pdserve.planner.simulation import FloatArray, RequestTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Tolerances of agreement."""

    attainment_points: float = 2.0
    """Percentage points of joint attainment."""
    relative: float = 0.05
    """Relative error of each percentile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of one run; counts all requests, and an unfinished one has met no objective."""

    attainment: float
    """Share of the requests that met both objectives."""
    ttft_p50_s: float
    ttft_p90_s: float
    tpot_p50_s: float
    """Answers of two tokens or more, as for the next field."""
    tpot_p90_s: float

    @classmethod
    def of(cls, times: RequestTimes, slo: SloConfig) -> Figures:
        meets = (times.ttft_s <= slo.ttft_seconds) & (times.tpot_s <= slo.tpot_seconds)
        ttft_p50_s, ttft_p90_s = _percentiles(times.ttft_s)
        tpot_p50_s, tpot_p90_s = _percentiles(times.tpot_s[times.num_output_tokens > 1])
        return cls(
            attainment=float(meets.mean()),
            ttft_p50_s=ttft_p50_s,
            ttft_p90_s=ttft_p90_s,
            tpot_p50_s=tpot_p50_s,
            tpot_p90_s=tpot_p90_s,
        )


PERCENTILES = ("ttft_p50_s", "ttft_p90_s", "tpot_p50_s", "tpot_p90_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """One run, measured and simulated."""

    measured: Figures
    simulated: Figures

    @property
    def attainment_points(self) -> float:
        """Percentage points of the simulator above the measurement."""
        return 100 * (self.simulated.attainment - self.measured.attainment)

    @property
    def relative_errors(self) -> dict[str, float]:
        """By percentile; above 0 if the simulator is slower than the measurement."""
        return {name: getattr(self.simulated, name) / getattr(self.measured, name) - 1 for name in PERCENTILES}

    def failures(self, limits: Limits, *, attainment_only: bool = False) -> list[str]:
        """A line for each figure that disagrees."""
        found = []
        # Not "more than": NaN, a missing measurement, agrees with nothing.
        if not abs(self.attainment_points) <= limits.attainment_points + 1e-9:
            found.append(f"attainment is {self.attainment_points:+.1f} points off")
        for name, error in self.relative_errors.items():
            if not attainment_only and not abs(error) <= limits.relative:
                found.append(f"{name.removesuffix('_s')} is {error:+.1%} off")
        return found

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "measured": {name: round(value, 6) for name, value in asdict(self.measured).items()},
            "simulated": {name: round(value, 6) for name, value in asdict(self.simulated).items()},
            "attainment_points": round(self.attainment_points, 2),
            "relative_errors": {name: round(error, 4) for name, error in self.relative_errors.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedLoad:
    """One rate, measured and simulated."""

    rate: float
    share_of_saturation: float
    agreement: Agreement
    failures: list[str]
    """Disagreements."""
    invalid: list[str]
    """Reasons why the measurement does not count."""


def joined(runs: Sequence[RequestTimes]) -> RequestTimes:
    """The requests of all runs, for joint figures; each run keeps a clock of its own."""
    names = [field.name for field in fields(RequestTimes)]
    return RequestTimes(**{name: np.concatenate([getattr(run, name) for run in runs]) for name in names})


def _percentiles(seconds: FloatArray) -> tuple[float, float]:
    known = seconds[~np.isnan(seconds)]
    if not known.size:
        return float("nan"), float("nan")
    p50, p90 = np.percentile(known, (50, 90))
    return float(p50), float(p90)
