"""``pdserve top``: rates, latencies against their objectives, and workers of a cluster, drawn anew every second.

Reads the admin port only. Latencies are those of the last minute, from the router's histograms, as Prometheus would
compute them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdserve.contracts import metrics
from pdserve.contracts.errors import DeployError
from pdserve.deploy.cluster.folder import admin_headers
from pdserve.deploy.commands.status import fetch_status, worker_table

WINDOW_S = 60.0
_TIMEOUT_S = 5.0
_QUANTILES = (0.5, 0.9, 0.99)


class Sample(NamedTuple):
    """All series of the router at one instant."""

    time_s: float
    values: dict[tuple[str, frozenset[tuple[str, str]]], float]
    """By name and labels, as in the text format: counters end in ``_total``."""


def read_sample(text: str, time_s: float) -> Sample:
    """Parse Prometheus' text format."""
    families = text_string_to_metric_families(text)
    return Sample(
        time_s,
        {(each.name, frozenset(each.labels.items())): each.value for family in families for each in family.samples},
    )


class Window:
    """Samples of the last `WINDOW_S` seconds."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()

    def add(self, sample: Sample) -> None:
        """Add the newest sample; forgets all earlier ones after a restart of the router, which counts from 0."""
        accepted = (f"{metrics.ACCEPTED.name}_total", frozenset[tuple[str, str]]())
        if self._samples and sample.values.get(accepted, 0) < self._samples[-1].values.get(accepted, 0):
            self._samples.clear()
        self._samples.append(sample)
        while len(self._samples) > 2 and sample.time_s - self._samples[1].time_s >= WINDOW_S:
            self._samples.popleft()

    @property
    def seconds(self) -> float:
        return self._samples[-1].time_s - self._samples[0].time_s

    def gauge(self, metric: metrics.Metric, **labels: str) -> float:
        """Newest value."""
        return self._samples[-1].values.get((metric.name, frozenset(labels.items())), 0.0)

    def increase(self, name: str, **labels: str) -> float:
        """Growth of all series of ``name`` with these labels."""
        wanted, last, first = labels.items(), self._samples[-1].values, self._samples[0].values
        return sum(
            value - first.get(series, 0.0)
            for series, value in last.items()
            if series[0] == name and wanted <= dict(series[1]).items()
        )

    def rate(self, name: str, **labels: str) -> float:
        """`increase` per second; 0 with one sample."""
        return self.increase(name, **labels) / self.seconds if self.seconds else 0.0

    def quantile(self, metric: metrics.Metric, share: float) -> float | None:
        """Quantile of a histogram's new values, linear within a bucket, at most its last bound; None without values."""
        counts = [self.increase(f"{metric.name}_bucket", le=_bound(each)) for each in metric.buckets or ()]
        total = self.increase(f"{metric.name}_count")
        if not total:
            return None
        edges = [(0.0, 0.0), *zip(metric.buckets or (), counts, strict=True)]
        for (low, below), (high, upto) in pairwise(edges):
            if upto >= share * total:
                return low + (high - low) * (share * total - below) / (upto - below)
        return edges[-1][0]


def _bound(bucket: float) -> str:
    """Label ``le`` of a bucket."""
    return str(float(bucket))


def show_top(admin_url: str, console: Console, *, interval_s: float, num_refreshes: int) -> int:
    """Draw until Ctrl-C, or ``num_refreshes`` times if that is not 0.

    Raises:
        DeployError: no router answers at ``admin_url``.
    """
    window, num_drawn = Window(), 0
    with Live(console=console, screen=console.is_terminal and not num_refreshes, auto_refresh=False) as live:
        while True:
            window.add(read_sample(_fetch_metrics(admin_url), time.monotonic()))
            live.update(draw(window, fetch_status(admin_url)), refresh=True)
            num_drawn += 1
            if num_drawn == num_refreshes:
                return 0
            time.sleep(interval_s)


def draw(window: Window, status: dict[str, Any]) -> RenderableType:
    """One picture of the cluster."""
    verdicts = f"{metrics.SLO_REQUESTS.name}_total"
    num_asked = window.increase(verdicts)
    num_good = sum(window.increase(verdicts, ttft="met", tpot=tpot) for tpot in ("met", "none"))
    target = window.gauge(metrics.SLO_ATTAINMENT)
    attainment = num_good / num_asked if num_asked else None
    state = "draining" if status["draining"] else "ready" if status["ready"] else "not ready"
    rates = (
        f"{state}: {status['in_flight']} in flight, {status['queued']} queued; "
        f"{window.rate(f'{metrics.ACCEPTED.name}_total'):.1f} requests/s, "
        f"{num_good / window.seconds if window.seconds else 0:.1f} good requests/s, "
        f"{window.rate(f'{metrics.OUTPUT_TOKENS.name}_total'):,.0f} tokens/s"
    )
    table = Table(box=None, pad_edge=False)
    for name in (f"last {window.seconds:.0f} s", *(f"p{share * 100:.0f}" for share in _QUANTILES), "objective"):
        table.add_column(name, no_wrap=True)
    for name, metric in (("ttft", metrics.TTFT_SECONDS), ("tpot", metrics.TPOT_SECONDS)):
        limit = window.gauge(metrics.SLO_SECONDS, objective=name)
        found = [window.quantile(metric, share) for share in _QUANTILES]
        shown = (_coloured(each, each is not None and each > limit, _milliseconds) for each in found)
        table.add_row(name.upper(), *shown, _milliseconds(limit))
    missed = attainment is not None and attainment < target
    table.add_row("within both", _coloured(attainment, missed, "{:.1%}".format), "", "", f"{target:.0%}")
    return Group(rates, "", table, "", worker_table(status["workers"]))


def _coloured(value: float | None, is_bad: bool, show: Callable[[float], str]) -> Text:
    return Text("-") if value is None else Text(show(value), "red" if is_bad else "green")


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _fetch_metrics(admin_url: str) -> str:
    try:
        url, headers = f"{admin_url.rstrip('/')}/metrics", admin_headers(admin_url)
        return httpx.get(url, headers=headers, timeout=_TIMEOUT_S, trust_env=False).raise_for_status().text
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DeployError(f"no metrics at {admin_url}: {error}; check --admin-url and PDSERVE_ADMIN_TOKEN") from error
