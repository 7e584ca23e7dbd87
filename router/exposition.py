"""Counters, gauges and histograms, and their text for Prometheus.

A stand-in for ``prometheus_client``, which takes 100 ms of the router's event loop to write the series of 64 workers:
here the text of each series' name and labels is made once, when the series is. Not thread-safe: one event loop writes
and renders.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

from pdserve.contracts.metrics import Metric

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
"""Content types. The second format has exemplars."""


class Exemplar(NamedTuple):
    """A request that fell into a bucket."""

    request_id: str
    value: float
    time: float
    """Seconds since 1970."""


class Counter:
    """A sum that only grows."""

    __slots__ = ("_name", "value")

    def __init__(self, metric: Metric, labels: str) -> None:
        self._name = f"{metric.name}_total{{{labels}}}" if labels else f"{metric.name}_total"
        self.value: float = 0

    def inc(self, amount: float = 1) -> None:
        self.value += amount

    def write(self, lines: list[str], *, exemplars: bool) -> None:
        lines.append(f"{self._name} {self.value}\n")


class Gauge:
    """A value that is set, or read by a function at each scrape."""

    __slots__ = ("_name", "_read", "value")

    def __init__(self, metric: Metric, labels: str) -> None:
        self._name = f"{metric.name}{{{labels}}}" if labels else metric.name
        self._read: Callable[[], float] | None = None
        self.value: float = 0

    def set(self, value: float) -> None:
        self.value = value

    def set_function(self, read: Callable[[], float]) -> None:
        self._read = read

    def write(self, lines: list[str], *, exemplars: bool) -> None:
        lines.append(f"{self._name} {self.value if self._read is None else self._read()}\n")


class Histogram:
    """Counts of observations by bucket."""

    __slots__ = ("_bounds", "_buckets", "_exemplars", "_names", "counts", "sum")

    def __init__(self, metric: Metric, labels: str) -> None:
        self._bounds = metric.buckets
        bounds = [*map(str, map(float, metric.buckets)), "+Inf"]
        comma, braced = ("," if labels else ""), (f"{{{labels}}}" if labels else "")
        self._buckets = [f'{metric.name}_bucket{{{labels}{comma}le="{bound}"}} ' for bound in bounds]
        self._names = f"{metric.name}_count{braced}", f"{metric.name}_sum{braced}"
        self._exemplars: dict[int, Exemplar] = {}
        self.counts = [0] * len(bounds)
        """Observations in each bucket, the last beyond all bounds."""
        self.sum = 0.0

    def observe(self, value: float, request_id: str = "") -> None:
        """Count ``value``, with ``request_id`` as the exemplar of its bucket."""
        index = bisect_left(self._bounds, value)
        self.counts[index] += 1
        self.sum += value
        if request_id:
            self._exemplars[index] = Exemplar(request_id, value, time.time())

    def write(self, lines: list[str], *, exemplars: bool) -> None:
        totals = list(accumulate(self.counts))
        buckets = [f"{name}{total}\n" for name, total in zip(self._buckets, totals, strict=True)]
        if exemplars:
            for index, (request_id, value, time_s) in self._exemplars.items():
                buckets[index] = (
                    f'{buckets[index][:-1]} # {{request_id="{escaped(request_id)}"}} {value} {time_s:.3f}\n'
                )
        lines += buckets
        lines.append(f"{self._names[0]} {totals[-1]}\n{self._names[1]} {self.sum}\n")


Series = TypeVar("Series", Counter, Gauge, Histogram)


class Family(Generic[Series]):
    """Series of one metric by values of its labels."""

    def __init__(self, kind: type[Series], metric: Metric) -> None:
        assert metric.kind == kind.__name__.lower()
        self._make: Callable[[Metric, str], Series] = kind
        self._metric = metric
        self._series: dict[tuple[str, ...], Series] = {}

    def labels(self, *values: str) -> Series:
        """The series of these values, made at its first use."""
        series = self._series.get(values)
        if series is None:
            pairs = zip(self._metric.labels, values, strict=True)
            labels = ",".join(f'{name}="{escaped(value)}"' for name, value in pairs)
            series = self._series[values] = self._make(self._metric, labels)
        return series

    def remove(self, *values: str) -> None:
        """Forget a series."""
        del self._series[values]

    def items(self) -> Iterator[tuple[tuple[str, ...], Series]]:
        """Values of the labels, and the series."""
        yield from self._series.items()

    def write(self, lines: list[str], *, is_open: bool) -> None:
        metric = self._metric
        name = metric.name if is_open or metric.kind != "counter" else f"{metric.name}_total"
        lines.append(f"# HELP {name} {metric.help}\n# TYPE {name} {metric.kind}\n")
        for series in self._series.values():
            series.write(lines, exemplars=is_open)


class Registry:
    """All families of a process."""

    def __init__(self) -> None:
        self._families: list[Family[Counter] | Family[Gauge] | Family[Histogram]] = []

    def counter(self, metric: Metric) -> Family[Counter]:
        family = Family(Counter, metric)
        self._families.append(family)
        return family

    def gauge(self, metric: Metric) -> Family[Gauge]:
        family = Family(Gauge, metric)
        self._families.append(family)
        return family

    def histogram(self, metric: Metric) -> Family[Histogram]:
        family = Family(Histogram, metric)
        self._families.append(family)
        return family

    def render(self, content_type: str = TEXT) -> bytes:
        """Text of all series, in `TEXT` or `OPEN_METRICS`."""
        is_open = content_type == OPEN_METRICS
        lines: list[str] = []
        for family in self._families:
            family.write(lines, is_open=is_open)
        if is_open:
            lines.append("# EOF\n")
        return "".join(lines).encode()


def escaped(value: str) -> str:
    """``value`` between quotes."""
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
