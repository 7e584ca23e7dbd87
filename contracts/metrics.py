"""Names, help texts, labels and buckets of every metric, shared by code, dashboards and tests.

Base units (seconds, bytes, tokens) and underscore names; label values come from closed sets. A worker has series of its
own for what tells it from others; histograms are those of all workers of a role. A duration is always the difference of
two monotonic readings in one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from pdserve.contracts.request import Outcome
from pdserve.contracts.worker_config import TRANSPORTS, WorkerRole

TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0
)  # fmt: skip
"""TTFT: from a cached short prompt to a long queue."""

ITL_BUCKETS_S = (
    0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6,
    0.8, 1.0, 2.0, 4.0, 6.0, 8.0
)  # fmt: skip
"""ITL and decode steps; fine below 10 ms, for fast decodes."""

REQUEST_BUCKETS_S = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0
)  # fmt: skip
"""Whole requests and their phases."""

TOKENS_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
"""Tokens of a prompt, an answer or a step."""

LENGTH_BUCKETS = (
    1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288,
    16384, 24576, 32768, 65536, 131072
)  # fmt: skip
"""Tokens of a request's prompt or answers, fine enough to plan a placement."""

BYTES_BUCKETS = tuple(2.0**power for power in range(11, 35, 2))
"""Bytes of one KV transfer: 2 KiB to 8 GiB."""


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
NO_TRANSPORT = "none"
"""``transport`` of a pull that failed before one was chosen."""

RETRY_REASONS = ("cancelled", "expired", "failed", "kv_unavailable", "rebound", "refused", "relabelled", "worker_lost")
"""Values of the ``reason`` label: ``expired``, no decode worker pulled the prompt in time; ``rebound``, another decode
worker pulls it; ``relabelled``, its prefill worker became the only decode worker."""

FALLBACK_REASONS = ("no_worker", "no_prefill", "no_decode", "no_room", "cut_off")
"""Values of the ``reason`` label of placements without a free choice: no worker is up; prompts go to decode workers
because no prefill worker is up; no decode worker is up, or none has room; the only ones recently failed to pull, or
failed steps."""

SCALE_REASONS = ("prefill_short", "decode_short", "surplus", "failed")
"""Values of the ``reason`` label: the load needs more prefill, or decode, workers; it needs fewer; or a change ended
with an error, of which the supervisor's log has the text."""

NO_TENANT = "anonymous"
"""Tenant of requests to a router without API keys."""

HANDOFF_AGES_S = {"up to 1 s": (0.0, 1.0), "up to 10 s": (1.0, 10.0), "over 10 s": (10.0, inf)}
"""Values of the ``age`` label."""

