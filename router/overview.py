"""What the page and `pdserve top` show: rates, latencies against their objectives, workers, links and failures.

The router's counters are sampled every second. Latencies are quantiles of a window, from the histograms, as Prometheus
would compute them. Makes no decisions.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import defaultdict, deque
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
from prometheus_client import Counter

from pdserve.contracts import metrics as names
from pdserve.contracts.deployment import SloConfig
from pdserve.router.cluster.cluster import Cluster
from pdserve.router.cluster.remote_worker import RemoteWorker

SAMPLE_S = 1.0
WINDOW_S, LONG_WINDOW_S = 60.0, 900.0
"""Windows of what is said to be so now, and of the trend."""
POINT_S = 5.0
"""Seconds between points of the trend."""
QUANTILES = (0.5, 0.9, 0.99)


class Sample(NamedTuple):
    """Counters at one instant."""

    time_s: float
    num_accepted: int
    num_tokens: int
    num_asked: float
    """Requests with a verdict."""
    num_good: float
    """Of them, those within both objectives."""
    ttft: array[int]
    """Cumulative count of each bucket, the last of all values."""
    tpot: array[int]
    misses: dict[tuple[str, str], float]
    """Missed objectives by objective and cause."""


class Overview:
    """Samples of one router."""

    def __init__(self, cluster: Cluster, slo: SloConfig, model: str) -> None:
        self._cluster, self._metrics = cluster, cluster.metrics
        self._slo = slo
        self._model = model
        self._samples: deque[Sample] = deque()
        self.points: deque[dict[str, Any]] = deque(maxlen=int(LONG_WINDOW_S / POINT_S))
        """The trend: figures of the window at intervals of `POINT_S`, the newest last; JSON."""
        self._shown: msgspec.Raw | None = None
        self.sampled = asyncio.Condition()
        """Notified after each sample and at the end."""
        self.is_over = False

    async def sample_forever(self) -> None:
        """Sample until cancelled."""
        try:
            while True:
                self.sample(time.monotonic())
                async with self.sampled:
                    self.sampled.notify_all()
                await asyncio.sleep(SAMPLE_S)
        finally:
            self.is_over = True
            async with self.sampled:
                self.sampled.notify_all()

    def sample(self, now_s: float) -> None:
        """Take a sample; forget those that are older than the long window."""
        self._shown = None
        metrics = self._metrics
        verdicts = _values(metrics[names.SLO_REQUESTS])
        misses: defaultdict[tuple[str, str], float] = defaultdict(float)
        for (_, objective, cause), count in _values(metrics[names.SLO_MISSES]).items():
            misses[objective, cause] += count
        self._samples.append(
            Sample(
                now_s,
                self._cluster.dispatcher.num_accepted,
                metrics.num_output_tokens,
                sum(verdicts.values()),
                sum(value for (_, ttft, tpot), value in verdicts.items() if ttft == "met" and tpot in ("met", "none")),
                array("Q", metrics[names.TTFT_SECONDS].labels().cumulative),
                array("Q", metrics[names.TPOT_SECONDS].labels().cumulative),
                misses,
            )
        )
        while now_s - self._samples[0].time_s > LONG_WINDOW_S + SAMPLE_S:
            self._samples.popleft()
        if not self.points or now_s - self.points[-1]["at_s"] >= POINT_S - SAMPLE_S / 2:
            self.points.append(self._point())

    @property
    def shown(self) -> msgspec.Raw:
        """The state as JSON, of when it was first looked at since the last sample: one for all viewers."""
        if self._shown is None:
            self._shown = msgspec.Raw(msgspec.json.encode(self.now()))
        return self._shown

    def now(self) -> dict[str, Any]:
        """The newest state; JSON. Shares and quantiles are null where nothing was measured."""
        dispatcher, cluster = self._cluster.dispatcher, self._cluster
        state = "draining" if dispatcher.admission.is_draining else "ready" if cluster.is_ready else "not ready"
        long = self._window(LONG_WINDOW_S)
        return {
            "model": self._model,
            "state": state,
            "num_routers": dispatcher.replicas.num,
            "in_flight": dispatcher.num_in_flight,
            "queued": dispatcher.num_queued,
            "objective": {
                "ttft_s": self._slo.ttft_seconds,
                "tpot_s": self._slo.tpot_seconds,
                "attainment": self._slo.attainment,
            },
            "last": self._point(),
            "long": {"window_s": long.seconds, "attainment": long.attainment},
            "workers": [_worker(worker) for _, worker in sorted(cluster.workers.items())],
            "links": [
                [*pair, count, self._metrics.transports.get(pair, "")]
                for pair, count in sorted(dispatcher.attempts.links().items())
            ],
            "failures": [each._asdict() for each in self._metrics.failures],
        }

    def _point(self) -> dict[str, Any]:
        window = self._window(WINDOW_S)
        return {
            "at_s": self._samples[-1].time_s,
            "window_s": window.seconds,
            "requests_per_s": window.rate("num_accepted"),
            "ended_per_s": window.rate("num_asked"),
            "good_per_s": window.rate("num_good"),
            "tokens_per_s": window.rate("num_tokens"),
            "attainment": window.attainment,
            "misses": window.misses,
            "ttft_s": window.quantiles("ttft", names.TTFT_SECONDS.buckets),
            "tpot_s": window.quantiles("tpot", names.TPOT_SECONDS.buckets),
        }

    def _window(self, seconds: float) -> Window:
        last = self._samples[-1]
        # Samples are taken a little more than a second apart.
        first = next(each for each in self._samples if last.time_s - each.time_s <= seconds + SAMPLE_S / 2)
        return Window(first, last)


class Window(NamedTuple):
    """What happened between two samples."""

    first: Sample
    last: Sample

    @property
    def seconds(self) -> float:
        return self.last.time_s - self.first.time_s

    @property
    def attainment(self) -> float | None:
        """Share of requests within both objectives; None without requests."""
        num_asked = self.last.num_asked - self.first.num_asked
        return (self.last.num_good - self.first.num_good) / num_asked if num_asked else None

    @property
    def misses(self) -> list[tuple[str, str, float]]:
        """Objective, cause and number of misses, the most first."""
        counts = [(*each, count - self.first.misses[each]) for each, count in self.last.misses.items()]
        return sorted((each for each in counts if each[-1]), key=lambda each: -each[-1])

    def rate(self, field: str) -> float:
        """Growth per second; 0 with one sample."""
        growth: float = getattr(self.last, field) - getattr(self.first, field)
        return growth / self.seconds if self.seconds else 0.0

    def quantiles(self, field: str, bounds: tuple[float, ...]) -> list[float] | None:
        """`QUANTILES` of a histogram's new values, linear within a bucket, at most its last bound."""
        before, after = getattr(self.first, field), getattr(self.last, field)
        *counts, total = (new - old for old, new in zip(before, after, strict=True))
        if not total:
            return None
        edges = [(0.0, 0.0), *zip(bounds, counts, strict=True)]
        return [_quantile(edges, share * total) for share in QUANTILES]


def _quantile(edges: list[tuple[float, float]], rank: float) -> float:
    for (low, below), (high, upto) in pairwise(edges):
        if upto >= rank:
            return low + (high - low) * (rank - below) / (upto - below)
    return edges[-1][0]


def _values(counter: Counter) -> dict[tuple[str, ...], float]:
    """Counts by the values of the labels, in their order."""
    return {tuple(each.labels.values()): each.value for family in counter.collect() for each in family.samples}


def _worker(worker: RemoteWorker) -> dict[str, Any]:
    load = worker.load
    return {
        "id": worker.worker_id,
        "role": worker.role.value,
        "host": worker.host,
        "state": "down" if not worker.is_up else "draining" if worker.is_draining else "up",
        "running": load.num_running,
        "waiting": load.num_waiting,
        "parked": load.num_parked,
        "max_running": worker.max_batch_size,
        "step_s": worker.step_s,
        "blocks_used": load.num_blocks_referenced,
        "blocks_cached": load.num_blocks_cached,
        "blocks": load.num_blocks_free + load.num_blocks_cached + load.num_blocks_referenced,
        "tier_failure": load.tier_failure,
    }
