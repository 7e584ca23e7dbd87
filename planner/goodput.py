"""The goodput of one layout: the highest rate at which enough requests meet both objectives."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.planner.attainment import Attainment, Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The highest rate that met the target, and all that was tried to find it."""

    rate: float
    """Requests per second of the whole layout; the highest that was simulated and met the target, 0 where none did."""
    interval: Interval
    """Where the rate lies at which attainment crosses the target."""
    target: float
    """Attainment that was asked."""
    num_devices: int
    points: tuple[Attainment, ...]
    """Every rate that was simulated, in order; those stopped early are upper bounds (`Attainment.is_partial`)."""
    num_requests: int
    """Simulated, in all runs together."""
    is_capped: bool = False
    """The highest rate that was allowed met the target: the goodput is at least so high."""

    @property
    def at_rate(self) -> Attainment | None:
        """What was seen at the goodput itself."""
        return next((point for point in self.points if point.rate == self.rate), None)

    @property
    def rate_per_device(self) -> float:
        return self.rate / self.num_devices

    def requests_per_dollar(self, dollars_per_hour: float) -> float:
        """Requests within the SLO for each dollar, of a layout that costs so much."""
        return self.rate * 3600 / dollars_per_hour
