"""Arrival patterns: drawn once at one arrival per second, then scaled to any rate.

Used by `pdserve.planner.workload.workload`. Knows nothing of requests. At twice the rate, a pattern has the same
arrivals in half the time, so that rates are compared on the same random draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pdserve.planner.arrays import FloatArray

_STREAM = 1
"""Separates these random numbers from those of lengths, which use the same seed."""


class Arrivals(Protocol):
    """An arrival process."""

    def unit_times(self, num_arrivals: int, seed: int) -> FloatArray:
        """Ascending instants, one per second on average."""
        ...


@dataclass(frozen=True, slots=True)
class RandomGaps:
    """Independent gaps from a gamma distribution; a Poisson process by default."""

    coefficient_of_variation: float = 1.0
    """Standard deviation of the gaps over their mean: 0 for equal ones, 1 for Poisson, more for bursts."""

    def __post_init__(self) -> None:
        if not 0 <= self.coefficient_of_variation < np.inf:
            raise ValueError(
                f"a coefficient of variation of {self.coefficient_of_variation} is not possible: use 0 for equal gaps, "
                "1 for Poisson arrivals, more for bursts"
            )

    def unit_times(self, num_arrivals: int, seed: int) -> FloatArray:
        if self.coefficient_of_variation == 0:
            return np.arange(1, num_arrivals + 1, dtype=np.float64)
        shape = self.coefficient_of_variation**-2
        return np.cumsum(np.random.default_rng((_STREAM, seed)).gamma(shape, 1 / shape, num_arrivals))


POISSON = RandomGaps()


@dataclass(frozen=True, slots=True)
class Recorded:
    """The instants of a trace. A section keeps its recorded times at its own rate, `stretch_per_s`, and its pattern at
    other rates: traces have quiet and busy hours, and a requested rate applies to either."""

    recorded_s: FloatArray
    """Ascending."""

    def __post_init__(self) -> None:
        if len(self.recorded_s) < 2 or self.recorded_s[-1] <= self.recorded_s[0]:
            raise ValueError("the trace has no times to replay: choose an arrival process")

    @property
    def requests_per_s(self) -> float:
        """Mean of the whole trace."""
        return float((len(self.recorded_s) - 1) / (self.recorded_s[-1] - self.recorded_s[0]))

    def stretch_per_s(self, num_arrivals: int, seed: int) -> float:
        """Recorded requests per second of the section that `unit_times` returns; of the whole trace if all coincide."""
        span_s = float(self._stretch(num_arrivals, seed)[-1])
        return (num_arrivals - 1) / span_s if span_s > 0 else self.requests_per_s

    def unit_times(self, num_arrivals: int, seed: int) -> FloatArray:
        """A section of the trace from row `first_row`; time starts at its first arrival."""
        return self._stretch(num_arrivals, seed) * self.stretch_per_s(num_arrivals, seed)

    def _stretch(self, num_arrivals: int, seed: int) -> FloatArray:
        first = first_row(len(self.recorded_s), num_arrivals, seed)
        stretch_s: FloatArray = self.recorded_s[first : first + num_arrivals] - self.recorded_s[first]
        return stretch_s


def first_row(num_rows: int, num_wanted: int, seed: int) -> int:
    """First row of a section of a trace: the start for seed 0, any row with enough rows after it for other seeds.

    Raises:
        ValueError: the trace is too short.
    """
    if num_wanted > num_rows:
        raise ValueError(
            f"{num_wanted} arrivals are asked of a trace of {num_rows}, requests or sessions: ask for fewer requests"
        )
    return int(np.random.default_rng((_STREAM, seed)).integers(num_rows - num_wanted + 1)) if seed else 0
