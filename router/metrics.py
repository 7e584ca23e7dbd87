"""Prometheus registry of the router, built from `pdserve.contracts.metrics`.

One `RouterMetrics` per process; the dispatcher, the fleet and the HTTP edge write to it, the admin port reads it.
Names, help texts, labels and buckets live only in the contracts. Makes no decisions.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from pdserve.contracts import metrics
from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.placement import WorkerRole
from pdserve.contracts.request import Outcome
from pdserve.proto.v1 import worker_pb2
from pdserve.router.http.timing import AnswerTiming, EdgeObserver
from pdserve.router.requests.dispatch import Dispatcher, DispatchObserver
from pdserve.router.requests.request import Request, RequestSpec

PHASES = ("queue", "prefill_queue", "prefill", "handoff", "decode_queue", "decode")
"""Values of the ``phase`` label.

By the router's clock: ``queue``, arrival to the first dispatch; ``prefill``, start of the prompt to the attempt's first
token; ``handoff``, that token to the decode worker's join; ``decode``, join (or first token without handoff) to the
last token. Measured by workers: ``prefill_queue`` and ``decode_queue``, receipt to the first chunk and to the
reservation of blocks.
"""

BLOCK_STATES = ("free", "cached", "referenced")
STEP_KINDS = ("decode", "prefill")
"""Steps whose rows have one new token each, and steps in which some have more."""


def counter(registry: CollectorRegistry, metric: metrics.Metric) -> Counter:
    assert metric.kind == "counter"
    return Counter(metric.name, metric.help, metric.labels, registry=registry)


def gauge(registry: CollectorRegistry, metric: metrics.Metric) -> Gauge:
    assert metric.kind == "gauge"
    return Gauge(metric.name, metric.help, metric.labels, registry=registry)


def histogram(registry: CollectorRegistry, metric: metrics.Metric) -> Histogram:
    assert metric.kind == "histogram"
    return Histogram(metric.name, metric.help, metric.labels, registry=registry, buckets=metric.buckets)


class _Total:
    """Counter that follows a total kept by the worker."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._seen = 0

    def observe(self, total: int) -> None:
        if total > self._seen:
            self._counter.inc(total - self._seen)
            self._seen = total


class WorkerMetrics:
    """Series of one worker. Labels are resolved once, because every frame writes them."""

    def __init__(self, metrics: RouterMetrics, worker_id: str, role: WorkerRole) -> None:
        labels = (worker_id, role.value)
        self._labels = labels
        self._families = (
            metrics.worker_up, metrics.step_tokens, metrics.running, metrics.waiting, metrics.parked,
            metrics.preemptions, metrics.swap_outs, metrics.swap_ins,
        )  # fmt: skip
        self._kv_blocks = metrics.kv_blocks
        self._families_by_kind = (metrics.step_seconds, metrics.predicted_step_seconds)
        self.up = metrics.worker_up.labels(*labels)
        self._step_seconds = [metrics.step_seconds.labels(*labels, kind) for kind in STEP_KINDS]
        self._predicted_step_seconds = [metrics.predicted_step_seconds.labels(*labels, kind) for kind in STEP_KINDS]
        self._step_tokens = metrics.step_tokens.labels(*labels)
        self._running = metrics.running.labels(*labels)
        self._waiting = metrics.waiting.labels(*labels)
        self._parked = metrics.parked.labels(*labels)
        self._blocks = {state: metrics.kv_blocks.labels(*labels, state) for state in BLOCK_STATES}
        self._preemptions = _Total(metrics.preemptions.labels(*labels))
        self._swap_outs = _Total(metrics.swap_outs.labels(*labels))
        self._swap_ins = _Total(metrics.swap_ins.labels(*labels))

    def observe(self, load: worker_pb2.Load) -> None:
        if load.step_s > 0:
            self._step_seconds[load.step_has_prefill].observe(load.step_s)
            self._predicted_step_seconds[load.step_has_prefill].inc(load.predicted_step_s)
            self._step_tokens.observe(load.step_tokens)
        self._running.set(load.num_running)
        self._waiting.set(load.num_waiting)
        self._parked.set(load.num_parked)
        self._blocks["free"].set(load.num_blocks_free)
        self._blocks["cached"].set(load.num_blocks_cached)
        self._blocks["referenced"].set(load.num_blocks_referenced)
        self._preemptions.observe(load.num_preemptions)
        self._swap_outs.observe(load.num_swap_outs)
        self._swap_ins.observe(load.num_swap_ins)

    def remove(self) -> None:
        """Remove the series of a worker that is no longer a target."""
        for family in self._families:
            family.remove(*self._labels)
        for family in self._families_by_kind:
            for kind in STEP_KINDS:
                family.remove(*self._labels, kind)
        for state in BLOCK_STATES:
            self._kv_blocks.remove(*self._labels, state)


