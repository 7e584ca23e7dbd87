"""Efficiency by amount of work: matrix products need some hundred tokens to reach a device's rate.

Used by the hardware catalogue and the cost model.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import log
from typing import Any


@dataclass(frozen=True, slots=True)
class Curve:
    """Share of a peak by count: piecewise linear in the logarithm of the count, flat outside its points."""

    points: tuple[tuple[int, float], ...]
    """(count, share), by rising count; a single point makes a constant."""

    def __post_init__(self) -> None:
        """Check the points.

        Raises:
            ValueError: points out of order, a share outside (0, 1], or a share that grows faster than the count, which
                would finish more work in less time.
        """
        if not self.points:
            raise ValueError("a curve needs a point; write [[1, 0.5]] for a constant share of 0.5")
        for count, share in self.points:
            if count < 1 or not 0 < share <= 1:
                raise ValueError(f"({count}, {share}) is no point; a count is at least 1, a share above 0 and up to 1")
        for (low, low_share), (high, high_share) in zip(self.points, self.points[1:], strict=False):
            if high <= low:
                raise ValueError(f"counts must rise, and {high} follows {low}; sort the points")
            if high_share - low_share > low_share * log(high / low):
                raise ValueError(
                    f"a share of {high_share} at {high} after {low_share} at {low} would do more work in less time; "
                    "raise the first or lower the second"
                )

    @classmethod
    def constant(cls, share: float) -> Curve:
        return cls(((1, share),))

    def at(self, count: Any) -> Any:
        """Share at a count, or at each of an array of them."""
        points = self.points
        if not isinstance(count, int | float):
            import numpy as np  # tables need it; commands without one start sooner

            counts, shares = zip(*points, strict=True)
            return np.interp(np.log(count), np.log(counts), shares)
        index = bisect_right(points, count, key=lambda point: point[0])
        if index == 0:
            return points[0][1]
        if index == len(points):
            return points[-1][1]
        (low, low_share), (high, high_share) = points[index - 1], points[index]
        return low_share + (high_share - low_share) * log(count / low) / log(high / low)
