"""Limits of retries: how many at once, after how long, and which workers are left alone meanwhile. Pure.

They apply to errors. What a lost or draining worker held goes on at once: it was not at fault, and clients wait.
"""

from __future__ import annotations

MAX_FAILURES = 2
"""Failed steps after which a request is blamed, and requests with one after which a worker is."""
BUDGET, MIN_RETRIES = 0.2, 3
"""Retries under way, as a share of the answers in flight, and at least: the defaults of Envoy's ``retry_budget``."""
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0


def may_retry(num_retrying: int, num_in_flight: int) -> bool:
    """Whether one more retry may begin beside ``num_retrying``, which have no token yet."""
    return num_retrying < max(MIN_RETRIES, BUDGET * num_in_flight)


def backoff_s(num_errors: int, jitter: float) -> float:
    """Seconds to wait after the ``num_errors``-th error in a row: doubling.

    Args:
        jitter: in [0, 1); spreads the wait over +-25 %.
    """
    return min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2.0 ** min(num_errors - 1, 16)) * (0.75 + 0.5 * jitter)


class Breaker:
    """Circuit breaker of a worker on which steps failed (Nygard, Release It!, chapter 5): a worker that fails at once
    looks idle, and would draw every request. It ends with the next token from the worker."""

    def __init__(self) -> None:
        self._requests: set[int] = set()
        """Those that have failed there; a single one may be at fault itself."""
        self._until_s = 0.0

    def failed(self, request_id: int, until_s: float) -> None:
        """A step of the worker failed; once it is blamed, it is left alone until ``until_s``."""
        self._requests.add(request_id)
        self.tried(until_s)

    def tried(self, until_s: float) -> None:
        """The worker was given a request; if it is blamed, it gets no other until ``until_s``."""
        if len(self._requests) >= MAX_FAILURES:
            self._until_s = until_s

    def is_open(self, now_s: float) -> bool:
        return now_s < self._until_s
