"""Rules of the ``goodput`` policy that need no worker: probabilities, what a second of prefill costs, turns of held
requests, and when refused ones are asked back. Pure.
"""

from __future__ import annotations

from collections import Counter
from math import exp, inf, tanh

from pdserve.contracts.worker_config import whole_worker_id
from pdserve.router.requests.placement import Arrival

TPOT_SPREAD = 0.05
"""Error of a predicted TPOT, as a share of the objective: the scale of a logistic distribution."""
SLACK_MISSES = 0.02
"""Misses that a wait as long as the objective counts as: decides where nothing binds."""
COST_MEMORY_S = 2.0
"""Time after which a placement counts 1 / e for the cost of prefill seconds."""
LATE_S = 20.0
"""Seconds after which a late prompt is due: it runs behind others for that long. One that is held has a turn then."""
TURN = 8
"""One of so many prompts placed is a held one that has a turn."""
MAX_RETRY_AFTER_S = 60.0
"""Refused requests are asked to come back within this."""


def chance(margin: float) -> float:
    """Probability of a margin above 0 whose error has a logistic distribution of scale 1."""
    return 0.5 + 0.5 * tanh(margin / 2)


def tpot_chance(tpot: float) -> float:
    """Probability of meeting TPOT; ``tpot`` is the predicted one, as a share of the objective."""
    return chance((1 - tpot) / TPOT_SPREAD)


def slack_misses(weight: float, share: float) -> float:
    """What waiting counts as; ``share``: of the objective."""
    return SLACK_MISSES * (weight or 1.0) * share


def handoff_score(ttft_chance: float, decode_score: float) -> float:
    """Score of a prompt that is handed off to a worker with ``decode_score`` for its answer. If TTFT is missed, the
    misses that decoding causes remain."""
    return ttft_chance * decode_score if decode_score > 0 else decode_score


class Joining:
    """Requests that will be handed off, to a worker not chosen yet."""

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}
        """Prompt tokens by request id."""
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, request_id: int, num_tokens: int) -> None:
        self._tokens[request_id] = num_tokens
        self._num_tokens += num_tokens

    def remove(self, request_id: int) -> None:
        self._num_tokens -= self._tokens.pop(request_id, 0)

    def part_of(self, num_workers: float) -> tuple[float, float]:
        """Requests, and tokens of their prompts, that each of so many workers will get."""
        return (len(self) / num_workers, self._num_tokens / num_workers) if num_workers else (0.0, 0.0)


class Pulls:
    """Expected pulls of prompts that are handed off, until they have ended."""

    def __init__(self) -> None:
        self._pulls: dict[int, tuple[str, int]] = {}
        """Id of the worker that computes a prompt, and tokens pulled from it, by request id."""
        self._from: Counter[str] = Counter()
        """Tokens by id of the worker."""
        self._shared: set[str] = set()
        """Ids of workers from which those that are pending may have waited for each other."""

    def add(self, request_id: int, worker_id: str, num_tokens: int) -> None:
        (self._shared.add if self._from[worker_id] else self._shared.discard)(worker_id)
        self._pulls[request_id] = worker_id, num_tokens
        self._from[worker_id] += num_tokens

    def remove(self, request_id: int) -> None:
        worker_id, num_tokens = self._pulls.pop(request_id, ("", 0))
        self._from[worker_id] -= num_tokens
        if not self._from[worker_id]:
            del self._from[worker_id]

    def are_shared(self, source_id: str) -> bool:
        """Whether those from a worker, of which this is the whole id, may have waited for each other."""
        return any(whole_worker_id(worker_id) == source_id for worker_id in self._shared)

    def num_tokens(self, worker_id: str, num_decode: int, num_after: int) -> float:
        """Tokens on the link of a worker, or on that of each of so many decode workers, whichever has more, before
        those of a prompt after which ``num_after`` tokens are computed on the worker. Others have as large a part
        after it."""
        num_from = self._from[worker_id]
        share_before = max(0.0, 1 - num_after / num_from) if num_from else 1.0
        return share_before * max(num_from, self._from.total() / num_decode)


class PrefillCost:
    """Expected misses that a second of prefill has caused of late among the prompts that arrived behind it."""

    def __init__(self) -> None:
        self._sum, self._sum_at_s = 0.0, 0.0

    def add(self, misses_per_s: float) -> None:
        """A prompt was placed that would miss TTFT by so much more with each second of delay."""
        self._sum += misses_per_s

    def misses_per_s(self, now_s: float) -> float:
        """Misses among all workers that a second of delay to each arrival would cause, per second of arrivals."""
        self._sum *= exp((self._sum_at_s - now_s) / COST_MEMORY_S)
        self._sum_at_s = now_s
        return self._sum / COST_MEMORY_S


class HeldTurns:
    """Turns of held requests: one that has waited for `LATE_S` is one of `TURN` prompts, or `LATE_S` after the last."""

    def __init__(self) -> None:
        self._num_placed, self._turn_s = 0, -inf
        """Prompts placed since the last turn, and its instant."""

    def is_due(self, arrival: Arrival) -> bool:
        is_next = self._num_placed >= TURN or arrival.now_s - self._turn_s >= LATE_S
        return is_next and self._has_waited(arrival)

    def placed(self, arrival: Arrival, *, is_late: bool) -> None:
        self._num_placed += 1
        if is_late and self._has_waited(arrival):
            self._num_placed, self._turn_s = 0, arrival.now_s

    @staticmethod
    def _has_waited(arrival: Arrival) -> bool:
        return arrival.weight > 0 and arrival.now_s - arrival.queued_s >= LATE_S


class RetryTimes:
    """When refused requests are asked back: once the backlog is gone, one after the other, as fast as prompts are
    computed and answers end."""

    def __init__(self) -> None:
        self._next_s = 0.0
        """Instant by which the backlog is gone, with all that was refused before."""
        self._prefill_s = 0.0
        """Mean seconds of recent prompts."""

    def placed(self, prefill_s: float) -> None:
        self._prefill_s += 0.1 * (prefill_s - self._prefill_s)

    def retry_after_s(
        self, now_s: float, backlog_s: float, prefill_s: float, num_workers: float, ends_per_s: float
    ) -> float:
        """Seconds from now.

        Args:
            backlog_s: of what waits now.
            prefill_s: of the refused request.
            num_workers: workers that compute prompts.
            ends_per_s: answers that end per second; 0 if none decodes.
        """
        end_s = 1 / ends_per_s if ends_per_s else 0.0
        spacing_s = max(max(prefill_s, self._prefill_s) / num_workers, end_s)
        self._next_s = min(max(self._next_s, now_s + backlog_s) + spacing_s, now_s + MAX_RETRY_AFTER_S)
        return self._next_s - now_s
