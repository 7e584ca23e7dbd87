"""Arrival patterns: drawn once at one arrival per second, then scaled to any rate.

Used by `pdserve.planner.workload`. Knows nothing of what arrives. At twice the rate, a pattern has the same arrivals in
half the time, so that rates are compared on the same random draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pdserve.planner.simulation import FloatArray

_STREAM = 1
"""Keeps these random numbers apart from those of lengths, which come from the same seed."""


class Arrivals(Protocol):
    """An arrival process."""

    def unit_times(self, num_arrivals: int, seed: int) -> FloatArray:
        """Instants in ascending order, one a second on average."""
        ...

    def at_rate(self, unit_times: FloatArray, arrivals_per_s: float) -> FloatArray:
        """Where those instants lie, in seconds, at another rate."""
        ...


@dataclass(frozen=True, slots=True)
class RandomGaps:
    """Gaps of a gamma distribution, each drawn for itself. A Poisson process, unless told otherwise."""

    coefficient_of_variation: float = 1.0
    """Of the gaps: 0 for equal ones, 1 for Poisson, more for bursts."""

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

    def at_rate(self, unit_times: FloatArray, arrivals_per_s: float) -> FloatArray:
        return unit_times / arrivals_per_s


POISSON = RandomGaps()


@dataclass(frozen=True, slots=True)
class Recorded:
    """The instants of a trace. A stretch of it is as recorded at its own rate, `stretch_per_s`, and in the same pattern
    at others: traces have quiet and busy hours, and who asks for a rate gets it in either."""

    recorded_s: FloatArray
    """In ascending order."""

    def __post_init__(self) -> None:
        if len(self.recorded_s) < 2 or self.recorded_s[-1] <= self.recorded_s[0]:
            raise ValueError("the trace has no times to replay: name an arrival process")

    @property
    def requests_per_s(self) -> float:
        """Of the whole trace."""
        return float((len(self.recorded_s) - 1) / (self.recorded_s[-1] - self.recorded_s[0]))

    def stretch_per_s(self, num_arrivals: int, seed: int) -> float:
        """Requests per second of what `unit_times` returns, as recorded; of the whole trace if all come at once."""
        span_s = float(self._stretch(num_arrivals, seed)[-1])
        return (num_arrivals - 1) / span_s if span_s > 0 else self.requests_per_s

    def unit_times(self, num_arrivals: int, seed: int) -> FloatArray:
        """A stretch of the trace, from the row that `first_row` names; time starts with its first arrival."""
        return self._stretch(num_arrivals, seed) * self.stretch_per_s(num_arrivals, seed)

    def _stretch(self, num_arrivals: int, seed: int) -> FloatArray:
        first = first_row(len(self.recorded_s), num_arrivals, seed)
        stretch_s: FloatArray = self.recorded_s[first : first + num_arrivals] - self.recorded_s[first]
        return stretch_s

    def at_rate(self, unit_times: FloatArray, arrivals_per_s: float) -> FloatArray:
        return unit_times / arrivals_per_s


def first_row(num_rows: int, num_wanted: int, seed: int) -> int:
    """Where a stretch of a trace begins: at its start for seed 0, anywhere it fits for others.

    Raises:
        ValueError: the trace is shorter than that.
    """
    if num_wanted > num_rows:
        raise ValueError(
            f"{num_wanted} are asked of a trace of {num_rows}: ask for fewer, or draw from its lengths alone"
        )
    return int(np.random.default_rng((_STREAM, seed)).integers(num_rows - num_wanted + 1)) if seed else 0
