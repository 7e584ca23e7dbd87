"""What is tried again, when and where: `Retries` after errors, and `Blame` for the end of workers. Pure.

What a lost or draining worker held goes on at once: it was not at fault, and clients wait. After an error an attempt
waits, few are retried at once, and workers that failed are avoided for a while.

A worker's end has no cause that the router could know, so blame goes by what was there when it happened:

1. Each request counts the workers that ended while they computed it. One is an ordinary fail-over; with `MAX_LOSSES`
   the request is a *suspect*.
2. Suspects are tried one at a time, in the order in which they became suspects. The first is *on trial*: it begins
   `TRIAL_WAIT_S` after its last loss, beside requests that are no suspects. The others wait.
3. It passes with 4 new tokens after two losses, 16 after three, and so on: the first ones may only repeat what a lost
   worker had computed and the router had not read. Then it is no suspect until its next loss. A request with as many
   tokens between two losses has passed already: of workers that end now and then, each with hundreds of answers, so
   many suspects would be left that their trials take minutes.
4. If a worker ends in its trial that computed nothing else, or for the second time (`MAX_TRIALS`) since it passed one,
   it is at fault and fails.
5. Requests that lost their first worker in a trial are *bystanders*: they wait for the end of that trial, so that the
   second worker it may end computes nothing that has ended one before.

A request thus ends three workers if it is alone, four beside others, and more only if it passes trials. Another fails
in its place only if new ones like it end the worker beside that one in both of its trials.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pdserve.router.cluster.worker import Worker
from pdserve.router.requests.attempt import Attempt, Decoding, Parked, Prefilling, Queued, State

MAX_FAILURES = 2
"""Failed steps after which a request is blamed, and requests with one after which a worker is."""
BUDGET, MIN_RETRIES = 0.2, 3
"""Retries under way, as a share of the answers in flight, and at least: the defaults of Envoy's ``retry_budget``."""
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0
MAX_LOSSES = 2
"""Lost workers after which a request that they computed is a suspect."""
MAX_TRIALS = 2
"""Workers that a request ends while it is on trial, beside others, until it fails."""
TRIAL_WAIT_S = 1.0
"""Seconds from a loss to a trial: by then, what ended together with the worker is known to be lost."""


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

    def retry_at_s(self, attempt: Attempt, now_s: float) -> float:
        """The attempt ended with an error: when the next may begin."""
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


@dataclass(slots=True)
class _Losses:
    """Of one request."""

    num: int = 0
    process: object = None
    """The last one."""
    num_trials: int = 0
    """Workers that ended while it was on trial, since it last passed one."""
    try_at_s: float = 0.0

    @property
    def num_trial_tokens(self) -> int:
        """New tokens with which a trial is passed."""
        return int(4 ** max(1, self.num - 1))


class Blame:
    """Losses of the requests in flight, by id."""

    def __init__(self) -> None:
        self._losses: dict[int, _Losses] = {}
        self.suspects: dict[int, None] = {}
        """In the order of their trials."""
        self._bystanders: set[int] = set()

    @property
    def on_trial(self) -> int | None:
        return next(iter(self.suspects), None)

    def worker_lost(self, process: object, computed: Mapping[int, int], now_s: float) -> int | None:
        """Count the end of a worker for the requests that it computed; return the one whose fault it is, if known.

        Args:
            process: that of the worker. Its micro-batches are lost one after the other, and with each what the one
                before it held: they count once.
            computed: requests, and the new tokens of each since it was placed there.
        """
        losses = {request_id: self._losses.setdefault(request_id, _Losses()) for request_id in computed}
        losses = {request_id: each for request_id, each in losses.items() if each.process != process}
        on_trial = self.on_trial
        for request_id, each in losses.items():
            each.num += 1
            each.process = process
            has_passed = request_id not in self.suspects and computed[request_id] >= each.num_trial_tokens
            if each.num >= MAX_LOSSES and not has_passed:
                each.try_at_s = now_s + TRIAL_WAIT_S
                self.suspects.setdefault(request_id)
                self._bystanders.discard(request_id)
            elif on_trial in losses:
                self._bystanders.add(request_id)
        if on_trial not in losses:
            return None
        losses[on_trial].num_trials += 1
        return on_trial if len(losses) == 1 or losses[on_trial].num_trials >= MAX_TRIALS else None

    def num_losses(self, request_id: int) -> int:
        """Workers that ended while they computed the request."""
        return self._losses[request_id].num

    def is_held(self, request_id: int) -> bool:
        """Whether the request is a suspect or a bystander."""
        return request_id in self.suspects or request_id in self._bystanders

    def has_to_wait(self, request_id: int, now_s: float) -> bool:
        """Whether the request has to wait for a trial: its own or, a bystander, another's."""
        if request_id not in self.suspects:
            return request_id in self._bystanders
        return request_id != self.on_trial or now_s < self._losses[request_id].try_at_s

    def passes(self, request_id: int, num_new_tokens: int) -> bool:
        """Whether a suspect has just passed its trial, with ``num_new_tokens`` since it began."""
        if request_id not in self.suspects or num_new_tokens < self._losses[request_id].num_trial_tokens:
            return False
        self._losses[request_id].num_trials = 0
        self._remove(request_id)
        return True

    def forget(self, request_id: int) -> bool:
        """The request is over; return whether it was a suspect."""
        self._losses.pop(request_id, None)
        self._bystanders.discard(request_id)
        is_suspect = request_id in self.suspects
        if is_suspect:
            self._remove(request_id)
        return is_suspect

    def _remove(self, suspect: int) -> None:
        if suspect == self.on_trial:
            self._bystanders.clear()
        del self.suspects[suspect]


def computed_by(worker: Worker, held: Sequence[Attempt]) -> list[Attempt]:
    """Of the attempts that ``worker`` holds, those which its last steps may have had rows of: what it said to have
    started or reserved, and, because it may have ended before that was heard, the earliest others: answers that its
    batch holds, and prompts that two steps hold."""
    computed = {attempt for attempt in held if _is_computed_by(worker, attempt.state)}
    unheard = [attempt for attempt in held if attempt.state.unreported is worker]
    bound = [attempt for attempt in unheard if isinstance(attempt.state, Parked)]
    computed.update(bound[: worker.max_batch_size])
    prompts = [attempt for attempt in unheard if isinstance(attempt.state, Prefilling)]
    num_tokens = 0
    for attempt in sorted(prompts, key=lambda attempt: attempt.request.spec.arrived_s):
        if num_tokens >= 2 * worker.max_batch_tokens:
            break
        num_tokens += attempt.blocks(worker.block_size).num_tokens
        computed.add(attempt)
    return [attempt for attempt in held if attempt in computed]


def _is_computed_by(worker: Worker, state: State) -> bool:
    """Whether steps of ``worker``, which holds the attempt, may have rows of it, as far as it has said."""
    match state:
        case Prefilling():
            return state.started_s is not None
        case Parked() if worker is state.prefill:
            return state.started_s is not None and state.first_token_s is None
        case Parked():
            return state.unreported is None
    return isinstance(state, Decoding) and worker is state.worker
