"""Charts of a plan's report, for `pdserve.planner.report.report`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from typing import Any, NamedTuple

from pdserve.planner import wording
from pdserve.planner.report.page import CARD, SERIES, Chart, rule, svg
from pdserve.planner.search.goodput import Goodput
from pdserve.planner.search.plan import Candidate, Plan
from pdserve.planner.simulate.attainment import Attainment, Distribution


class DrawnCandidate(NamedTuple):
    """A simulated candidate in the charts, with its label."""

    name: str
    candidate: Candidate
    goodput: Goodput


def drawn_candidates(plan: Plan) -> list[DrawnCandidate]:
    """The winner, the runner-up, and the best of the kind that neither of them is, if they were simulated."""
    others = (plan.verdict.best_colocated, plan.verdict.best_disaggregated)
    chosen: list[tuple[str, Candidate]] = [("Winner", plan.best)]
    chosen += [("Runner-up", candidate) for candidate in plan.candidates[1:2]]
    for name, candidate in zip(("Best colocated", "Best disaggregated"), others, strict=True):
        if candidate is not None and all(candidate.layout != each.layout for _, each in chosen):
            chosen.append((name, candidate))
    return [
        DrawnCandidate(f"{name}: {candidate.layout}", candidate, candidate.goodput)
        for name, candidate in chosen
        if candidate.goodput is not None
    ]


def charts(plan: Plan, drawn: Sequence[DrawnCandidate]) -> Iterator[Chart]:
    """All charts of the report, in order."""
    highest = max((point.rate for each in drawn for point in each.goodput.points), default=1.0)
    for shown in drawn:
        yield _attainment(plan, shown, highest)
    slo = plan.question.slo
    yield _latencies("TTFT at the goodput", drawn, lambda at_rate: at_rate.ttft, slo.ttft_seconds)
    yield _latencies("TPOT at the goodput", drawn, lambda at_rate: at_rate.tpot, slo.tpot_seconds)
    if any(not candidate.layout.is_colocated for candidate in plan.candidates):
        yield _ratios(plan)


def _attainment(plan: Plan, shown: DrawnCandidate, highest: float) -> Chart:
    shares: tuple[tuple[str, str, Callable[[Attainment], float]], ...] = (
        ("TPOT", "--", lambda point: point.tpot_share),
        ("TTFT", "--", lambda point: point.ttft_share),
        ("both objectives", "-", lambda point: point.share),
    )
    curve = shown.goodput.points
    rates = [point.rate for point in curve]

    def draw(axes: Any) -> None:
        for color, (label, line, share_of) in zip(SERIES[2::-1], shares, strict=True):
            values = [share_of(point) for point in curve]
            axes.plot(rates, values, line, color=color, label=label)
            for fill, is_saturated in ((color, False), (CARD, True)):
                marked = [row for row, point in enumerate(curve) if point.is_saturated is is_saturated]
                axes.plot([rates[row] for row in marked], [values[row] for row in marked], "o", color=color, mfc=fill)
        target = plan.question.slo.attainment
        rule(axes, f"target {wording.share(target)}", y=target)
        if shown.candidate.rate:
            rule(axes, f"goodput {wording.number(shown.candidate.rate)}", x=shown.candidate.rate)
        axes.set(xlim=(0, highest * 1.02), xlabel="requests/s", ylim=(0, 1.02), ylabel="requests within the SLO")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")

    note = f"Share within the SLO, {_origin(curve)}.{_confidence(shown.goodput)}"
    return Chart(shown.name, svg(draw), note)


def _confidence(goodput: Goodput) -> str:
    low, high = goodput.interval
    return f" The goodput lies between {wording.number(low)} and {wording.number(high)}, with 95 % confidence."


def _origin(curve: Sequence[Attainment]) -> str:
    """Number of requests behind a curve's points."""
    low, high = min(point.num_requests for point in curve), max(point.num_requests for point in curve)
    count = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    is_saturated = any(each.is_saturated for each in curve)
    return f"of {count} requests at each rate" + "; hollow points are saturated: longer runs attain less" * is_saturated


def _latencies(
    title: str, drawn: Sequence[DrawnCandidate], of: Callable[[Attainment], Distribution], slo_s: float
) -> Chart:
    results = [(each.name, each.goodput.at_rate) for each in drawn]

    def draw(axes: Any) -> None:
        p99_s = [slo_s * 1.3]
        for color, (name, at_rate) in zip(SERIES, results, strict=False):
            if at_rate is not None:
                quantile_s = [each for each in of(at_rate).quantile_s if isfinite(each)]
                p99_s += quantile_s[99:100]
                axes.plot(
                    [each * 1e3 for each in quantile_s],
                    [n / 100 for n in range(len(quantile_s))],
                    color=color,
                    label=name,
                )
        rule(axes, f"objective {wording.seconds(slo_s)}", x=slo_s * 1e3)
        # Values far beyond the objective would hide the ones near it.
        axes.set(xlim=(0, min(max(p99_s), slo_s * 4) * 1e3), xlabel="ms", ylim=(0, 1.02), ylabel="share of requests")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")

    return Chart(title, svg(draw), "Cumulative share of requests, each layout at its own goodput.")


def _ratios(plan: Plan) -> Chart:
    def draw(axes: Any) -> None:
        for label, is_estimated in (("simulated", False), ("estimated", True)):
            points = [
                (candidate.layout.prefill.num_devices / candidate.layout.num_devices, candidate.rate_per_device)
                for candidate in plan.candidates
                if candidate.layout.prefill is not None and candidate.is_estimated is is_estimated
            ]
            fill = CARD if is_estimated else SERIES[0]
            axes.plot(*zip(*points, strict=True) if points else ([], []), "o", color=SERIES[0], mfc=fill, label=label)
        if (colocated := plan.verdict.best_colocated) is not None:
            rule(axes, f"best colocated: {colocated.layout}", y=colocated.rate_per_device)
        axes.set(xlim=(0, 1), xlabel="share of GPUs that prefill", ylabel="requests/s per GPU")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")

    return Chart("Goodput by P:D ratio", svg(draw), "Per GPU, of each layout.")
