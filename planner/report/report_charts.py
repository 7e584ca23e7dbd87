"""Charts of a plan's report: selects the series of each chart.

Used by `pdserve.planner.report.report`; `pdserve.planner.report.svg` draws them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pdserve.planner import wording
from pdserve.planner.report.svg import Axis, Bar, Point, Rule, Series, bars, chart
from pdserve.planner.search.plan import Candidate, Plan
from pdserve.planner.simulate.attainment import Attainment, Distribution

JOINT, TTFT, TPOT = 0, 1, 2
"""Colours of the joint share and of each objective's share."""


class Figure(NamedTuple):
    title: str
    svg: str
    legend: tuple[tuple[int, str], ...]
    """Colours with their meanings."""
    note: str = ""


class DrawnCandidate(NamedTuple):
    """A candidate in the charts, with its label."""

    name: str
    candidate: Candidate
    curve: tuple[Attainment, ...]
    """Its results in order of rate."""


def drawn_candidates(plan: Plan, curves: Sequence[Sequence[Attainment]] = ()) -> list[DrawnCandidate]:
    """The winner, the runner-up, and the best of the kind that neither of them is, if they were simulated.

    Args:
        curves: rates simulated for the report, per candidate; by default the rates that the search tried.
    """
    others = (plan.verdict.best_colocated, plan.verdict.best_disaggregated)
    chosen: list[tuple[str, Candidate]] = [("Winner", plan.best)]
    chosen += [("Runner-up", candidate) for candidate in plan.candidates[1:2]]
    for name, candidate in zip(("Best colocated", "Best disaggregated"), others, strict=True):
        if candidate is not None and all(candidate.layout != each.layout for _, each in chosen):
            chosen.append((name, candidate))
    seen = [(name, candidate) for name, candidate in chosen if candidate.goodput is not None]
    return [
        DrawnCandidate(
            f"{name}: {candidate.layout}",
            candidate,
            tuple(curves[row]) if row < len(curves) else _searched(candidate),
        )
        for row, (name, candidate) in enumerate(seen)
    ]


def _searched(candidate: Candidate) -> tuple[Attainment, ...]:
    return candidate.goodput.points if candidate.goodput is not None else ()


def figures(plan: Plan, drawn: Sequence[DrawnCandidate]) -> Iterator[Figure]:
    """All charts of the report, in order."""
    highest = max((point.rate for each in drawn for point in each.curve), default=1.0)
    for shown in drawn:
        yield _attainment(plan, shown, highest)
    slo = plan.question.slo
    yield _latencies("TTFT near the goodput", drawn, lambda at_rate: at_rate.ttft, slo.ttft_seconds)
    yield _latencies("TPOT near the goodput", drawn, lambda at_rate: at_rate.tpot, slo.tpot_seconds)
    if any(not candidate.layout.is_colocated for candidate in plan.candidates):
        yield _ratios(plan)
    yield _utilisation(drawn)


def _percent(value: float) -> str:
    return f"{value * 100:.0f} %"


def _plain(value: float) -> str:
    return f"{value:g}"


def _attainment(plan: Plan, shown: DrawnCandidate, highest: float) -> Figure:
    shares: tuple[tuple[str, int, Callable[[Attainment], float]], ...] = (
        ("both objectives", JOINT, lambda point: point.share),
        ("TTFT", TTFT, lambda point: point.ttft_share),
        ("TPOT", TPOT, lambda point: point.tpot_share),
    )
    series = []
    for label, color, share_of in shares:
        points = [_seen(point, share_of(point), label) for point in shown.curve]
        series.append(Series(label=label, points=points, color=color, is_dashed=color != JOINT))
    target = plan.question.slo.attainment
    rules = [Rule(f"target {wording.share(target)}", y=target)]
    if shown.candidate.rate:
        rules.append(Rule(f"goodput {wording.number(shown.candidate.rate)}", x=shown.candidate.rate))
    svg = chart(
        Axis(label="requests/s", format=_plain, high=highest * 1.02),
        Axis(label="requests within the SLO", format=_percent, high=1.0),
        series[::-1],
        rules,
    )
    legend = tuple((color, label) for label, color, _ in shares)
    note = f"Share within the SLO, {_origin(shown.curve)}.{_confidence(shown.candidate)}"
    return Figure(shown.name, svg, legend, note)