STEP_KINDS = ("decode", "prefill")
"""Steps whose rows have one new token each, and steps in which some have more."""


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One metric family."""

    name: str
    """Family name, without the ``_total`` suffix of counter samples."""
    help: str
    labels: Sequence[str] | Mapping[str, Sequence[str]] = ()
    """Names; with their values, if every combination is a series from the start: one that appears with its first event
    has no rate before the second."""


class Counter(Metric): ...


class Gauge(Metric): ...


@dataclass(frozen=True, slots=True, eq=False)
class Histogram(Metric):
    buckets: tuple[float, ...] = ()


# Router
REQUESTS = Counter("pdserve_requests", "HTTP requests by route and status code.", ("route", "code"))
OUTCOMES = Counter(
    "pdserve_request_outcomes", "Accepted requests by outcome.", {"outcome": [each.value for each in Outcome]}
)
ACCEPTED = Counter("pdserve_requests_accepted", "Requests accepted for generation.")
IN_FLIGHT = Gauge("pdserve_requests_in_flight", "Accepted requests without an outcome.")
QUEUED = Gauge("pdserve_requests_queued", "Requests that wait for a worker.")
REQUEST_SECONDS = Histogram("pdserve_request_seconds", "Arrival to last byte.", (), REQUEST_BUCKETS_S)
TTFT_SECONDS = Histogram(
    "pdserve_ttft_seconds", "Arrival to token 0 written to the client, of each choice.", (), TTFT_BUCKETS_S
)
TPOT_SECONDS = Histogram(
    "pdserve_tpot_seconds",
    "Mean time per output token after token 0, of the slowest choice of a request.",
    (),
    ITL_BUCKETS_S,
)
ITL_SECONDS = Histogram("pdserve_itl_seconds", "Gap between two tokens of a stream.", (), ITL_BUCKETS_S)
HANDOFF_STALL_SECONDS = Histogram(
    "pdserve_handoff_stall_seconds", "Token 0 to token 1 of a handed-off request.", (), ITL_BUCKETS_S
)
PREDICTED_TTFT_SECONDS = Histogram(
    "pdserve_predicted_ttft_seconds", "TTFT that a placement predicted.", (), TTFT_BUCKETS_S
)
PREDICTED_TPOT_SECONDS = Histogram(
    "pdserve_predicted_tpot_seconds", "Decode step predicted as an answer joined.", (), ITL_BUCKETS_S
)
TPOT_PART_SECONDS = Histogram("pdserve_tpot_part_seconds", "TPOT by what took the time.", ("part",), ITL_BUCKETS_S)
PHASE_SECONDS = Histogram(
    "pdserve_request_phase_seconds", "Time a request spent in a phase.", ("phase",), REQUEST_BUCKETS_S
)
PROMPT_TOKENS = Counter("pdserve_prompt_tokens", "Prompt tokens of accepted requests.")
CACHED_PROMPT_TOKENS = Counter("pdserve_cached_prompt_tokens", "Prompt tokens whose KV was found in a prefix cache.")
CACHED_PULL_TOKENS = Counter(
    "pdserve_cached_pull_tokens", "Tokens of handed-off prompts that decode workers had cached."
)
PREFIX_TOKENS = Counter(
    "pdserve_prefix_tokens",
    "Prompt tokens whose KV was pulled from another worker's prefix cache, by the role of that worker.",
    {"source": [each.value for each in WorkerRole]},
)
PREFIX_SAVED_SECONDS = Counter(
    "pdserve_prefix_saved_seconds",
    "What these tokens would have taken to compute, as predicted, less the seconds of their pulls.",
    {"source": [each.value for each in WorkerRole]},
)
PREFIX_FAILURES = Counter(
    "pdserve_prefix_failures",
    "Pulls from another worker's prefix cache that failed, so that the tokens were computed.",
    {"source": [each.value for each in WorkerRole]},
)
OUTPUT_TOKENS = Counter("pdserve_output_tokens", "Tokens sent to clients.")
REQUEST_PROMPT_TOKENS = Histogram(
    "pdserve_request_prompt_tokens", "Prompt tokens of each request of a client.", (), LENGTH_BUCKETS
)
REQUEST_OUTPUT_TOKENS = Histogram(
    "pdserve_request_output_tokens", "Tokens of each finished request's answers.", (), LENGTH_BUCKETS
)
REDISPATCHES = Counter("pdserve_redispatches", "Requests sent to another worker.", {"reason": RETRY_REASONS})
REPLAYED_TOKENS = Counter("pdserve_replayed_tokens", "Tokens of them to be computed again.", {"reason": RETRY_REASONS})
OLDEST_HANDOFF_SECONDS = Gauge(
    "pdserve_oldest_handoff_seconds", "Age of the oldest prompt that no decode worker holds yet."
)
WAITING_HANDOFFS = Gauge(
    "pdserve_waiting_handoffs", "Prompts that no decode worker holds yet, by time since token 0.", ("age",)
)
SLO_REQUESTS = Counter(
    "pdserve_slo_requests",
    "Requests by SLO verdict: met, missed, or none of a one-token answer; failed and refused ones met neither.",
    ("tier", "ttft", "tpot"),
)
SLO_MISSES = Counter(
    "pdserve_slo_misses",
    "Answers that missed an objective, by the longest part of TTFT, and by what lengthened TPOT or one gap of it.",
    ("tier", "objective", "cause"),
)
TENANT_REQUESTS = Counter(
    "pdserve_tenant_requests",
    "Requests by tenant; good: within both objectives.",
    {"tenant": [NO_TENANT], "verdict": ["good", "bad"]},
)
SLO_SECONDS = Gauge("pdserve_slo_seconds", "Configured latency objectives.", ("tier", "objective"))
SLO_ATTAINMENT = Gauge("pdserve_slo_attainment", "Configured share of requests that should meet both.")
PLACEMENTS = Counter(
    "pdserve_placements",
    "Prompts placed, by policy, the worker's role, and whether the TTFT objective was expected to be met.",
    ("policy", "role", "expected"),
)
FALLBACKS = Counter(
    "pdserve_placement_fallbacks",
    "Placements that had no free choice of a worker, by reason.",
    {"reason": FALLBACK_REASONS},
)
ROUTE_SECONDS = Histogram("pdserve_route_decision_seconds", "Time to choose workers.", (), ITL_BUCKETS_S)

PLAN_GOODPUT = Gauge(
    "pdserve_plan_goodput",
    "Requests per second within the SLO, by the last plan for this cluster: as placed now, and as placed best.",
    ("placement",),
)
PLAN_WORKERS = Gauge("pdserve_plan_workers", "Workers of the placement that the plan found best.", ("role",))

SCALE_CHANGES = Counter(
    "pdserve_scale_changes", "Changes of the numbers of workers to follow the load.", {"reason": SCALE_REASONS}
)

# Workers, as each frame reports them to the router
WORKER = ("worker", "role")
WORKER_UP = Gauge("pdserve_worker_up", "1 while the session with the worker stands.", WORKER)
READY_WORKERS = Gauge("pdserve_ready_workers", "Workers of a role that are up.", ("role",))
WORKER_RANKS = Gauge(
    "pdserve_worker_ranks", "Ranks of the worker, of a micro-batch its share; 0 while it is down.", WORKER
)
WORKER_LIMITS = Gauge("pdserve_worker_limit", "Sequences and new tokens of a step at most.", (*WORKER, "limit"))
WORKER_PRICE = Gauge("pdserve_worker_usd_per_hour", "List price of these ranks' devices, where known.", WORKER)
RESTARTS = Counter(
    "pdserve_worker_restarts", "Workers replaced by a new process.", {"role": [each.value for each in WorkerRole]}
)
WORKER_BUSY_SECONDS = Counter(
    "pdserve_worker_busy_seconds", "Seconds of each worker's steps, by kind.", (*WORKER, "kind")
)
WORKER_PREDICTED_BUSY_SECONDS = Counter(
    "pdserve_worker_predicted_busy_seconds", "What the cost model said of them.", (*WORKER, "kind")
)
STEP_SECONDS = Histogram("pdserve_step_seconds", "Engine steps by kind.", ("role", "kind"), ITL_BUCKETS_S)
PREDICTED_STEP_SECONDS = Histogram(
    "pdserve_predicted_step_seconds", "What the cost model said of each.", ("role", "kind"), ITL_BUCKETS_S
)
STEP_TOKENS = Histogram("pdserve_step_tokens", "New tokens per step.", ("role",), TOKENS_BUCKETS)
RUNNING = Gauge("pdserve_running_sequences", "Sequences being computed.", WORKER)
WAITING = Gauge("pdserve_waiting_sequences", "Sequences waiting for blocks or budget.", WORKER)
PARKED = Gauge("pdserve_parked_sequences", "Prefilled prompts waiting to be pulled.", WORKER)
KV_BLOCKS = Gauge("pdserve_kv_blocks", "KV blocks by state.", (*WORKER, "state"))
PREEMPTIONS = Counter("pdserve_preemptions", "Sequences preempted for blocks.", WORKER)
SWAP_OUTS = Counter("pdserve_swap_outs", "Preempted sequences copied to the host.", WORKER)
SWAP_INS = Counter("pdserve_swap_ins", "Preempted sequences copied back.", WORKER)
GUESSES = Counter("pdserve_guesses", "Tokens that speculative decoding guessed.", WORKER)
RIGHT_GUESSES = Counter("pdserve_right_guesses", "Guesses that were the answers' next tokens.", WORKER)
RESTORED_TOKENS = Counter("pdserve_kv_tier_restored_tokens", "Prompt tokens whose KV the tier had.", WORKER)
RESTORE_SAVED_SECONDS = Counter(
    "pdserve_kv_tier_saved_seconds",
    "What these tokens would have taken to compute, as predicted, less the seconds of reading them.",
    WORKER,
)
RESTORES = Counter("pdserve_kv_tier_restores", "Prompts that waited for KV of the tier.", WORKER)
RESTORES_GIVEN_UP = Counter(
    "pdserve_kv_tier_restores_given_up", "Those that computed it, because the tier took as long.", WORKER
)
TIER_OFF = Gauge("pdserve_kv_tier_off", "1 if the KV tier failed, until the worker starts again.", WORKER)
TRANSFER_SECONDS = Histogram(
    "pdserve_kv_transfer_seconds", "Pulls, from request to verified.", ("transport",), TTFT_BUCKETS_S
)
TRANSFER_BYTES = Histogram("pdserve_kv_transfer_bytes", "Bytes per pull.", ("transport",), BYTES_BUCKETS)
TRANSFER_FAILURES = Counter(
    "pdserve_kv_transfer_failures",
    "Failed pulls by stage and transport.",
    {"stage": FAILURE_STAGES, "transport": (*TRANSPORTS, NO_TRANSPORT)},
)
LINK_PULLS = Counter(
    "pdserve_kv_link_pulls",
    "Pulls from a prefill worker by result: done, failed, ended (by token 0) or aborted (the request ended meanwhile).",
    ("source", "worker", "result"),
)
LINK_BYTES = Counter("pdserve_kv_link_bytes", "Bytes of successful pulls.", ("source", "worker"))
LINK_SECONDS = Counter("pdserve_kv_link_seconds", "Seconds of successful pulls.", ("source", "worker"))

FAMILIES = tuple(each for each in tuple(vars().values()) if isinstance(each, Metric))
OF_WORKERS = FAMILIES[FAMILIES.index(WORKER_UP) :]
"""Those that one of several routers shows."""
