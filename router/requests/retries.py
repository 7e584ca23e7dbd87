"""Limits of retries: how many at once, after how long, and which workers are left alone meanwhile. Pure.

They apply to errors. What a lost or draining worker held goes on at once: it was not at fault, and clients wait.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from pdserve.router.cluster.worker import Worker
from pdserve.router.requests.request import Attempt

MAX_FAILURES = 2
"""Failed steps after which a request is blamed, and requests with one after which a worker is."""
BUDGET, MIN_RETRIES = 0.2, 3
"""Retries under way, as a share of the answers in flight, and at least: the defaults of Envoy's ``retry_budget``."""
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0


def backoff_s(num_errors: int, jitter: float) -> float:
    """Seconds to wait after the ``num_errors``-th error in a row: doubling.

    Args:
        jitter: in [0, 1); spreads the wait over +-25 %.
    """
    return min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2.0 ** min(num_errors - 1, 16)) * (0.75 + 0.5 * jitter)


@dataclass(slots=True)
class _Breaker:
    """Circuit breaker of a worker on which steps failed (Nygard, Release It!, chapter 5): a worker that fails at once
    looks idle, and would draw every request. It ends with the next token from the worker."""

    requests: set[int] = field(default_factory=set)
    """Those that have failed there; a single one may be at fault itself."""
    until_s: float = 0.0


class Retries:
    """Retries under way, and workers that failed. A replaced worker is another key and starts clean."""

    def __init__(self, cut_off_s: float) -> None:
        """``cut_off_s``: seconds for which a worker is left alone."""
        self._cut_off_s = cut_off_s
        self._cut_off_until_s: dict[tuple[Worker, Worker], float] = {}
        """By prefill worker and decode worker that failed to pull from it."""
        self._breakers: dict[Worker, _Breaker] = {}
        self._retrying: set[int] = set()
        """Attempts that follow an error and have no token yet, by request id."""
        self._random = random.Random(0)

    def has_to_wait(self, attempt: Attempt, num_in_flight: int, now_s: float) -> bool:
        """Whether the attempt follows an error and may not begin yet, beside ``num_in_flight`` answers."""
        if not attempt.num_errors:
            return False
        return now_s < attempt.retry_at_s or len(self._retrying) >= max(MIN_RETRIES, BUDGET * num_in_flight)

    def began(self, attempt: Attempt, worker: Worker, now_s: float) -> None:
        """``worker`` was given the attempt; if it is blamed, it gets no other for a while."""
        if attempt.num_errors:
            self._retrying.add(attempt.request_id)
        self._leave_alone(worker, now_s)

    def _leave_alone(self, worker: Worker, now_s: float) -> None:
        breaker = self._breakers.get(worker)
        if breaker is not None and len(breaker.requests) >= MAX_FAILURES:
            breaker.until_s = now_s + self._cut_off_s

    def failed(self, attempt: Attempt, now_s: float) -> None:
        """An attempt ended with an error: the next one has to wait."""
        attempt.num_errors += 1
        attempt.retry_at_s = now_s + backoff_s(attempt.num_errors, self._random.random())

    def over(self, request_id: int) -> None:
        """The retry has a token, or ended."""
        self._retrying.discard(request_id)

    def step_failed(self, attempt: Attempt, worker: Worker, now_s: float) -> None:
        """A step of ``worker`` failed."""
        attempt.failed_on = worker
        breaker = self._breakers.setdefault(worker, _Breaker())
        breaker.requests.add(attempt.request_id)
        self._leave_alone(worker, now_s)

    def clear(self, worker: Worker) -> None:
        """``worker`` sent a token, or is gone."""
        if self._breakers:
            self._breakers.pop(worker, None)

    def pull_failed(self, prefill: Worker, decode: Worker, now_s: float) -> None:
        self._cut_off_until_s = {pair: until_s for pair, until_s in self._cut_off_until_s.items() if until_s > now_s}
        self._cut_off_until_s[prefill, decode] = now_s + self._cut_off_s

    def avoids(self, attempt: Attempt, worker: Worker, now_s: float) -> bool:
        """Whether ``worker`` failed the attempt, or several others recently, or to pull from its prefill worker."""
        if worker is attempt.failed_on:
            return True
        breaker = self._breakers.get(worker)
        if breaker is not None and now_s < breaker.until_s:
            return True
        return attempt.prefill is not None and now_s < self._cut_off_until_s.get((attempt.prefill, worker), 0.0)

    def avoids_any(self, attempt: Attempt) -> bool:
        """Whether `avoids` may hold for some worker."""
        return bool(self._breakers or self._cut_off_until_s or attempt.failed_on is not None)