class RouterMetrics(DispatchObserver):
    """Every metric family of the router process; counts the dispatcher's events."""

    def __init__(self) -> None:
        # They would double the number of series, and nothing reads them.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        self.requests = counter(registry, metrics.REQUESTS)
        self.outcomes = counter(registry, metrics.OUTCOMES)
        self.accepted_requests = counter(registry, metrics.ACCEPTED)
        self.in_flight = gauge(registry, metrics.IN_FLIGHT)
        self.queued = gauge(registry, metrics.QUEUED)
        self.request_seconds = histogram(registry, metrics.REQUEST_SECONDS)
        self.ttft_seconds = histogram(registry, metrics.TTFT_SECONDS)
        self.tpot_seconds = histogram(registry, metrics.TPOT_SECONDS)
        self.itl_seconds = histogram(registry, metrics.ITL_SECONDS)
        self.handoff_stall_seconds = histogram(registry, metrics.HANDOFF_STALL_SECONDS)
        self.phase_seconds = histogram(registry, metrics.PHASE_SECONDS)
        self.prompt_tokens = counter(registry, metrics.PROMPT_TOKENS)
        self.cached_prompt_tokens = counter(registry, metrics.CACHED_PROMPT_TOKENS)
        self.output_tokens = counter(registry, metrics.OUTPUT_TOKENS)
        self.request_prompt_tokens = histogram(registry, metrics.REQUEST_PROMPT_TOKENS)
        self.request_output_tokens = histogram(registry, metrics.REQUEST_OUTPUT_TOKENS)
        self.redispatches = counter(registry, metrics.REDISPATCHES)
        self.slo_requests = counter(registry, metrics.SLO_REQUESTS)
        self.route_seconds = histogram(registry, metrics.ROUTE_SECONDS)
        self.worker_up = gauge(registry, metrics.WORKER_UP)
        self.step_seconds = histogram(registry, metrics.STEP_SECONDS)
        self.predicted_step_seconds = counter(registry, metrics.PREDICTED_STEP_SECONDS)
        self.step_tokens = histogram(registry, metrics.STEP_TOKENS)
        self.running = gauge(registry, metrics.RUNNING)
        self.waiting = gauge(registry, metrics.WAITING)
        self.parked = gauge(registry, metrics.PARKED)
        self.kv_blocks = gauge(registry, metrics.KV_BLOCKS)
        self.preemptions = counter(registry, metrics.PREEMPTIONS)
        self.swap_outs = counter(registry, metrics.SWAP_OUTS)
        self.swap_ins = counter(registry, metrics.SWAP_INS)
        self.transfer_seconds = histogram(registry, metrics.TRANSFER_SECONDS)
        self.transfer_bytes = histogram(registry, metrics.TRANSFER_BYTES)
        self.transfer_failures = counter(registry, metrics.TRANSFER_FAILURES)
        for outcome in Outcome:
            self.outcomes.labels(outcome.value)

    def track(self, dispatcher: Dispatcher) -> None:
        """Read the dispatcher's two gauges at every scrape."""
        self.in_flight.set_function(lambda: dispatcher.num_in_flight)
        self.queued.set_function(lambda: dispatcher.num_queued)

    def accepted(self, spec: RequestSpec) -> None:
        self.accepted_requests.inc()
        self.prompt_tokens.inc(len(spec.prompt_tokens))
        if not spec.is_probe:
            self.request_prompt_tokens.observe(len(spec.prompt_tokens))

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

    def observe_transfer(self, report: worker_pb2.TransferReport) -> None:
        """Record one pull, as reported by the decode worker."""
        if report.failure_stage:
            self.transfer_failures.labels(report.failure_stage).inc()
        else:
            self.transfer_seconds.labels(report.transport).observe(report.seconds)
            self.transfer_bytes.labels(report.transport).observe(report.bytes)

    def render(self) -> bytes:
        """Exposition text of `/metrics`."""
        return generate_latest(self.registry)


class EdgeMetrics(EdgeObserver):
    """Counts the events of the HTTP edge."""

    def __init__(self, metrics: RouterMetrics, slo: SloConfig) -> None:
        self._metrics = metrics
        self._slo = slo

    def responded(self, route: str, code: int) -> None:
        self._metrics.requests.labels(route, str(code)).inc()

    def first_token(self, ttft_s: float) -> None:
        self._metrics.ttft_seconds.observe(ttft_s)
        self._metrics.output_tokens.inc()

    def gap(self, gap_s: float) -> None:
        self._metrics.itl_seconds.observe(gap_s)
        self._metrics.output_tokens.inc()

    def finished(self, timing: AnswerTiming) -> None:
        """Count the SLO verdict: ``met`` or ``missed``, or ``none`` for the TPOT of a one-token answer."""
        self._metrics.request_seconds.observe(timing.duration_s)
        self._metrics.request_output_tokens.observe(timing.num_tokens)
        tpot = "none"
        if timing.tpot_s is not None:
            self._metrics.tpot_seconds.observe(timing.tpot_s)
            tpot = _verdict(timing.tpot_s, self._slo.tpot_seconds)
        self._metrics.slo_requests.labels(_verdict(timing.ttft_s, self._slo.ttft_seconds), tpot).inc()


def _verdict(measured_s: float, wanted_s: float) -> str:
    return "met" if measured_s <= wanted_s else "missed"
