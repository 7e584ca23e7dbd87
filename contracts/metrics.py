"""Names, help texts, labels and buckets of every metric, shared by code, dashboards and tests.

Base units (seconds, bytes, tokens) and underscore names; label values come from closed sets. A worker has series of its
own for what tells it from others; histograms are those of all workers of a role. A duration is always the difference of
two monotonic readings in one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
"""TTFT: from a cached short prompt to a long queue."""

ITL_BUCKETS_S = (
    0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6,
    0.8, 1.0, 2.0, 4.0, 6.0, 8.0,
)  # fmt: skip
"""ITL and decode steps; fine below 10 ms, for fast decodes."""

REQUEST_BUCKETS_S = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
"""Whole requests and their phases."""

TOKENS_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
"""Tokens of a prompt, an answer or a step."""

LENGTH_BUCKETS = (
    1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288,
    16384, 24576, 32768, 65536, 131072,
)  # fmt: skip
"""Tokens of a request's prompt or answers, fine enough to plan a placement."""

BYTES_BUCKETS = tuple(2.0**power for power in range(11, 35, 2))
"""Bytes of one KV transfer: 2 KiB to 8 GiB."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    """Family name, without the ``_total`` suffix of counter samples."""
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Histograms only."""


# Router
REQUESTS = Metric("counter", "pdserve_requests", "HTTP requests by route and status code.", ("route", "code"))
OUTCOMES = Metric("counter", "pdserve_request_outcomes", "Accepted requests by outcome.", ("outcome",))
ACCEPTED = Metric("counter", "pdserve_requests_accepted", "Requests accepted for generation.")
IN_FLIGHT = Metric("gauge", "pdserve_requests_in_flight", "Accepted requests without an outcome.")
QUEUED = Metric("gauge", "pdserve_requests_queued", "Requests that wait for a worker.")
REQUEST_SECONDS = Metric("histogram", "pdserve_request_seconds", "Arrival to last byte.", (), REQUEST_BUCKETS_S)
TTFT_SECONDS = Metric(
    "histogram", "pdserve_ttft_seconds", "Arrival to token 0 written to the client.", (), TTFT_BUCKETS_S
)
TPOT_SECONDS = Metric(
    "histogram", "pdserve_tpot_seconds", "Mean time per output token after token 0.", (), ITL_BUCKETS_S
)
ITL_SECONDS = Metric("histogram", "pdserve_itl_seconds", "Gap between two tokens of a stream.", (), ITL_BUCKETS_S)
HANDOFF_STALL_SECONDS = Metric(
    "histogram", "pdserve_handoff_stall_seconds", "Token 0 to token 1 of a handed-off request.", (), ITL_BUCKETS_S
)
PREDICTED_TTFT_SECONDS = Metric(
    "histogram", "pdserve_predicted_ttft_seconds", "TTFT that a placement predicted.", (), TTFT_BUCKETS_S
)
PREDICTED_TPOT_SECONDS = Metric(
    "histogram", "pdserve_predicted_tpot_seconds", "Decode step predicted as an answer joined.", (), ITL_BUCKETS_S
)
TPOT_PART_SECONDS = Metric(
    "histogram", "pdserve_tpot_part_seconds", "TPOT by what took the time.", ("part",), ITL_BUCKETS_S
)
PHASE_SECONDS = Metric(
    "histogram", "pdserve_request_phase_seconds", "Time a request spent in a phase.", ("phase",), REQUEST_BUCKETS_S
)
PROMPT_TOKENS = Metric("counter", "pdserve_prompt_tokens", "Prompt tokens of accepted requests.")
CACHED_PROMPT_TOKENS = Metric(
    "counter", "pdserve_cached_prompt_tokens", "Prompt tokens whose KV was found in a prefix cache."
)
CACHED_PULL_TOKENS = Metric(
    "counter", "pdserve_cached_pull_tokens", "Tokens of handed-off prompts that decode workers had cached."
)
OUTPUT_TOKENS = Metric("counter", "pdserve_output_tokens", "Tokens sent to clients.")
REQUEST_PROMPT_TOKENS = Metric(
    "histogram", "pdserve_request_prompt_tokens", "Prompt tokens of each request of a client.", (), LENGTH_BUCKETS
)
REQUEST_OUTPUT_TOKENS = Metric(
    "histogram", "pdserve_request_output_tokens", "Tokens of each finished request's answers.", (), LENGTH_BUCKETS
)
REDISPATCHES = Metric("counter", "pdserve_redispatches", "Requests sent to another worker.", ("reason",))
REPLAYED_TOKENS = Metric("counter", "pdserve_replayed_tokens", "Tokens of them to be computed again.", ("reason",))
OLDEST_HANDOFF_SECONDS = Metric(
    "gauge", "pdserve_oldest_handoff_seconds", "Age of the oldest prompt that no decode worker holds yet."
)
WAITING_HANDOFFS = Metric(
    "gauge", "pdserve_waiting_handoffs", "Prompts that no decode worker holds yet, by time since token 0.", ("age",)
)
SLO_REQUESTS = Metric(
    "counter",
    "pdserve_slo_requests",
    "Requests by SLO verdict: met, missed, or none of a one-token answer; failed and refused ones met neither.",
    ("tier", "ttft", "tpot"),
)
SLO_MISSES = Metric(
    "counter",
    "pdserve_slo_misses",
    "Answers that missed an objective, by the longest part of TTFT, and by what lengthened TPOT or one gap of it.",
    ("tier", "objective", "cause"),
)
TENANT_REQUESTS = Metric(
    "counter", "pdserve_tenant_requests", "Requests by tenant; good: within both objectives.", ("tenant", "verdict")
)
SLO_SECONDS = Metric("gauge", "pdserve_slo_seconds", "Configured latency objectives.", ("tier", "objective"))
SLO_ATTAINMENT = Metric("gauge", "pdserve_slo_attainment", "Configured share of requests that should meet both.")
PLACEMENTS = Metric(
    "counter",
    "pdserve_placements",
    "Prompts placed, by policy, the worker's role, and whether the TTFT objective was expected to be met.",
    ("policy", "role", "expected"),
)
FALLBACKS = Metric(
    "counter", "pdserve_placement_fallbacks", "Placements that had no free choice of a worker, by reason.", ("reason",)
)
ROUTE_SECONDS = Metric("histogram", "pdserve_route_decision_seconds", "Time to choose workers.", (), ITL_BUCKETS_S)

