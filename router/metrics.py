"""Metrics of the router, built from `pdserve.contracts.metrics`.

One `RouterMetrics` per process; the dispatcher, the cluster and the HTTP edge write to it, the admin port reads it.
Names, help texts, labels and buckets live only in the contracts. Makes no decisions.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from pdserve.contracts import metrics
from pdserve.contracts.deployment import DEFAULT_TIER, SloConfig
from pdserve.contracts.request import Outcome
from pdserve.contracts.worker_config import TRANSPORTS, WorkerRole, whole_worker_id
from pdserve.proto.v1 import worker_pb2
from pdserve.router.cluster.worker import Worker
from pdserve.router.plain_histogram import PlainHistogram
from pdserve.router.requests.dispatch import Dispatcher
from pdserve.router.requests.interface import DispatchObserver
from pdserve.router.requests.journey import GAP_CAUSE, TPOT_CAUSES, TTFT_CAUSES, Journey, tpot_cause, ttft_cause
from pdserve.router.requests.request import Request, RequestSpec

if TYPE_CHECKING:
    from pdserve.router.cluster.worker_metrics import WorkerMetrics

PHASES = ("tokenise", "queue", "prefill_queue", "prefill", "first_write", "handoff", "decode_queue", "decode")
"""Values of the ``phase`` label.

