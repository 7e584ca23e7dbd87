"""Blame for the end of workers: finds the request that ends every worker which computes it. Pure.

A worker's end has no cause that the router could know. One loss is an ordinary fail-over; after `MAX_LOSSES` a request
is a *suspect*. Suspects are tried one at a time, `TRIAL_WAIT_S` after the loss: the first is *on trial*, the others
wait. A worker that ends in a trial is the fault of the request on trial if it computed nothing else. Otherwise each of
what it computed may have ended it: the same one is tried again apart from the others, and a second loss is its fault.
Others that lost their first worker wait for that trial alone, then go on together. A suspect passes its trial with 4
new tokens, and four times as many after each further loss, since the first may only repeat what a lost worker computed
and the router did not read.

A request thus ends three workers if it is alone, four beside others, and more only if it passes a trial by such tokens.
Another fails in its place only if new ones like it ended the worker beside that one in both of its trials.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdserve.router.cluster.worker import Worker
from pdserve.router.requests.request import Attempt

MAX_LOSSES = 2
"""Lost workers after which a request that they computed is a suspect."""
MAX_TRIALS = 2
"""Workers that a request ends while it is on trial, beside others, until it fails."""
TRIAL_WAIT_S = 1.0
"""Seconds from a loss to a trial: by then, what ended together with the worker is known to be lost."""


@dataclass(slots=True)
class _Losses:
    """Of one request."""

    num: int = 0
    process: object = None
    """The last one."""
    num_trials: int = 0
    """While it was on trial, since it last passed."""
    try_at_s: float = 0.0


class Blame:
    """Losses of the requests in flight, by id."""

    def __init__(self) -> None:
        self._losses: dict[int, _Losses] = {}
        self.suspects: dict[int, None] = {}
        """In the order of their trials."""
        self._bystanders: set[int] = set()
        """Requests that lost their first worker beside the one on trial."""

    @property
    def on_trial(self) -> int | None:
        return next(iter(self.suspects), None)

    def worker_lost(self, process: object, computed: Iterable[int], now_s: float) -> int | None:
        """Count the end of a worker for the requests that it computed; return the one whose fault it is, if known.

        Args:
            process: that of the worker. Its micro-batches are lost one after the other, and with each what the one
                before it held: they count once.
        """
        losses = {request_id: self._losses.setdefault(request_id, _Losses()) for request_id in computed}
        losses = {request_id: each for request_id, each in losses.items() if each.process != process}
        on_trial = self.on_trial
        for request_id, each in losses.items():
            each.num += 1
            each.process = process
            if each.num >= MAX_LOSSES:
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
        """Whether the request is a suspect, or waits for the trial of one."""
        return request_id in self.suspects or request_id in self._bystanders

    def has_to_wait(self, request_id: int, now_s: float) -> bool:
        """Whether the request has to wait for a trial: its own or, a bystander, another's."""
        if request_id not in self.suspects:
            return request_id in self._bystanders
        return request_id != self.on_trial or now_s < self._losses[request_id].try_at_s

    def passes(self, request_id: int, num_new_tokens: int) -> bool:
        """Whether a suspect has just passed its trial, with ``num_new_tokens`` since it began."""
        if request_id not in self.suspects or num_new_tokens < 4 ** max(1, self._losses[request_id].num - 1):
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
    computed = {attempt for attempt in held if attempt.is_computed_by(worker)}
    bound = [attempt for attempt in held if worker is attempt.decode and not attempt.has_reserved]
    computed.update(bound[: worker.max_batch_size])
    unheard = [attempt for attempt in held if worker is attempt.prefill and not attempt.started_s]
    num_tokens = 0
    for attempt in sorted(unheard, key=lambda attempt: attempt.request.spec.arrived_s):
        if num_tokens >= 2 * worker.max_batch_tokens:
            break
        num_tokens += attempt.blocks(worker.block_size).num_tokens
        computed.add(attempt)
    return [attempt for attempt in held if attempt in computed]
