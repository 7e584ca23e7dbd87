"""Page that shows sweeps side by side: attainment and good requests by rate, latencies at the goodput, where time goes.

Self-contained HTML, like the planner's report (`pdserve.planner.report.page`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any

from pdserve.loadgen.sweep import Sweep, SweepPoint
from pdserve.planner import wording
from pdserve.planner.report.page import CARD, GRID, SERIES, SOFT, Chart, Column, card, page, rule, svg, table

PHASE_NAMES = {
    "tokenise": "tokenisation",
    "queue": "waits in the router",
    "prefill_queue": "waits for prefill",
    "prefill": "prefill",
    "handoff": "handoff",
    "decode": "decode",
}
"""Phases of the time budget, in their order. ``decode_queue`` is part of the handoff, ``first_write`` beside it."""
_COLUMNS = (
    Column("requests/s"),
    Column("attainment"),
    Column("95 % interval"),
    Column("good/s"),
    Column("TTFT p50"),
    Column("p99"),
    Column("TPOT p50"),
    Column("p99"),
    Column("tokens/s"),
    Column("", is_number=False),
)


def sweep_html(sweeps: Sequence[Sweep]) -> str:
    """The page of one sweep or more; the first one is in the title."""
    first = sweeps[0]
    objectives = f"TTFT {first.ttft_ms:g} ms and TPOT {first.tpot_ms:g} ms for {wording.share(first.target)}"
    tiles = "".join(
        f"<div class=tile><b>{escape(wording.number(sweep.goodput))}</b>"
        f"<span>requests/s: {escape(sweep.label)}, {escape(sweep.verdict)}</span></div>"
        for sweep in sweeps
    )
    tables = "".join(
        f"<h2>{escape(sweep.label)}</h2><p class=soft>{escape(f'{sweep.url}, {sweep.measured}, {sweep.workload}')}</p>"
        + table(_COLUMNS, map(sweep_cells, sweep.points), marks_first=False)
        for sweep in sweeps
    )
    body = "".join(
        (
            f"<h1>Goodput of {escape(', '.join(sweep.label for sweep in sweeps))}</h1>",
            f"<p class=soft>{escape(f'{first.workload}; {objectives} of requests.')}</p>",
            f"<div class=tiles>{tiles}</div>",
            f"<h2>Charts</h2><div class=cards>{''.join(map(card, _charts(sweeps)))}</div>",
            tables,
        )
    )
    return page(f"Goodput of {first.label}", body)


def sweep_cells(point: SweepPoint) -> tuple[str, ...]:
    """One rate as a row: rate, attainment and its interval, good requests/s, latencies, throughput."""

    def ms(name: str) -> str:
        value = point.figures[name]
        return "-" if value is None else wording.seconds(value / 1e3)

    return (
        wording.number(point.rate),
        wording.share(point.share),
        f"{wording.share(point.low)} to {wording.share(point.high)}",
        wording.number(_good(point)),
        *map(ms, ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms")),
        wording.number(point.figures["output_throughput"] or 0.0),
        "; ".join((*("saturated",) * point.is_saturated, *point.problems)),
    )


def _good(point: SweepPoint) -> float:
    return point.figures["request_goodput"] or 0.0


def _charts(sweeps: Sequence[Sweep]) -> Iterator[Chart]:
    first = sweeps[0]
    yield _by_rate(
        sweeps, "Attainment", "Requests within both objectives, after the warm-up; hollow points are saturated.",
        lambda point: point.share, target=first.target,
    )  # fmt: skip
    yield _by_rate(sweeps, "Good requests", "Requests per second within both objectives, all counted.", _good)
    for name, of, objective_ms in (
        ("TTFT", lambda point: point.ttft_ms, first.ttft_ms),
        ("TPOT", lambda point: point.tpot_ms, first.tpot_ms),
        ("ITL", lambda point: point.itl_ms, 0.0),
    ):
        yield _distribution(sweeps, name, of, objective_ms)
    for sweep in sweeps:
        if any(point.phases_ms for point in sweep.points):
            yield _budget(sweep)


def _by_rate(
    sweeps: Sequence[Sweep], title: str, note: str, value: Callable[[SweepPoint], float], *, target: float = 0.0
) -> Chart:
    def draw(axes: Any) -> None:
        for color, sweep in zip(SERIES, sweeps, strict=False):
            axes.plot(
                [each.rate for each in sweep.points], list(map(value, sweep.points)), color=color, label=sweep.label
            )
            for fill, is_saturated in ((color, False), (CARD, True)):
                marked = [each for each in sweep.points if each.is_saturated is is_saturated]
                axes.plot([each.rate for each in marked], list(map(value, marked)), "o", color=color, mfc=fill)
        if target:
            rule(axes, f"target {wording.share(target)}", y=target)
            axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        axes.set(xlabel="requests/s")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)

    return Chart(title, svg(draw), note)


def _distribution(
    sweeps: Sequence[Sweep], name: str, of: Callable[[SweepPoint], Sequence[float]], objective_ms: float
) -> Chart:
    """Cumulative shares at the goodput, or at the lowest rate if no rate met the target."""
    shown = [next((each for each in sweep.points if each.rate == sweep.goodput), sweep.points[0]) for sweep in sweeps]

    def draw(axes: Any) -> None:
        for color, sweep, point in zip(SERIES, sweeps, shown, strict=False):
            values = of(point)
            label = f"{sweep.label} at {wording.number(point.rate)}/s"
            axes.plot(values, [n / 100 for n in range(len(values))], color=color, label=label)
        if objective_ms:
            rule(axes, f"objective {objective_ms:g} ms", x=objective_ms)
        highest = max((of(point)[99] for point in shown if len(of(point)) > 99), default=objective_ms)
        axes.set(xlim=(0, max(highest, objective_ms) * 1.1 or 1), xlabel="ms", ylim=(0, 1.02), ylabel="share")
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")

    return Chart(f"{name} at the goodput", svg(draw), "Cumulative share of requests up to the 99th percentile.")


def _budget(sweep: Sweep) -> Chart:
    def draw(axes: Any) -> None:
        left = [0.0] * len(sweep.points)
        colors = [GRID, SOFT, *SERIES]
        for color, (phase, name) in zip(colors, PHASE_NAMES.items(), strict=True):
            values = [point.phases_ms.get(phase, 0.0) for point in sweep.points]
            axes.barh(range(len(values)), values, left=left, color=color, label=name)
            left = [start + value for start, value in zip(left, values, strict=True)]
        axes.set_yticks(range(len(sweep.points)), [f"{wording.number(point.rate)}/s" for point in sweep.points])
        axes.invert_yaxis()
        axes.grid(visible=False)
        axes.set(xlabel="ms per request")

    return Chart(f"Where the time goes: {sweep.label}", svg(draw), "Mean of all requests at each rate.")