PLAN_GOODPUT = Metric(
    "gauge",
    "pdserve_plan_goodput",
    "Requests per second within the SLO, by the last plan for this cluster: as placed now, and as placed best.",
    ("placement",),
)
PLAN_WORKERS = Metric("gauge", "pdserve_plan_workers", "Workers of the placement that the plan found best.", ("role",))

# Workers, as each frame reports them to the router
WORKER_UP = Metric("gauge", "pdserve_worker_up", "1 while the session with the worker stands.", ("worker", "role"))
READY_WORKERS = Metric("gauge", "pdserve_ready_workers", "Workers of a role that are up.", ("role",))
WORKER_RANKS = Metric(
    "gauge",
    "pdserve_worker_ranks",
    "Ranks of the worker, of a micro-batch its share; 0 while it is down.",
    ("worker", "role"),
)
WORKER_LIMITS = Metric(
    "gauge", "pdserve_worker_limit", "Sequences and new tokens of a step at most.", ("worker", "role", "limit")
)
WORKER_PRICE = Metric(
    "gauge", "pdserve_worker_usd_per_hour", "List price of these ranks' devices, where known.", ("worker", "role")
)
RESTARTS = Metric("counter", "pdserve_worker_restarts", "Workers replaced by a new process.", ("role",))
WORKER_BUSY_SECONDS = Metric(
    "counter", "pdserve_worker_busy_seconds", "Seconds of each worker's steps, by kind.", ("worker", "role", "kind")
)
WORKER_PREDICTED_BUSY_SECONDS = Metric(
    "counter",
    "pdserve_worker_predicted_busy_seconds",
    "What the cost model said of them.",
    ("worker", "role", "kind"),
)
STEP_SECONDS = Metric("histogram", "pdserve_step_seconds", "Engine steps by kind.", ("role", "kind"), ITL_BUCKETS_S)
PREDICTED_STEP_SECONDS = Metric(
    "histogram",
    "pdserve_predicted_step_seconds",
    "What the cost model said of each.",
    ("role", "kind"),
    ITL_BUCKETS_S,
)
STEP_TOKENS = Metric("histogram", "pdserve_step_tokens", "New tokens per step.", ("role",), TOKENS_BUCKETS)
RUNNING = Metric("gauge", "pdserve_running_sequences", "Sequences being computed.", ("worker", "role"))
WAITING = Metric("gauge", "pdserve_waiting_sequences", "Sequences waiting for blocks or budget.", ("worker", "role"))
PARKED = Metric("gauge", "pdserve_parked_sequences", "Prefilled prompts waiting to be pulled.", ("worker", "role"))
KV_BLOCKS = Metric("gauge", "pdserve_kv_blocks", "KV blocks by state.", ("worker", "role", "state"))
PREEMPTIONS = Metric("counter", "pdserve_preemptions", "Sequences preempted for blocks.", ("worker", "role"))
SWAP_OUTS = Metric("counter", "pdserve_swap_outs", "Preempted sequences copied to the host.", ("worker", "role"))
SWAP_INS = Metric("counter", "pdserve_swap_ins", "Preempted sequences copied back.", ("worker", "role"))
TRANSFER_SECONDS = Metric(
    "histogram", "pdserve_kv_transfer_seconds", "Pulls, from request to verified.", ("transport",), TTFT_BUCKETS_S
)
TRANSFER_BYTES = Metric("histogram", "pdserve_kv_transfer_bytes", "Bytes per pull.", ("transport",), BYTES_BUCKETS)
TRANSFER_FAILURES = Metric(
    "counter", "pdserve_kv_transfer_failures", "Failed pulls by stage and transport.", ("stage", "transport")
)
LINK_PULLS = Metric(
    "counter",
    "pdserve_kv_link_pulls",
    "Pulls from a prefill worker by result: done, failed, ended (by token 0) or aborted (the request ended meanwhile).",
    ("source", "worker", "result"),
)
LINK_BYTES = Metric("counter", "pdserve_kv_link_bytes", "Bytes of successful pulls.", ("source", "worker"))
LINK_SECONDS = Metric("counter", "pdserve_kv_link_seconds", "Seconds of successful pulls.", ("source", "worker"))
