"""Sweep of a running server over request rates: attainment, latencies and the goodput, which it searches.

Called by ``pdserve bench sweep``. Each rate is one run of the load generator, judged as the planner judges simulations:
requests of the warm-up do not count, and a run without a steady state is saturated. `pdserve.loadgen.page` draws
sweeps, several side by side.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import chain
from math import isfinite
from typing import Any

import numpy as np

from pdserve.contracts.deployment import SloConfig
from pdserve.loadgen.load import Measurement
from pdserve.planner.report.serving_figures import serving_figures
from pdserve.planner.search.rates import fall_rate, highest_rate
from pdserve.planner.simulate.attainment import Attainment, Distribution, Interval, measure
from pdserve.planner.simulate.simulation import Simulation
from pdserve.planner.wording import number

_STEP = 1.6
"""Ratio of the first two rates of a search."""

Phases = Mapping[str, float]
"""Seconds that all requests so far spent in each phase, as the server counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One rate."""

    rate: float
    """Offered requests per second."""
    share: float
    """Requests after the warm-up that met both objectives."""
    low: float
    high: float
    """Confidence interval (95 %) of ``share``."""
    is_saturated: bool
    figures: dict[str, float | None]
    """Of all requests, under vLLM's keys (`serving_figures`)."""
    ttft_ms: tuple[float, ...]
    """Percentiles 0 to 100 of the requests after the warm-up; those of requests that never got so far are left out, so
    that fewer may be listed. So with the others."""
    tpot_ms: tuple[float, ...]
    itl_ms: tuple[float, ...]
    phases_ms: dict[str, float]
    """Mean time of a request in each phase; empty if the server does not say."""
    problems: tuple[str, ...] = ()
    """Why its figures do not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """All rates of one server, in order."""

    label: str
    url: str
    measured: str
    """Date and time (ISO 8601, UTC)."""
    workload: str
    ttft_ms: float
    tpot_ms: float
    target: float
    """Required attainment."""
    goodput: float
    """Highest measured rate that met the target; 0 if none did."""
    surely_met: float
    """Highest measured rate that met it with 95 % confidence; 0 if none did."""
    surely_missed: float | None
    """Rate at which it is missed with 95 % confidence, interpolated; ``None`` if it is at no measured rate."""
    points: tuple[SweepPoint, ...]
    verdict: str = ""
    """The goodput with its bounds in words, and why figures do not count, if some do not."""


class Sweeper:
    """Measures one rate after the other."""

    def __init__(
        self,
        load: Callable[[float], Measurement],
        slo: SloConfig,
        *,
        phases: Callable[[], Phases] | None = None,
        report: Callable[[SweepPoint], None] | None = None,
    ) -> None:
        """
        Args:
            load: sends the workload at a rate, and waits for all answers.
            phases: reads the server's counts.
            report: called with each point as it is measured.

        """
        self._load, self._slo, self._phases = load, slo, phases or dict
        self._report = report or (lambda _: None)
        self._points: dict[float, tuple[Attainment, SweepPoint]] = {}

    @property
    def problems(self) -> list[str]:
        """Reasons why figures do not count, with their rates."""
        points = [point for _, point in self._points.values()]
        return [f"at {point.rate:g}/s {problem}" for point in points for problem in point.problems]

    @property
    def num_points(self) -> int:
        """Rates measured so far."""
        return len(self._points)

    def rates(self, rates: Sequence[float]) -> None:
        for rate in rates:
            self._measured(rate)

    def search(self, start_rate: float, tolerance: float) -> None:
        """Bracket the goodput, until the rates around it differ by a share of ``tolerance``."""
        highest_rate(lambda rate: self._measured(rate).meets(self._slo.attainment), start_rate, _STEP, 1 + tolerance)

    def result(self, label: str, url: str, measured: str, workload: str) -> Sweep:
        target = self._slo.attainment
        in_order = [self._points[rate] for rate in sorted(self._points)]
        attained = [point for point, _ in in_order]
        goodput = max((point.rate for point in attained if point.meets(target)), default=0.0)
        surely_met = max((point.rate for point in attained if point.surely_meets(target)), default=0.0)
        surely_missed = fall_rate(attained, goodput, target)
        is_bounded = any(point.surely_misses(target) for point in attained if point.rate > goodput)
        is_missed = any(not point.meets(target) for point in attained if point.rate > goodput)
        words = [f"{'' if is_missed else 'at least '}{number(goodput)}" if goodput else "no measured rate meets it"]
        words += [f"surely {number(surely_met)}" if surely_met else "not sure"] if goodput else []
        words += [f"surely not {number(surely_missed)}"] if is_bounded else []
        words += [f"these figures do not count: {'; '.join(self.problems)}"] if self.problems else []
        return Sweep(
            label=label,
            url=url,
            measured=measured,
            workload=workload,
            ttft_ms=1e3 * self._slo.ttft_seconds,
            tpot_ms=1e3 * self._slo.tpot_seconds,
            target=target,
            goodput=goodput,
            surely_met=surely_met,
            surely_missed=surely_missed if is_bounded else None,
            points=tuple(point for _, point in in_order),
            verdict=", ".join(words),
        )

    def _measured(self, rate: float) -> Attainment:
        if rate not in self._points:
            before = self._phases()
            found = self._load(rate)
            after = self._phases()
            attained = measure(_as_run(found), self._slo, rate)
            num_done = max(1, found.num_finished)
            phases_ms = {name: 1e3 * (seconds - before.get(name, 0.0)) / num_done for name, seconds in after.items()}
            point = _point(found, attained, self._slo, phases_ms)
            self._points[rate] = (attained, point)
            self._report(point)
        return self._points[rate][0]


def sweep_csv(sweep: Sweep) -> str:
    """One line per rate."""
    written = StringIO()
    rows = [_row(point) | {"goodput": sweep.verdict} for point in sweep.points]
    writer = csv.DictWriter(written, list(dict.fromkeys(chain.from_iterable(rows))), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return written.getvalue()


def _row(point: SweepPoint) -> dict[str, Any]:
    return {
        "request_rate": point.rate,
        "attainment": point.share,
        "attainment_low": point.low,
        "attainment_high": point.high,
        "saturated": point.is_saturated,
        "problems": "; ".join(point.problems),
        **point.figures,
        **{f"mean_{name}_phase_ms": round(value, 3) for name, value in point.phases_ms.items()},
    }


def _as_run(found: Measurement) -> Simulation:
    return Simulation(
        times=found.times,
        workers=[],
        gap_s=found.gap_s,
        gap_weights=np.ones(len(found.gap_s)),
        ended_s=found.ended_s,
        offered_until_s=found.offered_until_s,
    )


def _point(found: Measurement, attained: Attainment, slo: SloConfig, phases_ms: dict[str, float]) -> SweepPoint:
    objectives = {"ttft": 1e3 * slo.ttft_seconds, "tpot": 1e3 * slo.tpot_seconds}
    figures = serving_figures(found.times, found.gap_s, found.ended_s, objectives)
    interval: Interval = attained.interval
    return SweepPoint(
        rate=attained.rate,
        share=attained.share,
        low=interval.low,
        high=interval.high,
        is_saturated=attained.is_saturated,
        figures={name: value for name, value in figures.items() if value is None or isinstance(value, int | float)},
        ttft_ms=tuple(_finite_ms(attained.ttft)),
        tpot_ms=tuple(_finite_ms(attained.tpot)),
        itl_ms=tuple(_finite_ms(attained.itl)),
        phases_ms=phases_ms,
        problems=tuple(found.health.problems()),
    )


def _finite_ms(latency: Distribution) -> Iterator[float]:
    return (round(1e3 * each, 3) for each in latency.quantile_s if isfinite(each))