By the router's clock: ``tokenise``, arrival to acceptance, reading and tokenising the prompt; ``queue``, acceptance to
the first dispatch; ``prefill``, start of the prompt to the attempt's first token; ``first_write``, token 0 received to
written; ``handoff``, that token to the decode worker's join; ``decode``, join (or first token without handoff) to the
last token. Measured by workers: ``prefill_queue`` and ``decode_queue``, receipt to the first chunk and to the
reservation of blocks.
"""

FAILURE_STAGES = ("connect", "refused", "grant", "copy", "verify", "deadline")
"""Values of the ``stage`` label: `PullDone.failure_stage` of pulls that failed."""
ABORTED = "aborted"
"""`PullDone.failure_stage` of a pull whose request ended meanwhile, which is no failure."""
NO_TRANSPORT = "none"
"""``transport`` of a pull that failed before one was chosen."""

RETRY_REASONS = ("cancelled", "expired", "failed", "kv_unavailable", "rebound", "refused", "worker_lost")
"""Values of the ``reason`` label: ``expired``, no decode worker pulled the prompt in time; ``rebound``, another decode
worker pulls it."""

FALLBACK_REASONS = ("no_worker", "no_prefill", "no_decode", "no_room", "cut_off")
"""Values of the ``reason`` label of placements without a free choice: no worker is up; prompts go to decode workers
because no prefill worker is up; no decode worker is up, or none has room; the only ones recently failed to pull, or
failed steps."""

NO_TENANT = "anonymous"
"""Tenant of requests to a router without API keys."""

MAX_LINKS = 1024
"""Pairs of workers with series of their own; pulls of further pairs count as those of ``other``."""

HANDOFF_AGES_S = {"up to 1 s": (0.0, 1.0), "up to 10 s": (1.0, 10.0), "over 10 s": (10.0, inf)}
"""Values of the ``age`` label."""

STEP_KINDS = ("decode", "prefill")
"""Steps whose rows have one new token each, and steps in which some have more."""


MAX_EXEMPLAR_CHARS = 100
MAX_FAILURES = 20


class Failure(NamedTuple):
    """Failures of one kind in a row."""

    time: float
    """Of the last one, in seconds since 1970."""
    text: str
    times: int


Family = TypeVar("Family", Counter, Gauge, Histogram)


class RouterMetrics(DispatchObserver):
    """Every metric family of the router process; counts the events of the dispatcher and the HTTP edge."""

    def __init__(self, slo: SloConfig | None = None, *, has_workers: bool = True) -> None:
        """``has_workers``: whether `registry` has what workers report, which one of several routers shows."""
        # They would double the number of series, and nothing reads them.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        worker_registry = registry if has_workers else CollectorRegistry()
        self._dispatcher: Dispatcher | None = None
        self._slo = slo or SloConfig()
        self.workers: set[WorkerMetrics] = set()
        """Of all targets."""
        self._num_first_tokens = 0
        self._num_scraped_tokens = 0
        self.failures: deque[Failure] = deque(maxlen=MAX_FAILURES)
        """Requests that failed and workers that were lost, in words, the newest last."""

        def family(kind: type[Family], metric: metrics.Metric, shown_in: CollectorRegistry = registry) -> Family:
            assert metric.kind == kind.__name__.lower()
            options: dict[str, Any] = {"buckets": metric.buckets} if metric.buckets else {}
            return kind(metric.name, metric.help, metric.labels, registry=shown_in, **options)

        def worker_family(kind: type[Family], metric: metrics.Metric) -> Family:
            return family(kind, metric, worker_registry)

        self.requests = family(Counter, metrics.REQUESTS)
        self.outcomes = family(Counter, metrics.OUTCOMES)
        self.accepted_requests = family(Counter, metrics.ACCEPTED)
        self.in_flight = family(Gauge, metrics.IN_FLIGHT)
        self.queued = family(Gauge, metrics.QUEUED)
        self.request_seconds = family(Histogram, metrics.REQUEST_SECONDS)
        self.ttft_seconds = family(Histogram, metrics.TTFT_SECONDS)
        self.tpot_seconds = family(Histogram, metrics.TPOT_SECONDS)
        self.itl_seconds = PlainHistogram(metrics.ITL_SECONDS, registry).labels()
        """Of every later token, after the one before it."""
        self.handoff_stall_seconds = family(Histogram, metrics.HANDOFF_STALL_SECONDS)
        self.predicted_ttft_seconds = family(Histogram, metrics.PREDICTED_TTFT_SECONDS)
        self.predicted_tpot_seconds = family(Histogram, metrics.PREDICTED_TPOT_SECONDS)
        self.tpot_part_seconds = family(Histogram, metrics.TPOT_PART_SECONDS)
        self.phase_seconds = family(Histogram, metrics.PHASE_SECONDS)
        self.prompt_tokens = family(Counter, metrics.PROMPT_TOKENS)
        self.cached_prompt_tokens = family(Counter, metrics.CACHED_PROMPT_TOKENS)
        self.cached_pull_tokens = family(Counter, metrics.CACHED_PULL_TOKENS)
        self._output_tokens = family(Counter, metrics.OUTPUT_TOKENS)
        self.request_prompt_tokens = family(Histogram, metrics.REQUEST_PROMPT_TOKENS)
        self.request_output_tokens = family(Histogram, metrics.REQUEST_OUTPUT_TOKENS)
        self.redispatches = family(Counter, metrics.REDISPATCHES)
        self.replayed_tokens = family(Counter, metrics.REPLAYED_TOKENS)
        self.oldest_handoff_seconds = family(Gauge, metrics.OLDEST_HANDOFF_SECONDS)
        self.waiting_handoffs = family(Gauge, metrics.WAITING_HANDOFFS)
        self.slo_requests = family(Counter, metrics.SLO_REQUESTS)
        self.slo_misses = family(Counter, metrics.SLO_MISSES)
        self.tenant_requests = family(Counter, metrics.TENANT_REQUESTS)
        self.fallbacks = family(Counter, metrics.FALLBACKS)
        self.placements = family(Counter, metrics.PLACEMENTS)
        self.route_seconds = family(Histogram, metrics.ROUTE_SECONDS)
        self.plan_goodput = family(Gauge, metrics.PLAN_GOODPUT)
        self.plan_workers = family(Gauge, metrics.PLAN_WORKERS)
        self.worker_up = worker_family(Gauge, metrics.WORKER_UP)
        self.ready_workers = worker_family(Gauge, metrics.READY_WORKERS)
        self.worker_ranks = worker_family(Gauge, metrics.WORKER_RANKS)
        self.worker_limits = worker_family(Gauge, metrics.WORKER_LIMITS)
        self.worker_price = worker_family(Gauge, metrics.WORKER_PRICE)
        self.restarts = worker_family(Counter, metrics.RESTARTS)
        self.worker_busy_seconds = worker_family(Counter, metrics.WORKER_BUSY_SECONDS)
        self.worker_predicted_busy_seconds = worker_family(Counter, metrics.WORKER_PREDICTED_BUSY_SECONDS)
        self.step_seconds = PlainHistogram(metrics.STEP_SECONDS, worker_registry)
        self.predicted_step_seconds = PlainHistogram(metrics.PREDICTED_STEP_SECONDS, worker_registry)
        self.step_tokens = PlainHistogram(metrics.STEP_TOKENS, worker_registry)
        self.running = worker_family(Gauge, metrics.RUNNING)
        self.waiting = worker_family(Gauge, metrics.WAITING)
        self.parked = worker_family(Gauge, metrics.PARKED)
        self.kv_blocks = worker_family(Gauge, metrics.KV_BLOCKS)
        self.preemptions = worker_family(Counter, metrics.PREEMPTIONS)
        self.swap_outs = worker_family(Counter, metrics.SWAP_OUTS)
        self.swap_ins = worker_family(Counter, metrics.SWAP_INS)
        self.transfer_seconds = worker_family(Histogram, metrics.TRANSFER_SECONDS)
        self.transfer_bytes = worker_family(Histogram, metrics.TRANSFER_BYTES)
        self.transfer_failures = worker_family(Counter, metrics.TRANSFER_FAILURES)
        self.link_pulls = worker_family(Counter, metrics.LINK_PULLS)
        self.link_bytes = worker_family(Counter, metrics.LINK_BYTES)
        self.link_seconds = worker_family(Counter, metrics.LINK_SECONDS)
        self.transports: dict[tuple[str, str], str] = {}
        """Of the last pull by pair of source and decode worker; empty if none succeeded."""
        # A series that appears with its first event has no rate before the second.
        for outcome in Outcome:
            self.outcomes.labels(outcome.value)
        for stage in FAILURE_STAGES:
            for transport in (*TRANSPORTS, NO_TRANSPORT):
                self.transfer_failures.labels(stage, transport)
        for reason in RETRY_REASONS:
            self.redispatches.labels(reason)
            self.replayed_tokens.labels(reason)
        for reason in FALLBACK_REASONS:
            self.fallbacks.labels(reason)
        for verdict in ("good", "bad"):
            self.tenant_requests.labels(NO_TENANT, verdict)
        for role in WorkerRole:
            self.restarts.labels(role.value)
        slo_seconds = family(Gauge, metrics.SLO_SECONDS)
        for tier in (DEFAULT_TIER, *self._slo.tiers):
            slo_seconds.labels(tier, "ttft").set(self._slo.tier(tier).ttft_seconds)
            slo_seconds.labels(tier, "tpot").set(self._slo.tier(tier).tpot_seconds)
            if max_gap_s := self._slo.tier(tier).max_gap_seconds:
                slo_seconds.labels(tier, "max_gap").set(max_gap_s)
            for objective, causes in (("ttft", TTFT_CAUSES), ("tpot", (*TPOT_CAUSES, GAP_CAUSE))):
                for cause in causes:
                    self.slo_misses.labels(tier, objective, cause)
            for ttft in ("met", "missed"):
                for tpot in ("met", "missed", "none"):
                    self.slo_requests.labels(tier, ttft, tpot)
            for verdict in ("failed", "refused"):
                self.slo_requests.labels(tier, verdict, verdict)
        family(Gauge, metrics.SLO_ATTAINMENT).set(self._slo.attainment)

    def track(self, dispatcher: Dispatcher) -> None:
        """Read the dispatcher's gauges at every scrape."""
        self._dispatcher = dispatcher

    def accepted(self, spec: RequestSpec) -> None:
        self.accepted_requests.inc()
        self.prompt_tokens.inc(len(spec.prompt_tokens))
        if not spec.is_probe:
            self.request_prompt_tokens.observe(len(spec.prompt_tokens))

    def refused(self, tier: str) -> None:
        self.slo_requests.labels(tier, "refused", "refused").inc()

    def placed(self, policy: str, role: WorkerRole, *, is_late: bool) -> None:
        self.placements.labels(policy, role.value, "late" if is_late else "on_time").inc()

    def routed(self, seconds: float) -> None:
        self.route_seconds.observe(seconds)

    def phase_ended(self, phase: str, seconds: float) -> None:
        assert phase in PHASES
        self.phase_seconds.labels(phase).observe(seconds)

    def prompt_started(self, num_cached_tokens: int) -> None:
        self.cached_prompt_tokens.inc(num_cached_tokens)

    def pull_started(self, num_cached_tokens: int) -> None:
        self.cached_pull_tokens.inc(num_cached_tokens)

    def fell_back(self, reason: str) -> None:
        self.fallbacks.labels(reason).inc()

    def handoff_stalled(self, seconds: float) -> None:
        self.handoff_stall_seconds.observe(seconds)

    def retried(self, reason: str, num_tokens: int) -> None:
        self.redispatches.labels(reason).inc()
        self.replayed_tokens.labels(reason).inc(num_tokens)

    def ended(self, request: Request) -> None:
        assert request.outcome is not None
        self.outcomes.labels(request.outcome.value).inc()
        error = request.error
        if error is not None and error.status != 400 and not request.spec.is_probe:
            self.slo_requests.labels(request.spec.tier, "failed", "failed").inc()
            self.failed(f"{error.status}: {error.message}")

    def planned(self, goodput: Mapping[str, float], workers: Mapping[WorkerRole, int]) -> None:
        """A planner has compared placements.

        Args:
            goodput: requests per second of the ``running`` and the ``best`` one.
            workers: of the best one.
        """
        for placement, rate in goodput.items():
            self.plan_goodput.labels(placement).set(rate)
        for role in WorkerRole:
            self.plan_workers.labels(role.value).set(workers.get(role, 0))

    def failed(self, text: str) -> None:
        """Note a failure in words."""
        last = self.failures.pop() if self.failures and self.failures[-1].text == text else None
        self.failures.append(Failure(time.time(), text, last.times + 1 if last else 1))

    def observe_transfer(self, report: worker_pb2.TransferReport, source: str, worker: str) -> None:
        """Record one pull from ``source``, as reported by the decode worker ``worker``."""
        link = source, worker
        if link not in self.transports:
            if len(self.transports) >= MAX_LINKS:
                link = "other", "other"
            self.transports[link] = ""
        pulls = {result: self.link_pulls.labels(*link, result) for result in ("done", "ended", ABORTED, "failed")}
        if report.failure_stage == ABORTED:
            pulls[ABORTED].inc()
        elif report.failure_stage:
            self.transfer_failures.labels(report.failure_stage, report.transport or NO_TRANSPORT).inc()
            pulls["failed"].inc()
        elif report.ended_request:
            pulls["ended"].inc()
        else:
            pulls["done"].inc()
            self.transports[link] = report.transport
            self.link_bytes.labels(*link).inc(report.bytes)
            self.link_seconds.labels(*link).inc(report.seconds)
            self.transfer_seconds.labels(report.transport).observe(report.seconds)
            self.transfer_bytes.labels(report.transport).observe(report.bytes)

    # The HTTP edge. Tokens are timed when written to the client or, in a whole answer, when they reach the edge.

    def responded(self, route: str, code: int) -> None:
        """A request was answered with HTTP status ``code``.

        Args:
            route: path of the route, such as ``/v1/chat/completions``, or ``other`` if none matched.
            code: 499 if the client left before a status was sent.
        """
        self.requests.labels(route, str(code)).inc()

    def tenant_served(self, tenant: str, *, is_good: bool) -> None:
        """Count a request of ``tenant``; ``is_good`` if it met both objectives."""
        self.tenant_requests.labels(tenant or NO_TENANT, "good" if is_good else "bad").inc()

    @property
    def num_output_tokens(self) -> int:
        """Tokens sent to clients."""
        return self._num_first_tokens + sum(self.itl_seconds.counts)

    def first_token(self, ttft_s: float, request_id: str = "") -> None:
        self.ttft_seconds.observe(ttft_s, _exemplar(request_id))
        self._num_first_tokens += 1

    def answered(
        self,
        *,
        ttft_s: float,
        tpot_s: float | None,
        duration_s: float,
        num_tokens: int,
        num_gaps: int = 0,
        longest_gap_s: float = 0.0,
        journeys: Sequence[Journey] = (),
        tpot_parts_s: Mapping[str, float] | None = None,
        request_id: str = "",
        tier: str = DEFAULT_TIER,
    ) -> bool:
        """An answer is complete. Counts the SLO verdict: ``met`` or ``missed``, or ``none`` for the TPOT of a one-token
        answer, and why an objective was missed. Not called if the client left or the generation failed, which `ended`
        counts.

        Args:
            num_gaps: gaps between tokens in the choice of ``tpot_parts_s``.
            longest_gap_s: between two tokens of any choice; misses TPOT if the tier bounds it.
            journeys: of each prompt.
            tpot_parts_s: seconds of its slowest answer after token 0, by cause.
            request_id: the exemplar of its bucket.
            tier: name of its objectives.

        Returns: whether both objectives were met.
        """
        slo = self._slo.tier(tier)
        self.request_seconds.observe(duration_s)
        self.request_output_tokens.observe(num_tokens)
        tpot = "none"
        if tpot_s is not None:
            self.tpot_seconds.observe(tpot_s, _exemplar(request_id))
            tpot = _verdict(tpot_s, slo.tpot_seconds)
        is_mean_met = tpot != "missed"
        if slo.max_gap_seconds and longest_gap_s > slo.max_gap_seconds:
            tpot = "missed"
        ttft = _verdict(ttft_s, slo.ttft_seconds)
        self.slo_requests.labels(tier, ttft, tpot).inc()
        if ttft == "missed":
            self.slo_misses.labels(tier, "ttft", ttft_cause(journeys, ttft_s)).inc()
        if tpot == "missed":
            cause = GAP_CAUSE if is_mean_met else tpot_cause(tpot_parts_s or {}, num_gaps, slo.tpot_seconds)
            self.slo_misses.labels(tier, "tpot", cause).inc()
        return "missed" not in (ttft, tpot)

    def refresh(self) -> None:
        """Bring the series up to date. What they are made from changes in the event loop only, so this is called there,
        before `registry` is written by any thread."""
        for worker in self.workers:
            worker.refresh()
        num_tokens = self.num_output_tokens
        self._output_tokens.inc(num_tokens - self._num_scraped_tokens)
        self._num_scraped_tokens = num_tokens
        if self._dispatcher is None:
            return
        for role in WorkerRole:
            self.ready_workers.labels(role.value).set(_count(self._dispatcher.workers, role))
        ages_s = self._dispatcher.attempts.handoff_ages_s(time.monotonic())
        self.oldest_handoff_seconds.set(max(ages_s, default=0.0))
        for age, (low_s, high_s) in HANDOFF_AGES_S.items():
            self.waiting_handoffs.labels(age).set(sum(low_s <= age_s < high_s for age_s in ages_s))
        self.in_flight.set(self._dispatcher.num_in_flight)
        self.queued.set(self._dispatcher.num_queued)


def _count(workers: Mapping[str, Worker], role: WorkerRole) -> int:
    return len({whole_worker_id(worker.worker_id) for worker in workers.values() if worker.role is role})


def _exemplar(request_id: str) -> dict[str, str] | None:
    """The format has room for 128 characters."""
    return {"request_id": request_id[:MAX_EXEMPLAR_CHARS]} if request_id else None


def _verdict(measured_s: float, slo_s: float) -> str:
    return "met" if measured_s <= slo_s else "missed"
