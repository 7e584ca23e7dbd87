"""Metrics of the router, built from `pdserve.contracts.metrics`.

One `RouterMetrics` per process; the dispatcher, the cluster and the HTTP edge write to it, the admin port reads it.
Names, help texts, labels and buckets live only in the contracts. Makes no decisions.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from pdserve.contracts import metrics
from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.placement import WorkerRole
from pdserve.contracts.request import Outcome
from pdserve.proto.v1 import worker_pb2
from pdserve.router.exposition import TEXT, Counter, Family, Gauge, Histogram, Registry, Series
from pdserve.router.requests.dispatch import Dispatcher, DispatchObserver
from pdserve.router.requests.journey import TPOT_CAUSES, TTFT_CAUSES, Journey, tpot_cause, ttft_cause
from pdserve.router.requests.request import Request, RequestSpec

PHASES = ("queue", "prefill_queue", "prefill", "handoff", "decode_queue", "decode")
"""Values of the ``phase`` label.

By the router's clock: ``queue``, arrival to the first dispatch; ``prefill``, start of the prompt to the attempt's first
token; ``handoff``, that token to the decode worker's join; ``decode``, join (or first token without handoff) to the
last token. Measured by workers: ``prefill_queue`` and ``decode_queue``, receipt to the first chunk and to the
reservation of blocks.
"""

FAILURE_STAGES = ("connect", "refused", "grant", "copy", "verify", "aborted", "deadline")
"""Values of the ``stage`` label: `PullDone.failure_stage`."""

RETRY_REASONS = ("cancelled", "failed", "kv_unavailable", "rebound", "refused", "worker_lost")
"""Values of the ``reason`` label."""

STEP_KINDS = ("decode", "prefill")
"""Steps whose rows have one new token each, and steps in which some have more."""


MAX_FAILURES = 20


class Failure(NamedTuple):
    """Failures of one kind in a row."""

    time: float
    """Of the last one, in seconds since 1970."""
    text: str
    times: int


class WorkerMetrics:
    """Series of one worker. Labels are resolved once, because every frame writes them."""

    def __init__(self, metrics: RouterMetrics, worker_id: str, role: WorkerRole) -> None:
        self._series: list[tuple[Family[Counter] | Family[Gauge] | Family[Histogram], tuple[str, ...]]] = []

        def series(family: Family[Series], *more_labels: str) -> Series:
            labels = (worker_id, role.value, *more_labels)
            self._series.append((family, labels))
            return family.labels(*labels)

        self.up = series(metrics.worker_up)
        self._step_seconds = [series(metrics.step_seconds, kind) for kind in STEP_KINDS]
        self._predicted_step_seconds = [series(metrics.predicted_step_seconds, kind) for kind in STEP_KINDS]
        self._step_tokens = series(metrics.step_tokens)
        self._gauges = {
            "num_running": series(metrics.running),
            "num_waiting": series(metrics.waiting),
            "num_parked": series(metrics.parked),
            "num_blocks_free": series(metrics.kv_blocks, "free"),
            "num_blocks_cached": series(metrics.kv_blocks, "cached"),
            "num_blocks_referenced": series(metrics.kv_blocks, "referenced"),
        }
        self._totals = {
            "num_preemptions": series(metrics.preemptions),
            "num_swap_outs": series(metrics.swap_outs),
            "num_swap_ins": series(metrics.swap_ins),
        }
        self._previous = worker_pb2.Load()

    def observe(self, load: worker_pb2.Load) -> None:
        if load.step_s > 0:
            self._step_seconds[load.step_has_prefill].observe(load.step_s)
            self._predicted_step_seconds[load.step_has_prefill].inc(load.predicted_step_s)
            self._step_tokens.observe(load.step_tokens)
        for field, gauge in self._gauges.items():
            gauge.set(getattr(load, field))
        for field, counter in self._totals.items():
            counter.inc(max(0, getattr(load, field) - getattr(self._previous, field)))
        self._previous = load

    def remove(self) -> None:
        """Remove the series of a worker that is no longer a target."""
        for family, labels in self._series:
            family.remove(*labels)


class RouterMetrics(DispatchObserver):
    """Every metric family of the router process; counts the events of the dispatcher and the HTTP edge."""

    def __init__(self, slo: SloConfig | None = None) -> None:
        self.registry = registry = Registry()
        self._slo = slo or SloConfig()
        self.failures: deque[Failure] = deque(maxlen=MAX_FAILURES)
        """Requests that failed and workers that were lost, in words, the newest last."""

        self.requests = registry.counter(metrics.REQUESTS)
        self.outcomes = registry.counter(metrics.OUTCOMES)
        self.accepted_requests = registry.counter(metrics.ACCEPTED).labels()
        self.in_flight = registry.gauge(metrics.IN_FLIGHT).labels()
        self.queued = registry.gauge(metrics.QUEUED).labels()
        self.request_seconds = registry.histogram(metrics.REQUEST_SECONDS).labels()
        self.ttft_seconds = registry.histogram(metrics.TTFT_SECONDS).labels()
        self.tpot_seconds = registry.histogram(metrics.TPOT_SECONDS).labels()
        self.itl_seconds = registry.histogram(metrics.ITL_SECONDS).labels()
        self.handoff_stall_seconds = registry.histogram(metrics.HANDOFF_STALL_SECONDS).labels()
        self.phase_seconds = registry.histogram(metrics.PHASE_SECONDS)
        self.prompt_tokens = registry.counter(metrics.PROMPT_TOKENS).labels()
        self.cached_prompt_tokens = registry.counter(metrics.CACHED_PROMPT_TOKENS).labels()
        self.output_tokens = registry.counter(metrics.OUTPUT_TOKENS).labels()
        self.request_prompt_tokens = registry.histogram(metrics.REQUEST_PROMPT_TOKENS).labels()
        self.request_output_tokens = registry.histogram(metrics.REQUEST_OUTPUT_TOKENS).labels()
        self.redispatches = registry.counter(metrics.REDISPATCHES)
        self.slo_requests = registry.counter(metrics.SLO_REQUESTS)
        self.slo_misses = registry.counter(metrics.SLO_MISSES)
        self.placements = registry.counter(metrics.PLACEMENTS)
        self.route_seconds = registry.histogram(metrics.ROUTE_SECONDS).labels()
        self.worker_up = registry.gauge(metrics.WORKER_UP)
        self.step_seconds = registry.histogram(metrics.STEP_SECONDS)
        self.predicted_step_seconds = registry.counter(metrics.PREDICTED_STEP_SECONDS)
        self.step_tokens = registry.histogram(metrics.STEP_TOKENS)
        self.running = registry.gauge(metrics.RUNNING)
        self.waiting = registry.gauge(metrics.WAITING)
        self.parked = registry.gauge(metrics.PARKED)
        self.kv_blocks = registry.gauge(metrics.KV_BLOCKS)
        self.preemptions = registry.counter(metrics.PREEMPTIONS)
        self.swap_outs = registry.counter(metrics.SWAP_OUTS)
        self.swap_ins = registry.counter(metrics.SWAP_INS)
        self.transfer_seconds = registry.histogram(metrics.TRANSFER_SECONDS)
        self.transfer_bytes = registry.histogram(metrics.TRANSFER_BYTES)
        self.transfer_failures = registry.counter(metrics.TRANSFER_FAILURES)
        # A series that appears with its first event has no rate before the second.
        for outcome in Outcome:
            self.outcomes.labels(outcome.value)
        for stage in FAILURE_STAGES:
            self.transfer_failures.labels(stage)
        for reason in RETRY_REASONS:
            self.redispatches.labels(reason)
        for ttft in ("met", "missed"):
            for tpot in ("met", "missed", "none"):
                self.slo_requests.labels(ttft, tpot)
        for verdict in ("failed", "refused"):
            self.slo_requests.labels(verdict, verdict)
        for objective, causes in (("ttft", TTFT_CAUSES), ("tpot", TPOT_CAUSES)):
            for cause in causes:
                self.slo_misses.labels(objective, cause)
        slo_seconds = registry.gauge(metrics.SLO_SECONDS)
        slo_seconds.labels("ttft").set(self._slo.ttft_seconds)
        slo_seconds.labels("tpot").set(self._slo.tpot_seconds)
        registry.gauge(metrics.SLO_ATTAINMENT).labels().set(self._slo.attainment)

    def track(self, dispatcher: Dispatcher) -> None:
        """Read the dispatcher's two gauges at every scrape."""
        self.in_flight.set_function(lambda: dispatcher.num_in_flight)
        self.queued.set_function(lambda: dispatcher.num_queued)

    def accepted(self, spec: RequestSpec) -> None:
        self.accepted_requests.inc()
        self.prompt_tokens.inc(len(spec.prompt_tokens))
        if not spec.is_probe:
            self.request_prompt_tokens.observe(len(spec.prompt_tokens))

    def refused(self) -> None:
        self.slo_requests.labels("refused", "refused").inc()

    def placed(self, policy: str, role: WorkerRole, *, is_late: bool) -> None:
        self.placements.labels(policy, role.value, "late" if is_late else "on_time").inc()

    def routed(self, seconds: float) -> None:
        self.route_seconds.observe(seconds)

    def phase_ended(self, phase: str, seconds: float) -> None:
        assert phase in PHASES
        self.phase_seconds.labels(phase).observe(seconds)

    def prompt_started(self, num_cached_tokens: int) -> None:
        self.cached_prompt_tokens.inc(num_cached_tokens)

    def handoff_stalled(self, seconds: float) -> None:
        self.handoff_stall_seconds.observe(seconds)

    def retried(self, reason: str) -> None:
        self.redispatches.labels(reason).inc()

    def ended(self, request: Request) -> None:
        assert request.outcome is not None
        self.outcomes.labels(request.outcome.value).inc()
        error = request.error
        if error is not None and error.status != 400 and not request.spec.is_probe:
            self.slo_requests.labels("failed", "failed").inc()
            self.failed(f"{error.status}: {error.message}")

    def failed(self, text: str) -> None:
        """Note a failure in words."""
        last = self.failures.pop() if self.failures and self.failures[-1].text == text else None
        self.failures.append(Failure(time.time(), text, last.times + 1 if last else 1))

    def observe_transfer(self, report: worker_pb2.TransferReport) -> None:
        """Record one pull, as reported by the decode worker."""
        if report.failure_stage:
            self.transfer_failures.labels(report.failure_stage).inc()
        else:
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

    def first_token(self, ttft_s: float) -> None:
        self.ttft_seconds.observe(ttft_s)
        self.output_tokens.inc()

    def gap(self, gap_s: float) -> None:
        """A later token was handed over, ``gap_s`` after the previous one."""
        self.itl_seconds.observe(gap_s)
        self.output_tokens.inc()

    def answered(
        self,
        *,
        ttft_s: float,
        tpot_s: float | None,
        duration_s: float,
        num_tokens: int,
        num_gaps: int = 0,
        journeys: Sequence[Journey] = (),
    ) -> None:
        """An answer is complete. Counts the SLO verdict: ``met`` or ``missed``, or ``none`` for the TPOT of a one-token
        answer, and why an objective was missed. Not called if the client left or the generation failed, which `ended`
        counts.

        Args:
            num_gaps: tokens after token 0 in the longest choice.
            journeys: of each prompt.
        """
        self.request_seconds.observe(duration_s)
        self.request_output_tokens.observe(num_tokens)
        tpot = "none"
        if tpot_s is not None:
            self.tpot_seconds.observe(tpot_s)
            tpot = _verdict(tpot_s, self._slo.tpot_seconds)
        ttft = _verdict(ttft_s, self._slo.ttft_seconds)
        self.slo_requests.labels(ttft, tpot).inc()
        if ttft == "missed":
            self.slo_misses.labels("ttft", ttft_cause(journeys, ttft_s)).inc()
        if tpot == "missed":
            assert tpot_s is not None
            self.slo_misses.labels("tpot", tpot_cause(journeys, tpot_s, num_gaps, self._slo.tpot_seconds)).inc()

    def render(self, content_type: str = TEXT) -> bytes:
        """Exposition text of `/metrics`."""
        return self.registry.render(content_type)


