"""``pdserve top``: rates, latencies against their objectives, and workers of a cluster, drawn anew every second."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdserve.deploy.commands.status import fetch, fetch_status, worker_table
from pdserve.router.overview import QUANTILES


def show_top(admin_url: str, console: Console, *, interval_s: float, num_refreshes: int) -> int:
    """Draw until Ctrl-C, or ``num_refreshes`` times if that is not 0.

    Raises:
        DeployError: no router answers at ``admin_url``.
    """
    num_drawn = 0
    with Live(console=console, screen=console.is_terminal and not num_refreshes, auto_refresh=False) as live:
        while True:
            live.update(draw(fetch(admin_url, "overview"), fetch_status(admin_url)), refresh=True)
            num_drawn += 1
            if num_drawn == num_refreshes:
                return 0
            time.sleep(interval_s)


def draw(overview: dict[str, Any], status: dict[str, Any]) -> RenderableType:
    """One picture of the cluster."""
    last, objective = overview["last"], overview["objective"]
    rates = (
        f"{overview['state']}: {overview['in_flight']} in flight, {overview['queued']} queued; "
        f"last {last['window_s']:.0f} s: {last['requests_per_s']:.1f} requests/s arrived, "
        f"{last['ended_per_s']:.1f} ended, {last['good_per_s']:.1f} of them good, {last['tokens_per_s']:,.0f} tokens/s"
    )
    if overview["num_routers"] > 1:
        rates += f"\nrequests of one of {overview['num_routers']} routers: {', '.join(status['routers'])}"
    table = Table(box=None, pad_edge=False)
    for name in (f"last {last['window_s']:.0f} s", *(f"p{share * 100:.0f}" for share in QUANTILES), "objective"):
        table.add_column(name, no_wrap=True)
    for name in ("ttft", "tpot"):
        limit = objective[f"{name}_s"]
        quantiles = last[f"{name}_s"] or [None] * len(QUANTILES)
        shown = (_coloured(each, each is not None and each > limit, _milliseconds) for each in quantiles)
        table.add_row(name.upper(), *shown, _milliseconds(limit))
    attainment, target = last["attainment"], objective["attainment"]
    missed = attainment is not None and attainment < target
    table.add_row("within both", _coloured(attainment, missed, "{:.1%}".format), "", "", f"{target:.0%}")
    causes = ", ".join(f"{name.upper()} by {cause} {count:.0f}" for name, cause, count in last["misses"])
    return Group(rates, "", table, f"misses: {causes or '-'}", "", worker_table(status["workers"]))


def _coloured(value: float | None, is_bad: bool, show: Callable[[float], str]) -> Text:
    return Text("-") if value is None else Text(show(value), "red" if is_bad else "green")


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
