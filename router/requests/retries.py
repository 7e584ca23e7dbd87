"""When an attempt that follows an error may begin, and which workers are avoided for a while. Pure.

`pdserve.router.requests.failover` tells it of errors and tokens, and `pdserve.router.requests.placer` asks it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from pdserve.router.cluster.worker import Worker
from pdserve.router.requests.attempt import Attempt, Parked, Queued

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


class Retries:
    """When errors are retried, and which workers are avoided. A replaced worker is another key and starts clean."""

    def __init__(self, cut_off_s: float) -> None:
        """``cut_off_s``: seconds for which a worker is avoided."""
        self._cut_off_s = cut_off_s
        self._avoid: dict[tuple[Worker | None, Worker], float] = {}
        """Until when the second is avoided for prompts that are parked on the first; for all without a first."""
        self._failed: dict[Worker, set[int]] = {}
        """Requests that failed on a worker since its last token. A single one may be at fault itself. With more the
        worker is: it looks idle, and would draw every request (circuit breaker; Nygard, Release It!, chapter 5)."""
        self._random = random.Random(0)

    def has_to_wait(self, attempt: Attempt, num_retrying: int, num_in_flight: int, now_s: float) -> bool:
        """Whether a queued attempt follows an error and may not begin yet, beside ``num_retrying`` that do, too, and
        ``num_in_flight`` answers."""
        if not attempt.num_errors:
            return False
        assert isinstance(attempt.state, Queued)
        return now_s < attempt.state.retry_at_s or num_retrying >= max(MIN_RETRIES, BUDGET * num_in_flight)

    def count_error(self, attempt: Attempt, now_s: float) -> float:
        """Count an error that ended the attempt; return the instant before which the next may not begin."""
        attempt.num_errors += 1
        return now_s + backoff_s(attempt.num_errors, self._random.random())

    def step_failed(self, attempt: Attempt, worker: Worker, now_s: float) -> None:
        """A step of ``worker`` failed."""
        attempt.failed_on = worker
        self._failed.setdefault(worker, set()).add(attempt.request_id)
        self.was_given(worker, now_s)

    def was_given(self, worker: Worker, now_s: float) -> None:
        """``worker`` got an attempt; if it is blamed, it gets no other for a while."""
        if self._failed and len(self._failed.get(worker, ())) >= MAX_FAILURES:
            self._avoid[None, worker] = now_s + self._cut_off_s

    def clear(self, worker: Worker) -> None:
        """``worker`` sent a token, or is gone."""
        if worker in self._failed:
            del self._failed[worker]
            self._avoid.pop((None, worker), None)

    def pull_failed(self, prefill: Worker, decode: Worker, now_s: float) -> None:
        self._avoid[prefill, decode] = now_s + self._cut_off_s

    def avoided(self, attempt: Attempt, workers: Iterable[Worker], now_s: float) -> set[Worker]:
        """Those of ``workers`` that failed the attempt, several others recently, or to pull from where it is parked."""
        if not self._avoid and attempt.failed_on is None:
            return set()
        self._avoid = {pair: until_s for pair, until_s in self._avoid.items() if now_s < until_s}
        prefill = attempt.state.prefill if isinstance(attempt.state, Parked) else None
        avoid = {decode for source, decode in self._avoid if source is None or source is prefill}
        return {worker for worker in workers if worker in avoid or worker is attempt.failed_on}
