"""Fail-over: what becomes of attempts that were lost, refused or failed. The dispatcher calls it with each.

What a lost or draining worker held goes on at once: it was not at fault, and clients wait. If the prompt is still
parked, another decode worker pulls it; otherwise the attempt is queued again: after an error once
`pdserve.router.requests.retries` allows it, after two lost workers once `pdserve.router.requests.blame` does. Never
ends a request: it returns the error with which the dispatcher does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from pdserve.contracts.events import RefusalCode, RequestEvent
from pdserve.contracts.events import RequestEventKind as Kind
from pdserve.contracts.worker_config import whole_worker_id
from pdserve.router.cluster.worker import Worker
from pdserve.router.requests.admission import MIN_RETRY_AFTER_S
from pdserve.router.requests.attempt import Attempt, Loss, Parked, Prefilling
from pdserve.router.requests.attempt_table import AttemptTable
from pdserve.router.requests.blame import MAX_TRIAL_TOKENS, Blame, computed_by
from pdserve.router.requests.observer import DispatchObserver
from pdserve.router.requests.placer import Placer
from pdserve.router.requests.request import GenerationError
from pdserve.router.requests.retries import MAX_FAILURES, Retries

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 8
"""Maximum dispatches of one choice, without those that are excused."""
MAX_EXCUSED = 24
"""Maximum dispatches that are excused: they lost their worker in a trial, before it computed them, or after
`MAX_TRIAL_TOKENS`."""
MAX_NAMED = 8
"""Suspects named in one line of the log."""


class FailOver:
    """Has attempts go on that lost a worker, or tells why they cannot."""

    def __init__(
        self,
        table: AttemptTable,
        placer: Placer,
        blame: Blame,
        retries: Retries,
        observer: DispatchObserver,
        now_s: Callable[[], float],
        *,
        max_silence_s: float,
    ) -> None:
        """
        Args:
            blame, retries: those that the placer asks.
            max_silence_s: as in `pdserve.router.requests.settings.DispatchSettings`.
        """
        self._table, self._placer, self._blame, self._retries = table, placer, blame, retries
        self._observer, self._now_s, self._max_silence_s = observer, now_s, max_silence_s

    def deadline_s(self, attempt: Attempt) -> float:
        """Instant at which a choice is given up, unless its next token comes before."""
        return attempt.heard_s + self._max_silence_s

    def silence(self, attempt: Attempt) -> GenerationError | None:
        """Error of a choice that has been silent for too long."""
        if self._now_s() < self.deadline_s(attempt):
            return None
        remedy = "raise router.max_silence_seconds, or add workers"
        return GenerationError(504, f"no token came for {self._max_silence_s:g} s: {remedy}")

    # What happened. Each method that returns an error has the attempt go on if there is none.

    def worker_lost(self, worker: Worker, lost: Sequence[Attempt]) -> tuple[Attempt, GenerationError] | None:
        """Count the end of ``worker`` for ``lost``, which it held; return the one whose fault it is, if known, and why
        that fails."""
        self._retries.clear(worker)
        # The end of one that drains was asked for.
        computed = [] if worker.is_draining else computed_by(worker, lost)
        num_new_tokens = {attempt.request_id: attempt.num_new_tokens for attempt in computed}
        is_in_trial = not self._blame.on_trial.isdisjoint(num_new_tokens)
        for attempt in lost:
            is_excused = is_in_trial or attempt.num_new_tokens >= MAX_TRIAL_TOKENS
            attempt.num_excused += is_excused or attempt.request_id not in num_new_tokens
        if worker.is_draining:
            return None
        whole_id = whole_worker_id(worker.worker_id)
        process, is_part = (whole_id, worker.epoch), whole_id != worker.worker_id
        owners = {attempt.request_id: attempt.request for attempt in computed}
        culprit = self._blame.worker_lost(process, num_new_tokens, self._now_s(), owners=owners, is_part=is_part)
        held = [attempt.name for attempt in computed if self._blame.is_held(attempt.request_id)]
        if held:
            names = ", ".join(held[:MAX_NAMED]) + (f" and {len(held) - MAX_NAMED} more" if held[MAX_NAMED:] else "")
            log.warning("what ended worker %s may be one of the requests %s", worker.worker_id, names)
        if culprit is None:
            return None
        message = f"{self._blame.num_losses(culprit)} workers ended while they computed this request"
        return self._table.all[culprit], GenerationError(500, message)

    def given_up(self, attempt: Attempt, worker: Worker, event: RequestEvent) -> GenerationError | None:
        """``worker`` ended the attempt before its last token."""
        match attempt.state, event.kind:
            case _, Kind.REJECTED if event.refusal not in (RefusalCode.DRAINING, RefusalCode.OVERLOADED):
                return GenerationError(400, event.message)
            case _, Kind.REJECTED:
                worker.is_draining |= event.refusal is RefusalCode.DRAINING
                is_error = event.refusal is RefusalCode.OVERLOADED
                return self.go_on_without(attempt, worker, "refused", event.message, is_error=is_error)
            case _, Kind.FAILED:
                return self.failed(attempt, worker, event.message)
            case Parked() as state, Kind.KV_UNAVAILABLE if worker is state.prefill:
                return self._retry(attempt, "expired", event.message, is_error=False)  # for want of room to decode
            case Parked() as state, Kind.KV_UNAVAILABLE if event.refusal is not RefusalCode.SOURCE:
                self._retries.pull_failed(state.prefill, worker, self._now_s())
                return self.go_on_without(attempt, worker, "kv_unavailable", event.message)
            case _, Kind.KV_UNAVAILABLE:
                return self._retry(attempt, "kv_unavailable", event.message)
            case _, Kind.RELEASED:
                # A decode worker has it all and was lost before its join was heard: there is nothing left to pull.
                message = "the worker that pulled the prompt was lost"
                return self._retry(attempt, "worker_lost", message, is_error=False)
        return self._retry(attempt, "cancelled", event.message)

    def failed(self, attempt: Attempt, worker: Worker, message: str) -> GenerationError | None:
        """A step of ``worker`` failed, or what it sent cannot be used."""
        attempt.num_failures += 1
        if self._now_s() < self.deadline_s(attempt):  # workers enforce deadlines, too
            self._retries.step_failed(attempt, worker, self._now_s())
        return self._retry(attempt, "failed", message)

    def token_received(self, attempt: Attempt, worker: Worker) -> None:
        """The attempt has a further token."""
        self._retries.clear(worker)
        if self._blame.on_trial:
            self._release(self._blame.token_received(attempt.request_id, attempt.num_new_tokens))

    def ended(self, attempt: Attempt) -> None:
        """The choice is over."""
        self._release(self._blame.forget(attempt.request_id))

    def _release(self, request_ids: Iterable[int]) -> None:
        """Have those requests placed that waited for a trial."""
        for request_id in request_ids:
            if request_id in self._table.queued:
                self._placer.put(self._table.queued[request_id])

    # How it goes on

    def go_on_without(
        self, attempt: Attempt, worker: Worker, reason: str, message: str, *, is_error: bool = True
    ) -> GenerationError | None:
        """Continue without ``worker``: have another decode worker pull the parked prompt if possible, else retry."""
        state = attempt.state
        if (
            isinstance(state, Parked)
            and worker is not state.prefill
            and state.may_rebind
            and self._now_s() < self.deadline_s(attempt)
            and not self._blame.is_held(attempt.request_id)
        ):
            log.info("request %s, attempt %d is bound anew: %s (%s)", attempt.name, attempt.number, reason, message)
            self._observer.retried("rebound", 0)
            self._placer.park(attempt, replace(state, pull=None))
            return None
        return self._retry(attempt, reason, message, is_error=is_error)

    def _retry(self, attempt: Attempt, reason: str, message: str, *, is_error: bool = True) -> GenerationError | None:
        """Give up the attempt and have the next one placed: soon, or after an error when its turn comes."""
        error = self._verdict(attempt)
        if error is not None:
            log.info("request %s, attempt %d: %s (%s)", attempt.name, attempt.number, reason, message)
            return error
        is_started = not isinstance(attempt.state, Prefilling) or attempt.state.started_s is not None
        num_tokens = len(attempt.request.spec.prompt_tokens) + len(attempt.emitted) if is_started else 0
        retry_at_s = self._retries.count_error(attempt, self._now_s()) if is_error else 0.0
        self._placer.queue_again(attempt, Loss(reason, message, num_tokens), retry_at_s)
        return None

    def _verdict(self, attempt: Attempt) -> GenerationError | None:
        """Error that forbids another attempt, or ``None``."""
        silence = self.silence(attempt)  # workers enforce deadlines, too
        if silence is not None:
            return silence
        if attempt.num_failures >= MAX_FAILURES:
            return GenerationError(500, "the model could not compute this request")
        num_attempts = attempt.number + 1
        if num_attempts - min(attempt.num_excused, MAX_EXCUSED) >= MAX_ATTEMPTS:
            return GenerationError(503, f"gave up after {num_attempts} attempts", retry_after_s=MIN_RETRY_AFTER_S)
        return None