def _verdict(measured_s: float, slo_s: float) -> str:
    return "met" if measured_s <= slo_s else "missed"


class TokenTimer:
    """Times the choices of one request, each with its own token 0 and gaps; the slowest count for the request."""

    def __init__(self, metrics: RouterMetrics, arrived_s: float) -> None:
        """``arrived_s``: `time.monotonic` at arrival of the request."""
        self._metrics = metrics
        self._arrived_s = arrived_s
        self._first_s: dict[int, float] = {}
        self._last_s: dict[int, float] = {}
        self._num_gaps: dict[int, int] = {}

    def token(self, choice: int) -> None:
        """Record that the next token of ``choice`` was handed over."""
        now_s = time.monotonic()
        last_s = self._last_s.get(choice)
        self._last_s[choice] = now_s
        if last_s is None:
            self._first_s[choice] = now_s
            self._num_gaps[choice] = 0
            self._metrics.first_token(now_s - self._arrived_s)
        else:
            self._num_gaps[choice] += 1
            self._metrics.gap(now_s - last_s)

    @property
    def ttft_s(self) -> float | None:
        """TTFT; None before token 0."""
        return max(self._first_s.values()) - self._arrived_s if self._first_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean gap so far; None without one."""
        gaps = self._num_gaps.items()
        tpots_s = [(self._last_s[choice] - self._first_s[choice]) / num_gaps for choice, num_gaps in gaps if num_gaps]
        return max(tpots_s, default=None)

    def finished(self, journeys: Sequence[Journey]) -> None:
        ttft_s = self.ttft_s
        assert ttft_s is not None
        self._metrics.answered(
            ttft_s=ttft_s,
            tpot_s=self.tpot_s,
            duration_s=max(self._last_s.values()) - self._arrived_s,
            num_tokens=sum(1 + num_gaps for num_gaps in self._num_gaps.values()),
            num_gaps=max(self._num_gaps.values()),
            journeys=journeys,
        )
