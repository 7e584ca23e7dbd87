"""Settings of the dispatcher."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.contracts.deployment import DEFAULT_POLICY, Policy, SloConfig

SWEEP_S = 0.1
"""Seconds between two calls of `pdserve.router.requests.dispatch.Dispatcher.sweep`."""
NO_OBJECTIVES = SloConfig(ttft_seconds=0.0, tpot_seconds=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSettings:
    policy: Policy = DEFAULT_POLICY
    """Name of the placement policy."""
    max_in_flight: int = 1024
    """``router.max_queued_requests``: choices that all routers have accepted and that have not ended. A request for n
    answers counts as n."""
    slo: SloConfig = NO_OBJECTIVES
    """Tiers; an objective of 0, which no deployment file has, is none. Without one for TPOT, decode workers prefill
    nothing."""
    max_silence_s: float = 600.0
    """Seconds without a token, from arrival or since the last one, after which a request is given up."""
    worker_wait_s: float = 60.0
    """Maximum seconds that a request which had a worker waits for the next one: its client may have tokens already."""
    new_wait_s: float = 5.0
    """Maximum seconds that a new request waits for a worker. Long enough to hide a quick restart of a worker; a client
    that would wait longer had better retry, perhaps elsewhere."""
    cut_off_s: float = 10.0
    """Seconds after a failed pull during which its decode worker is avoided for prompts of the same prefill worker, or
    no prefix is pulled from its source, and for which a worker is left alone that failed several requests."""
