"""Histograms of the event loop: counts in plain lists, for a fifth of the cost of prometheus_client's.

Written in the event loop alone, without locks; read by any thread.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import Exemplar, HistogramMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

from pdserve.contracts.metrics import Histogram

MAX_EXEMPLAR_CHARS = 100
"""The format has room for 128 characters, names included."""


class PlainSeries:
    """Observations with the same labels."""

    __slots__ = ("_bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """By bucket, not cumulative; the last one is of values above all bounds."""
        self.exemplars: list[Exemplar | None] = [None] * len(self.counts)
        """By bucket: the last request that had a name."""
        self.total = 0.0

    def observe(self, value: float, request_id: str = "") -> None:
        bucket = bisect_left(self._bounds, value)
        self.counts[bucket] += 1
        self.total += value
        if request_id:
            self.exemplars[bucket] = Exemplar({"request_id": request_id[:MAX_EXEMPLAR_CHARS]}, value, time.time())

    @property
    def cumulative(self) -> list[int]:
        return list(accumulate(self.counts.copy()))


class PlainHistogram(Collector):
    """A histogram family of a registry."""

    def __init__(self, metric: Histogram, registry: CollectorRegistry) -> None:
        self._metric = metric
        self._series: dict[tuple[str, ...], PlainSeries] = {}
        self._bounds = [*map(floatToGoString, metric.buckets), "+Inf"]
        if not metric.labels:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> PlainSeries:
        """The series of these values, in the order of the labels."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = PlainSeries(self._metric.buckets)
        return series

    def observe(self, value: float, request_id: str = "") -> None:
        """Of a family without labels."""
        self.labels().observe(value, request_id)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._metric.name, self._metric.help, labels=tuple(self._metric.labels))
        for values, series in self._series.copy().items():
            buckets = list(zip(self._bounds, series.cumulative, series.exemplars, strict=True))
            family.add_metric(values, buckets, series.total)  # type: ignore[arg-type]  # it may be None
        yield family
