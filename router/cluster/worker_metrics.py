"""Series of one worker in the router's metrics, from the load that its frames report."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from prometheus_client import Counter, Gauge

from pdserve.contracts import metrics as names
from pdserve.contracts.events import SchedulerLoad
from pdserve.contracts.worker_config import WorkerRole
from pdserve.proto.v1 import worker_pb2
from pdserve.router.metrics import RouterMetrics

Family = TypeVar("Family", Counter, Gauge)


class WorkerMetrics:
    """Series of one worker. Steps are counted with every frame; the rest is that of the last frame before a scrape."""

    def __init__(
        self, metrics: RouterMetrics, worker_id: str, role: WorkerRole, before: WorkerMetrics | None = None
    ) -> None:
        """``before``: those of the worker until now, when it had another role. What they have counted is not counted
        again."""
        self._metrics = metrics
        self._series: list[tuple[Counter | Gauge, tuple[str, ...]]] = []

        def series(family: Family, *more_labels: str) -> Family:
            labels = (worker_id, role.value, *more_labels)
            self._series.append((family, labels))
            return family.labels(*labels)

        self._limits = {each: series(metrics[names.WORKER_LIMITS], each) for each in ("sequences", "tokens")}
        self._up = series(metrics[names.WORKER_UP])
        self._ranks = series(metrics[names.WORKER_RANKS])
        self._price = series(metrics[names.WORKER_PRICE])
        self._busy = [series(metrics[names.WORKER_BUSY_SECONDS], kind) for kind in names.STEP_KINDS]
        self._predicted_busy = [series(metrics[names.WORKER_PREDICTED_BUSY_SECONDS], kind) for kind in names.STEP_KINDS]
        self._busy_s, self._predicted_busy_s = [0.0, 0.0], [0.0, 0.0]
        """Since the last scrape, by kind of step."""
        self._steps = [metrics[names.STEP_SECONDS].labels(role.value, kind) for kind in names.STEP_KINDS]
        self._predicted_steps = [
            metrics[names.PREDICTED_STEP_SECONDS].labels(role.value, kind) for kind in names.STEP_KINDS
        ]
        self._step_tokens = metrics[names.STEP_TOKENS].labels(role.value)
        self._gauges = {
            "num_running": series(metrics[names.RUNNING]),
            "num_waiting": series(metrics[names.WAITING]),
            "num_parked": series(metrics[names.PARKED]),
            "num_blocks_free": series(metrics[names.KV_BLOCKS], "free"),
            "num_blocks_cached": series(metrics[names.KV_BLOCKS], "cached"),
        }
        self._tier_off = series(metrics[names.TIER_OFF])
        self._referenced = series(metrics[names.KV_BLOCKS], "referenced")
        self._parked = series(metrics[names.KV_BLOCKS], "parked")
        self._totals = {
            "num_preemptions": series(metrics[names.PREEMPTIONS]),
            "num_swap_outs": series(metrics[names.SWAP_OUTS]),
            "num_swap_ins": series(metrics[names.SWAP_INS]),
            "num_guesses": series(metrics[names.GUESSES]),
            "num_right_guesses": series(metrics[names.RIGHT_GUESSES]),
            "num_restored_tokens": series(metrics[names.RESTORED_TOKENS]),
            "restore_saved_s": series(metrics[names.RESTORE_SAVED_SECONDS]),
            "num_restores": series(metrics[names.RESTORES]),
            "num_restores_given_up": series(metrics[names.RESTORES_GIVEN_UP]),
        }
        self._load: SchedulerLoad = before._load if before else SchedulerLoad()
        self._scraped: SchedulerLoad = before._scraped if before else SchedulerLoad()
        metrics.workers.add(self)

    def came_up(self, welcome: worker_pb2.Welcome, usd_per_hour: float | None) -> None:
        """``usd_per_hour``: price of one rank's device, if known."""
        # A pipeline has as many micro-batches, each with series of its own, as stages: each counts the ranks of one.
        num_ranks = welcome.tensor_parallel or 1
        self._up.set(1)
        self._ranks.set(num_ranks)
        self._price.set(0.0 if usd_per_hour is None else num_ranks * usd_per_hour)
        self._limits["sequences"].set(welcome.max_batch_size)
        self._limits["tokens"].set(welcome.max_batch_tokens)

    def went_down(self) -> None:
        """What it held is gone; its totals stay, in case only the session was lost."""
        self._load = SchedulerLoad(**{field: getattr(self._load, field) for field in self._totals})
        self._up.set(0)
        self._ranks.set(0)

    def observe(self, load: SchedulerLoad, steps: Iterable[worker_pb2.Step] = ()) -> None:
        self._load = load
        for step in steps:
            self._busy_s[step.has_prefill] += step.seconds
            self._predicted_busy_s[step.has_prefill] += step.predicted_s
            self._steps[step.has_prefill].observe(step.seconds)
            self._predicted_steps[step.has_prefill].observe(step.predicted_s)
            self._step_tokens.observe(step.num_tokens)

    def refresh(self) -> None:
        """Write what has happened since the last call to the series."""
        load = self._load
        for field, gauge in self._gauges.items():
            gauge.set(getattr(load, field))
        num_parked = min(load.num_blocks_parked, load.num_blocks_referenced)
        self._parked.set(num_parked)
        self._tier_off.set(bool(load.tier_failure))
        self._referenced.set(load.num_blocks_referenced - num_parked)
        for field, counter in self._totals.items():
            counter.inc(max(0, getattr(load, field) - getattr(self._scraped, field)))
        self._scraped = load
        for kind in range(len(names.STEP_KINDS)):
            self._busy[kind].inc(self._busy_s[kind])
            self._predicted_busy[kind].inc(self._predicted_busy_s[kind])
            self._busy_s[kind] = self._predicted_busy_s[kind] = 0.0

    def remove(self) -> None:
        """Remove the series of a worker that is no longer a target."""
        self._metrics.workers.remove(self)
        for family, labels in self._series:
            family.remove(*labels)
