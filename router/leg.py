"""A part of a flight that workers see as one request: its state machine over attempts, for one choice or several.

``QUEUED -> PREFILLING -> HANDOFF -> DECODING (<-> PREEMPTED) -> over``; a lost attempt returns to QUEUED with the next
attempt number and the tokens that the client has. A flight begins with one leg that carries all of its choices. When
its attempt is lost after the first tokens, every choice goes on alone, in a leg of its own.

The dispatcher tells a leg what workers say and places it when it asks; the leg tells its flight. Never chooses a
worker, never reads a clock other than the one it was given. An attempt outlives its decode worker while the prompt is
parked (see `pdserve.router.attempt`).

The fence: a token counts only if it comes from a worker of the current attempt and names that attempt and the next
index of its choice. A decode worker's first tokens may overtake the prefill worker's, because they come on another
stream; they wait for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from pdserve.contracts.request import FinishReason, RequestState
from pdserve.contracts.step import TokenLogprobs
from pdserve.engine.frames import ReceivedToken
from pdserve.engine.scheduler import RequestEventKind
from pdserve.engine.wire import logprobs_from_proto, source_from_proto
from pdserve.proto.v1 import worker_pb2
from pdserve.router.attempt import Attempt
from pdserve.router.fleet import Worker
from pdserve.router.generation import GenerationError, TokenDelta
from pdserve.router.job import ChoiceProgress, Job, Tries
from pdserve.router.metrics import RouterMetrics
from pdserve.router.policy import PromptBlocks

log = logging.getLogger(__name__)

PULL_REFUSED = "refused"
"""How the message of a pull begins that the prefill worker itself refused: nobody else could pull it either."""
PASSING_REFUSALS = ("draining", "the worker is overloaded", "the worker holds")
"""How the messages of refusals begin that say nothing of the request: another worker may take it."""


class LegPlacer(Protocol):
    """What a leg asks of the dispatcher."""

    def want_prefill(self, leg: Leg) -> None:
        """Queue ``leg`` for its next attempt."""
        ...

    def want_decode(self, leg: Leg) -> None:
        """Choose a decode worker, now or when one comes up."""
        ...

    def link_failed(self, prefill: Worker, decode: Worker) -> None:
        """A pull between two workers failed, and neither says that the prompt is gone."""
        ...

    def left(self, leg: Leg) -> None:
        """``leg`` is over: forget it."""
        ...


class LegOwner(Protocol):
    """What a leg tells its flight."""

    def started(self, num_cached_tokens: int) -> None:
        """A worker began to compute the prompt."""
        ...

    def take_prompt_logprobs(self, first_position: int, entries: Sequence[TokenLogprobs]) -> bool:
        """Those of consecutive prompt tokens; ``False`` if some before them are missing."""
        ...

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether some were asked for and are not there yet."""
        ...

    def deliver(self, delta: TokenDelta) -> None:
        """Hand a token to the client."""
        ...

    def split(self, leg: Leg) -> None:
        """Go on with a leg for each choice of ``leg``."""
        ...

    def leg_over(self, leg: Leg) -> None:
        """The last choice of ``leg`` is over."""
        ...

    def fail(self, error: GenerationError) -> None:
        """End the whole request with an error."""
        ...


