"""Error of the simulator against a measurement of the same requests: attainment and percentiles of both.

Pure; used by `pdserve.bench.simulator_vs_emulation`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdserve.contracts.deployment import SloConfig
from pdserve.planner.arrays import FloatArray
from pdserve.planner.simulate.simulation import RequestTimes

Figures = Mapping[str, float]
"""``attainment``, the share of requests that met both objectives, and `PERCENTILES` in seconds. All requests count; one
that did not end meets nothing. TPOT is of answers of two tokens and more."""
PERCENTILES = ("ttft_p50_s", "ttft_p90_s", "tpot_p50_s", "tpot_p90_s")
_MOST_POINTS, _MOST_ERROR = 2.0, 0.05


def figures_of(times: RequestTimes, slo: SloConfig) -> Figures:
    values = [*_percentiles(times.ttft_s), *_percentiles(times.tpot_s[times.num_output_tokens > 1])]
    return {"attainment": float(times.are_within(slo).mean()), **dict(zip(PERCENTILES, values, strict=True))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """One run, measured and simulated."""

    measured: Figures
    simulated: Figures

    @property
    def attainment_points(self) -> float:
        """Percentage points by which the simulator is above the measurement."""
        return 100 * (self.simulated["attainment"] - self.measured["attainment"])

    @property
    def relative_errors(self) -> dict[str, float]:
        """By percentile; above 0 where the simulator is slower than the measurement."""
        return {name: self.simulated[name] / self.measured[name] - 1 for name in PERCENTILES}

    def failures(self, *, attainment_only: bool = False) -> list[str]:
        """Figures that differ by more than 2 points or 5 %, a line each."""
        found = []
        # Not "more than": NaN, for nothing measured, agrees with nothing.
        if not abs(self.attainment_points) <= _MOST_POINTS + 1e-9:
            found.append(f"attainment is {self.attainment_points:+.1f} points off")
        for name, error in self.relative_errors.items():
            if not attainment_only and not abs(error) <= _MOST_ERROR:
                found.append(f"{name.removesuffix('_s')} is {error:+.1%} off")
        return found

    def as_dict(self) -> dict[str, Any]:
        return {
            "measured": {name: round(value, 6) for name, value in self.measured.items()},
            "simulated": {name: round(value, 6) for name, value in self.simulated.items()},
            "attainment_points": round(self.attainment_points, 2),
            "relative_errors": {name: round(error, 4) for name, error in self.relative_errors.items()},
        }


def _percentiles(seconds: FloatArray) -> tuple[float, float]:
    known = seconds[~np.isnan(seconds)]
    if not known.size:
        return float("nan"), float("nan")
    p50, p90 = np.percentile(known, (50, 90))
    return float(p50), float(p90)