def _confidence(candidate: Candidate) -> str:
    """Confidence interval of the goodput's mark."""
    if candidate.goodput is None:
        return ""
    low, high = candidate.goodput.interval
    return f" The goodput lies between {wording.number(low)} and {wording.number(high)}, with 95 % confidence."


def _origin(curve: Sequence[Attainment]) -> str:
    """Number of requests behind a curve's points."""
    low, high = min(point.num_requests for point in curve), max(point.num_requests for point in curve)
    count = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    saturated = (
        "; hollow points are saturated: longer runs attain less" if any(each.is_saturated for each in curve) else ""
    )
    return f"of {count} requests at each rate{saturated}"


def _seen(point: Attainment, share: float, label: str) -> Point:
    title = f"{wording.rate(point.rate)}: {wording.share(share)} within {label}"
    return Point(point.rate, share, title, point.is_saturated)


def _latencies(
    title: str, drawn: Sequence[DrawnCandidate], of: Callable[[Attainment], Distribution], slo_s: float
) -> Figure:
    series, legend = [], []
    for color, shown in enumerate(drawn):
        at_rate = shown.candidate.goodput.at_rate if shown.candidate.goodput is not None else None
        if at_rate is None:
            continue
        quantiles = of(at_rate).quantile_s
        points = [Point(latency_s * 1e3, percent / 100) for percent, latency_s in enumerate(quantiles)]
        series.append(Series(label=shown.name, points=points, color=color, has_dots=False))
        legend.append((color, shown.name))
    # Clip the axis: values far beyond the objective would hide the ones near it.
    p99_ms = [each.points[99].x for each in series if len(each.points) > 99 and each.points[99].x < float("inf")]
    high = min(max([*p99_ms, slo_s * 1.3e3]), slo_s * 4e3)
    svg = chart(
        Axis(label="ms", format=_plain, high=high),
        Axis(label="share of requests", format=_percent, high=1.0),
        series,
        [Rule(f"objective {wording.seconds(slo_s)}", x=slo_s * 1e3)],
    )
    return Figure(title, svg, tuple(legend), "Cumulative share of requests, each layout at its own goodput.")


def _ratios(plan: Plan) -> Figure:
    points: list[Point] = []
    for candidate in plan.candidates:
        prefill = candidate.layout.prefill
        if prefill is None:
            continue
        share = prefill.num_devices / candidate.layout.num_devices
        known = "estimated" if candidate.is_estimated else "simulated"
        title = f"{candidate.layout}: {wording.number(candidate.rate_per_device)} requests/s per GPU, {known}"
        points.append(Point(share, candidate.rate_per_device, title, candidate.is_estimated))
    colocated = plan.verdict.best_colocated
    rules = []
    if colocated is not None:
        rules.append(Rule(f"best colocated: {colocated.layout}", y=colocated.rate_per_device))
    svg = chart(
        Axis(label="share of GPUs that prefill", format=_percent, high=1.0),
        Axis(label="requests/s per GPU", format=_plain),
        [Series(label="layouts", points=sorted(points), color=0, has_line=False)],
        rules,
    )
    return Figure("Goodput by P:D ratio", svg, ((0, "full: simulated; hollow: estimated"),), "Per GPU, of each layout.")


def _utilisation(drawn: Sequence[DrawnCandidate]) -> Figure:
    rows = []
    for color, shown in enumerate(drawn):
        for pool in shown.candidate.pools:
            name = wording.ROLE_NAMES[pool.role]
            rows.append(Bar(f"{name}: busy", pool.busy_share, wording.share(pool.busy_share), color))
            rows.append(Bar(f"{name}: KV in use", pool.kv_share, wording.share(pool.kv_share), color))
    legend = tuple((color, shown.name) for color, shown in enumerate(drawn))
    return Figure("Utilisation by phase", bars(rows), legend, "Of the time and of the KV blocks, near the goodput.")