class Leg:
    """See above."""

    def __init__(
        self,
        owner: LegOwner,
        placer: LegPlacer,
        metrics: RouterMetrics,
        now_s: Callable[[], float],
        *,
        request_id: int,
        job: Job,
        choices: Sequence[ChoiceProgress],
        tries: Tries,
    ) -> None:
        """
        Args:
            request_id: its name on workers.
            choices: with consecutive indices; where there are several, none has a token.
            tries: at these choices before, in another leg; this one's own from now on.
        """
        self.request_id = request_id
        self.job = job
        self.tries = tries
        self.queued_s = now_s()
        """Since when it has waited for a worker."""
        self.state = RequestState.QUEUED
        self.attempt: Attempt | None = None
        self._owner = owner
        self._placer = placer
        self._metrics = metrics
        self._now_s = now_s
        self._asked = range(choices[0].index, choices[-1].index + 1)
        self._blocks: PromptBlocks | None = None
        """Of the current attempt or the next one, once somebody asked."""
        self._running = {choice.index: choice for choice in choices}

    # What the dispatcher asks and tells

    @property
    def choices(self) -> list[ChoiceProgress]:
        """Those that are not over."""
        return list(self._running.values())

    @property
    def num_choices(self) -> int:
        return len(self._running)

    @property
    def wants_decode(self) -> bool:
        """Whether a prompt is ready to be pulled and no decode worker is bound."""
        return self.attempt is not None and self.attempt.wants_decode

    @property
    def has_begun(self) -> bool:
        """Whether the client has a token of it."""
        return any(choice.emitted for choice in self._running.values())

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return self._now_s() >= self.job.deadline_s

    def blocks(self, block_size: int) -> PromptBlocks:
        """What the policy weighs: every token whose KV must exist before the attempt's first can be sampled."""
        if self._blocks is None or self._blocks.block_size != block_size:
            emitted = self._emitted() if self.attempt is None else self.attempt.emitted
            self._blocks = PromptBlocks(
                (*self.job.prompt_tokens, *emitted),
                block_size,
                self.job.cache_salt,
                # Log probabilities of a prompt's tokens take computing all of them.
                may_use_cache=not self._owner.wants_prompt_logprobs,
            )
        return self._blocks

    def submit(self, worker: Worker, *, handoff: bool, num_cached_tokens: int, num_blocks: int) -> None:
        """Begin an attempt of ``num_blocks`` blocks on ``worker``, which is expected to find ``num_cached_tokens`` in
        its prefix cache."""
        assert self.attempt is None
        now_s, number = self._now_s(), self.tries.num_attempts
        self.tries.num_attempts += 1
        self.state = RequestState.PREFILLING
        if number == 0:
            self._metrics.observe_phase("queue", now_s - self.job.arrived_s)
        self.attempt = Attempt(
            self.request_id, number, self.job, self._asked, worker, handoff, self._emitted(), set(self._running)
        )
        self.attempt.submit(num_cached_tokens, num_blocks, now_s)

    def prepare(self, worker: Worker, num_blocks: int) -> None:
        """Bind ``worker`` to decode the current attempt, whose token 0 may be out already."""
        assert self.attempt is not None
        self.attempt.bind(worker, num_blocks, self._now_s())

    def token_received(self, worker: Worker, token: ReceivedToken) -> None:
        """Take a token if it is its choice's next in the current attempt; drop what is stale or repeated."""
        attempt = self.attempt
        if attempt is None or token.attempt != attempt.number or not attempt.has(worker):
            return
        choice = self._running.get(token.choice)
        if choice is None or token.index < len(choice.emitted):
            return
        if token.index == len(choice.emitted):
            self._accept(attempt, worker, choice, token)
        elif worker is attempt.decode and choice.index in attempt.awaited:
            attempt.overtook.append(token)
        else:
            log.error("request %x: token %d came where %d was next", self.request_id, token.index, len(choice.emitted))
            self._failed("a token was lost between worker and router")

    def prompt_logprobs_received(self, worker: Worker, message: worker_pb2.PromptLogprobs) -> None:
        """Take the log probabilities of some prompt tokens, as the current attempt computed them."""
        attempt = self.attempt
        if attempt is None or message.attempt != attempt.number or worker is not attempt.prefill:
            return
        entries = [logprobs_from_proto(entry) for entry in message.entries]
        if not self._owner.take_prompt_logprobs(message.first_position, entries):
            log.error("request %x: no prompt logprobs came before position %d", self.request_id, message.first_position)
            self._failed("prompt logprobs were lost between worker and router")

    def event_received(self, worker: Worker, event: worker_pb2.RequestEvent) -> None:
        """Take an event of the current attempt."""
        attempt = self.attempt
        if attempt is None or event.attempt != attempt.number or not attempt.has(worker):
            return
        kind = RequestEventKind(event.kind)
        if worker is attempt.prefill and kind.is_terminal and not attempt.needs_prefill:
            # However it puts it (nobody may have told it that the pull is complete), it is needed no more.
            attempt.is_prefill_over = True
            return
        match kind:
            case RequestEventKind.STARTED:
                self._started(attempt, worker, event)
            case RequestEventKind.LAST_CHUNK:
                self._last_chunk(attempt, event)
            case RequestEventKind.JOINED:
                self._joined(attempt)
            case RequestEventKind.PREEMPTED:
                self.state = RequestState.PREEMPTED
            case RequestEventKind.RESUMED:
                self.state = RequestState.DECODING
            case RequestEventKind.RELEASED:
                # From a decode worker it means that every token 0 was a last one, which the prefill worker says.
                attempt.is_prefill_over |= worker is attempt.prefill
            case RequestEventKind.REJECTED:
                self._rejected(worker, event.message)
            case RequestEventKind.FAILED:
                self._failed(event.message)
            case RequestEventKind.KV_UNAVAILABLE:
                self._kv_unavailable(attempt, worker, event.message)
            case RequestEventKind.CANCELLED:
                self._retry("cancelled", event.message)

    def worker_lost(self, worker: Worker) -> None:
        """``worker`` is gone: go on without it, or start over."""
        attempt = self.attempt
        if attempt is None or worker not in attempt.workers:
            return
        if worker is attempt.prefill and not attempt.needs_prefill:
            attempt.is_prefill_over = True
        else:
            self._go_on_without(worker, "worker_lost", f"worker {worker.worker_id} was lost")

    def fail(self, error: GenerationError) -> None:
        """Nobody takes it: end the whole request."""
        self._owner.fail(error)

    # What its flight tells it

    def drop(self, choice: int) -> None:
        """Nothing more is wanted of ``choice``, if it is among those that run here."""
        if self._running.pop(choice, None) is None:
            return
        attempt = self.attempt
        if not self._running:
            self.end()
            self._owner.leg_over(self)
        elif attempt is None:
            self._enqueue()
        else:
            attempt.drop(choice)

    def end(self, finisher: Worker | None = None) -> None:
        """Give up everything that workers hold of it; ``finisher`` said the last token."""
        self._abandon(finisher)
        self._placer.left(self)

    # Its own steps

    def _emitted(self) -> tuple[int, ...]:
        """Tokens that the next attempt builds on."""
        if len(self._running) > 1:
            return ()
        (choice,) = self._running.values()
        return tuple(choice.emitted)

    def _accept(self, attempt: Attempt, worker: Worker, choice: ChoiceProgress, received: ReceivedToken) -> None:
        """Hand the next token of ``choice`` to the client."""
        is_first = choice.index in attempt.awaited
        if is_first:
            if self._owner.wants_prompt_logprobs:
                self._failed("prompt logprobs are missing at token 0")
                return
            self._first_token(attempt, choice)
        elif received.index == 1 and attempt.handoff:
            self._metrics.handoff_stall_seconds.observe(self._now_s() - choice.began_s)
        choice.emitted.append(received.token)
        self._owner.deliver(
            TokenDelta(choice.index, received.index, received.token, received.logprobs, received.finish)
        )
        if received.finish is not FinishReason.NONE:
            self._choice_over(attempt, worker, choice)
        if is_first and attempt.overtook:
            overtook, attempt.overtook = attempt.overtook, []
            assert attempt.decode is not None
            for later in overtook:
                self.token_received(attempt.decode, later)

    def _first_token(self, attempt: Attempt, choice: ChoiceProgress) -> None:
        """The attempt's first token of ``choice`` is out."""
        now_s = self._now_s()
        attempt.awaited.discard(choice.index)
        if not choice.emitted:
            choice.began_s = now_s
        if attempt.first_token_s:
            return
        attempt.first_token_s = now_s
        if attempt.started_s:
            self._metrics.observe_phase("prefill", now_s - attempt.started_s)
        if not attempt.handoff or attempt.has_joined:
            self.state = RequestState.DECODING
        else:
            self.state = RequestState.HANDOFF

    def _choice_over(self, attempt: Attempt, worker: Worker, choice: ChoiceProgress) -> None:
        del self._running[choice.index]
        if not self._running:
            began_s = max(attempt.joined_s, attempt.first_token_s)
            self._metrics.observe_phase("decode", self._now_s() - began_s)
            self.end(finisher=worker)
            self._owner.leg_over(self)

    def _started(self, attempt: Attempt, worker: Worker, event: worker_pb2.RequestEvent) -> None:
        worker.promises.settle(self.request_id)
        if worker is attempt.decode:
            self._metrics.observe_phase("decode_queue", event.waited_s)
            return
        attempt.started_s = self._now_s()
        self._metrics.observe_phase("prefill_queue", event.waited_s)
        self._owner.started(event.num_cached_tokens)

    def _last_chunk(self, attempt: Attempt, event: worker_pb2.RequestEvent) -> None:
        if attempt.handoff and attempt.source is None:
            attempt.source = source_from_proto(event.source)
            if not attempt.first_token_s:
                self.state = RequestState.HANDOFF
            self._placer.want_decode(self)

    def _joined(self, attempt: Attempt) -> None:
        attempt.has_joined = True
        attempt.joined_s = self._now_s()
        if attempt.first_token_s:
            self.state = RequestState.DECODING
            self._metrics.observe_phase("handoff", attempt.joined_s - attempt.first_token_s)

    def _rejected(self, worker: Worker, message: str) -> None:
        if not message.startswith(PASSING_REFUSALS):
            self._owner.fail(GenerationError(400, message))
            return
        if message.startswith("draining"):
            worker.load.draining = True
        self._go_on_without(worker, "refused", message)

    def _kv_unavailable(self, attempt: Attempt, worker: Worker, message: str) -> None:
        if worker is attempt.decode and not message.startswith(PULL_REFUSED):
            self._placer.link_failed(attempt.prefill, worker)
            self._go_on_without(worker, "kv_unavailable", message)
        else:
            self._retry("kv_unavailable", message)

    def _failed(self, message: str) -> None:
        self.tries.num_failures += 1
        self._retry("failed", message)

    def _go_on_without(self, worker: Worker, reason: str, message: str) -> None:
        """``worker`` is done with the attempt: have the parked prompt pulled by another if there is one, else retry."""
        attempt = self.attempt
        assert attempt is not None
        if worker is not attempt.decode or not attempt.may_rebind or self.is_late:
            self._retry(reason, message)
            return
        log.info("request %x, attempt %d is bound anew: %s (%s)", self.request_id, attempt.number, reason, message)
        attempt.unbind()
        self._metrics.redispatches.labels("rebound").inc()
        self._placer.want_decode(self)

    def _retry(self, reason: str, message: str) -> None:
        """Give up the attempt and ask for the next one."""
        log.info("request %x, attempt %d: %s (%s)", self.request_id, self.tries.num_attempts - 1, reason, message)
        error = self.tries.verdict(is_late=self.is_late)
        if error is not None:
            self._owner.fail(error)
            return
        self._abandon()
        self._metrics.redispatches.labels(reason).inc()
        self.state = RequestState.QUEUED
        self.queued_s = self._now_s()
        self._enqueue()

    def _enqueue(self) -> None:
        """Ask for the next attempt; at several choices together only if they are those of the first and none began."""
        has_changed = len(self._running) < len(self._asked) or self.has_begun
        if len(self._asked) > 1 and has_changed:
            self._owner.split(self)
        else:
            self._placer.want_prefill(self)

    def _abandon(self, finisher: Worker | None = None) -> None:
        attempt, self.attempt = self.attempt, None
        self._blocks = None
        if attempt is not None:
            attempt.abandon(finisher)
