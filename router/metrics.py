"""Metrics of the router: the families that `pdserve.contracts.metrics` declares.

One `RouterMetrics` per process; the dispatcher, the cluster and the HTTP edge write to it, the admin port reads it.
Names, help texts, labels and buckets live only in the contracts. Makes no decisions.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from itertools import product
from typing import TYPE_CHECKING, NamedTuple, overload

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics

from pdserve.contracts import metrics as names
from pdserve.contracts.deployment import DEFAULT_TIER, SloConfig
from pdserve.contracts.request import Outcome
from pdserve.contracts.worker_config import WorkerRole, whole_worker_id
from pdserve.proto.v1 import worker_pb2
from pdserve.router.plain_histogram import PlainHistogram
from pdserve.router.record import RequestRecord
from pdserve.router.requests.dispatch import Dispatcher
from pdserve.router.requests.journey import GAP_CAUSE, TPOT_CAUSES, TTFT_CAUSES, tpot_parts_s
from pdserve.router.requests.observer import DispatchObserver
from pdserve.router.requests.request import Request, RequestSpec

if TYPE_CHECKING:
    from pdserve.router.cluster.worker_metrics import WorkerMetrics

ABORTED = "aborted"
"""`PullDone.failure_stage` of a pull whose request ended meanwhile, which is no failure."""

MAX_LINKS = 1024
"""Pairs of workers with series of their own; pulls of further pairs count as those of ``other``."""

MAX_FAILURES = 20


class Failure(NamedTuple):
    """Failures of one kind in a row."""

    time: float
    """Of the last one, in seconds since 1970."""
    text: str
    times: int


class RouterMetrics(DispatchObserver):
    """Every metric family of the router process; counts the events of the dispatcher and the HTTP edge."""

    def __init__(self, slo: SloConfig | None = None, *, has_workers: bool = True) -> None:
        """``has_workers``: whether `registry` has what workers report, which one of several routers shows."""
        # They would double the number of series, and nothing reads them.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry, unseen = CollectorRegistry(), CollectorRegistry()
        self._families: dict[names.Metric, Counter | Gauge | PlainHistogram] = {}
        for metric in names.FAMILIES:
            is_shown = has_workers or metric not in names.OF_WORKERS
            self._families[metric] = family = _family(metric, self.registry if is_shown else unseen)
            if isinstance(metric.labels, Mapping):
                for values in product(*metric.labels.values()):
                    family.labels(*values)
        self.itl_seconds = self[names.ITL_SECONDS].labels()
        """Of every later token, after the one before it."""
        self._dispatcher: Dispatcher | None = None
        self._slo = slo or SloConfig()
        self.workers: set[WorkerMetrics] = set()
        """Of all targets."""
        self._num_scraped_tokens = 0
        self.failures: deque[Failure] = deque(maxlen=MAX_FAILURES)
        """Requests that failed and workers that were lost, in words, the newest last."""
        self.transports: dict[tuple[str, str], str] = {}
        """Of the last pull by pair of source and decode worker; empty if none succeeded."""
        for tier in (DEFAULT_TIER, *self._slo.tiers):
            self._begin(tier)
        self[names.SLO_ATTAINMENT].set(self._slo.attainment)

    @overload
    def __getitem__(self, metric: names.Counter) -> Counter: ...
    @overload
    def __getitem__(self, metric: names.Gauge) -> Gauge: ...
    @overload
    def __getitem__(self, metric: names.Histogram) -> PlainHistogram: ...
    def __getitem__(self, metric: names.Metric) -> Counter | Gauge | PlainHistogram:
        """Family of a metric of the contract."""
        return self._families[metric]

    def _begin(self, tier: str) -> None:
        """Write the objectives of a tier, and begin its series."""
        objectives, slo = self[names.SLO_SECONDS], self._slo.tier(tier)
        objectives.labels(tier, "ttft").set(slo.ttft_seconds)
        objectives.labels(tier, "tpot").set(slo.tpot_seconds)
        if slo.max_gap_seconds:
            objectives.labels(tier, "max_gap").set(slo.max_gap_seconds)
        for objective, causes in (("ttft", TTFT_CAUSES), ("tpot", (*TPOT_CAUSES, GAP_CAUSE))):
            for cause in causes:
                self[names.SLO_MISSES].labels(tier, objective, cause)
        verdicts = product(("met", "missed"), ("met", "missed", "none"))
        for ttft, tpot in (*verdicts, ("failed", "failed"), ("refused", "refused")):
            self[names.SLO_REQUESTS].labels(tier, ttft, tpot)

    def track(self, dispatcher: Dispatcher) -> None:
        """Read the dispatcher's gauges at every scrape."""
        self._dispatcher = dispatcher

    def accepted(self, spec: RequestSpec) -> None:
        self[names.ACCEPTED].inc()
        self[names.PROMPT_TOKENS].inc(len(spec.prompt_tokens))
        if not spec.is_probe:
            self[names.REQUEST_PROMPT_TOKENS].observe(len(spec.prompt_tokens))

    def refused(self, tier: str) -> None:
        self[names.SLO_REQUESTS].labels(tier, "refused", "refused").inc()

    def placed(self, policy: str, role: WorkerRole, *, is_late: bool) -> None:
        self[names.PLACEMENTS].labels(policy, role.value, "late" if is_late else "on_time").inc()

    def routed(self, seconds: float) -> None:
        self[names.ROUTE_SECONDS].observe(seconds)

    def prompt_started(self, num_cached_tokens: int) -> None:
        self[names.CACHED_PROMPT_TOKENS].inc(num_cached_tokens)

    def pull_started(self, num_cached_tokens: int) -> None:
        self[names.CACHED_PULL_TOKENS].inc(num_cached_tokens)

    def fell_back(self, reason: str) -> None:
        self[names.FALLBACKS].labels(reason).inc()

    def retried(self, reason: str, num_tokens: int) -> None:
        self[names.REDISPATCHES].labels(reason).inc()
        self[names.REPLAYED_TOKENS].labels(reason).inc(num_tokens)

    def ended(self, request: Request) -> None:
        assert request.outcome is not None
        self[names.OUTCOMES].labels(request.outcome.value).inc()
        for journey in request.journeys:
            for span in journey.spans:
                self[names.PHASE_SECONDS].labels(span.phase).observe(span.seconds)
            if journey.stall_s:
                self[names.HANDOFF_STALL_SECONDS].observe(journey.stall_s)
        error = request.error
        if error is not None and error.status != 400 and not request.spec.is_probe:
            self.failed(f"{error.status}: {error.message}")

    def planned(self, goodput: Mapping[str, float], workers: Mapping[WorkerRole, int]) -> None:
        """A planner has compared placements.

        Args:
            goodput: requests per second of the ``running`` and the ``best`` one.
            workers: of the best one.
        """
        for placement, rate in goodput.items():
            self[names.PLAN_GOODPUT].labels(placement).set(rate)
        for role in WorkerRole:
            self[names.PLAN_WORKERS].labels(role.value).set(workers.get(role, 0))

    def failed(self, text: str) -> None:
        """Note a failure in words."""
        last = self.failures.pop() if self.failures and self.failures[-1].text == text else None
        self.failures.append(Failure(time.time(), text, last.times + 1 if last else 1))

    def observe_prefix(self, report: worker_pb2.TransferReport, source: WorkerRole, prefill_s: float) -> None:
        """Record one pull of a prefix, of ``prefill_s`` to compute, from a worker of role ``source``."""
        self[names.PREFIX_TOKENS].labels(source.value).inc(report.num_tokens)
        self[names.PREFIX_SAVED_SECONDS].labels(source.value).inc(max(0.0, prefill_s - report.seconds))
        if report.failure_stage not in ("", ABORTED):
            self[names.PREFIX_FAILURES].labels(source.value).inc()

    def observe_transfer(self, report: worker_pb2.TransferReport, source: str, worker: str) -> None:
        """Record one pull from ``source``, as reported by the decode worker ``worker``."""
        link = source, worker
        if link not in self.transports:
            if len(self.transports) >= MAX_LINKS:
                link = "other", "other"
            self.transports[link] = ""
        pulls = {
            result: self[names.LINK_PULLS].labels(*link, result) for result in ("done", "ended", ABORTED, "failed")
        }
        if report.failure_stage == ABORTED:
            pulls[ABORTED].inc()
        elif report.failure_stage:
            self[names.TRANSFER_FAILURES].labels(report.failure_stage, report.transport or names.NO_TRANSPORT).inc()
            pulls["failed"].inc()
        elif report.ended_request:
            pulls["ended"].inc()
        else:
            pulls["done"].inc()
            self.transports[link] = report.transport
            self[names.LINK_BYTES].labels(*link).inc(report.bytes)
            self[names.LINK_SECONDS].labels(*link).inc(report.seconds)
            self[names.TRANSFER_SECONDS].labels(report.transport).observe(report.seconds)
            self[names.TRANSFER_BYTES].labels(report.transport).observe(report.bytes)

    # The HTTP edge

    def responded(self, route: str, code: int) -> None:
        """A request was answered with HTTP status ``code``.

        Args:
            route: path of the route, such as ``/v1/chat/completions``, or ``other`` if none matched.
            code: 499 if the client left before a status was sent.
        """
        self[names.REQUESTS].labels(route, str(code)).inc()

    def tenant_served(self, tenant: str, *, is_good: bool) -> None:
        """Count a request of ``tenant``; ``is_good`` if it met both objectives."""
        self[names.TENANT_REQUESTS].labels(tenant or names.NO_TENANT, "good" if is_good else "bad").inc()

    @property
    def num_output_tokens(self) -> int:
        """Tokens sent to clients."""
        return sum(self[names.TTFT_SECONDS].labels().counts) + sum(self.itl_seconds.counts)

    def token(self, record: RequestRecord, choice: int) -> None:
        """The next token of ``choice`` was handed over."""
        gap_s = record.token(choice)
        if gap_s is None:
            self[names.TTFT_SECONDS].observe(record.journeys[choice].first_s - record.arrived_s, record.id)
        else:
            self.itl_seconds.observe(gap_s)

    def answered(self, record: RequestRecord) -> None:
        """All tokens of an answer were handed over; not called if the client left or the generation failed, which
        `served` counts. Counts the verdict of each objective: ``met`` or ``missed``, or ``none`` for the TPOT of a
        one-token answer, and why one was missed."""
        record.answered()
        self[names.REQUEST_SECONDS].observe(record.answer_s)
        self[names.REQUEST_OUTPUT_TOKENS].observe(record.num_tokens)
        tpot_s = record.tpot_s
        if tpot_s is not None:
            self[names.TPOT_SECONDS].observe(tpot_s, record.id)
        for journey in record.first_journeys:
            if journey.token_s:
                self[names.PHASE_SECONDS].labels("first_write").observe(journey.phase_s("first_write"))
            if journey.predicted_ttft_s:
                self[names.PREDICTED_TTFT_SECONDS].observe(journey.predicted_ttft_s)
            if journey.num_gaps and journey.predicted_tpot_s:
                self[names.PREDICTED_TPOT_SECONDS].observe(journey.predicted_tpot_s)
            if journey.num_gaps:
                for part, seconds in tpot_parts_s(journey, record.write_s).items():
                    self[names.TPOT_PART_SECONDS].labels(part).observe(seconds / journey.num_gaps)
        misses = record.misses(self._slo.tier(record.tier))
        ttft = "missed" if "ttft" in misses else "met"
        tpot = "missed" if "tpot" in misses else "none" if tpot_s is None else "met"
        self[names.SLO_REQUESTS].labels(record.tier, ttft, tpot).inc()
        for objective, cause in misses.items():
            self[names.SLO_MISSES].labels(record.tier, objective, cause).inc()

    def served(self, record: RequestRecord) -> None:
        """A request is over. Counts whether it was good to its tenant: it met both objectives; and the verdict
        ``failed`` of one whose generation failed."""
        if record.outcome is Outcome.FAILED and not record.is_answered:
            self[names.SLO_REQUESTS].labels(record.tier, "failed", "failed").inc()
        is_good = record.is_good(self._slo.tier(record.tier))
        if is_good is not None:
            self.tenant_served(record.tenant, is_good=is_good)

    def refresh(self) -> None:
        """Bring the series up to date. What they are made from changes in the event loop only, so this is called there,
        before `registry` is written by any thread."""
        for worker in self.workers:
            worker.refresh()
        num_tokens = self.num_output_tokens
        self[names.OUTPUT_TOKENS].inc(num_tokens - self._num_scraped_tokens)
        self._num_scraped_tokens = num_tokens
        if self._dispatcher is None:
            return
        workers = self._dispatcher.workers.values()
        for role in WorkerRole:
            ids = {whole_worker_id(worker.worker_id) for worker in workers if worker.role is role}
            self[names.READY_WORKERS].labels(role.value).set(len(ids))
        ages_s = self._dispatcher.attempts.handoff_ages_s(time.monotonic())
        self[names.OLDEST_HANDOFF_SECONDS].set(max(ages_s, default=0.0))
        for age, (low_s, high_s) in names.HANDOFF_AGES_S.items():
            self[names.WAITING_HANDOFFS].labels(age).set(sum(low_s <= age_s < high_s for age_s in ages_s))
        self[names.IN_FLIGHT].set(self._dispatcher.num_in_flight)
        self[names.QUEUED].set(self._dispatcher.num_queued)


def _family(metric: names.Metric, registry: CollectorRegistry) -> Counter | Gauge | PlainHistogram:
    if isinstance(metric, names.Histogram):
        return PlainHistogram(metric, registry)
    declared = metric.name, metric.help, tuple(metric.labels)
    if isinstance(metric, names.Counter):
        return Counter(*declared, registry=registry)
    return Gauge(*declared, registry=registry)
