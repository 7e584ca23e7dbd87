"""One request in flight: its state machine over attempts, and the tokens on their way to the client.

``QUEUED -> PREFILLING -> HANDOFF -> DECODING (<-> PREEMPTED) -> outcome``; a lost attempt returns to QUEUED with the
next attempt number and the tokens that the client has. The dispatcher feeds it what workers say and places it when it
asks; the HTTP edge iterates it. Never chooses a worker, never reads a clock other than the one it was given.

An attempt outlives its decode worker while the prompt is parked (see `pdserve.router.attempt`).

The fence: a token counts only if it comes from a worker of the current attempt and names that attempt and the next
index. A decode worker's first tokens may overtake the prefill worker's, because they come on another stream; they wait
for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from pdserve.contracts.request import (
    FinishReason,
    GenerationRequest,
    Outcome,
    RequestState,
    SamplingParams,
)
from pdserve.contracts.step import TokenLogprobs
from pdserve.engine.frames import ReceivedToken
from pdserve.engine.scheduler import RequestEventKind
from pdserve.engine.wire import request_to_proto, source_from_proto, source_to_proto
from pdserve.proto.v1 import worker_pb2
from pdserve.router.attempt import Attempt
from pdserve.router.fleet import Worker
from pdserve.router.generation import GenerationError, TokenDelta
from pdserve.router.metrics import RouterMetrics
from pdserve.router.policy import PromptBlocks

log = logging.getLogger(__name__)

MAX_FAILURES = 2
"""Failed steps after which the request itself is blamed."""
MAX_ATTEMPTS = 8
"""Dispatches of one request at most, whoever is to blame."""
PULL_REFUSED = "refused"
"""How the message of a pull begins that the prefill worker itself refused: nobody else could pull it either."""
PASSING_REFUSALS = ("draining", "the worker is overloaded", "the worker holds")
"""How the messages of refusals begin that say nothing of the request: another worker may take it."""


class FlightOwner(Protocol):
    """What a flight asks of the dispatcher."""

    def want_prefill(self, flight: Flight) -> None:
        """Queue ``flight`` for its next attempt."""
        ...

    def want_decode(self, flight: Flight) -> None:
        """Choose a decode worker, now or when one comes up."""
        ...

    def link_failed(self, prefill: Worker, decode: Worker) -> None:
        """A pull between two workers failed, and neither says that the prompt is gone."""
        ...

    def landed(self, flight: Flight) -> None:
        """``flight.outcome`` is set: forget it."""
        ...


class Flight:
    """Implements `pdserve.router.generation.Generation`."""

    def __init__(
        self,
        owner: FlightOwner,
        metrics: RouterMetrics,
        now_s: Callable[[], float],
        *,
        request_id: int,
        prompt_tokens: Sequence[int],
        sampling: SamplingParams,
        cache_salt: bytes,
        arrived_s: float,
        deadline_s: float,
        ttft_slo_s: float,
    ) -> None:
        """
        Args:
            deadline_s: instant on ``now_s``'s clock after which the request is given up.
            ttft_slo_s: seconds from arrival by which token 0 is wanted.
        """
        self.request_id = request_id
        self.arrived_s = arrived_s
        self.queued_s = arrived_s
        """Since when it has waited for a worker."""
        self.state = RequestState.QUEUED
        self.outcome: Outcome | None = None
        self.attempt: Attempt | None = None
        self._deadline_s = deadline_s
        self._owner = owner
        self._metrics = metrics
        self._now_s = now_s
        self._prompt_tokens = tuple(prompt_tokens)
        self._sampling = sampling
        self._cache_salt = cache_salt
        self._ttft_slo_s = ttft_slo_s
        self._emitted: list[int] = []
        self._num_attempts = 0
        self._num_failures = 0
        self._num_cached_tokens: int | None = None
        self._last_token_s = 0.0
        self._deltas: deque[TokenDelta] = deque()
        self._changed = asyncio.Event()
        self._error: GenerationError | None = None

    # What the HTTP edge sees

    @property
    def num_cached_tokens(self) -> int:
        return self._num_cached_tokens or 0

    def __aiter__(self) -> AsyncIterator[TokenDelta]:
        return self

    async def __anext__(self) -> TokenDelta:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self.outcome is not None:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._deltas.popleft()

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprobs]:
        return ()

    def finish(self, choice: int) -> None:
        assert choice == 0
        if self.outcome is None:
            self._land(Outcome.FINISHED)

    def cancel(self) -> None:
        if self.outcome is None:
            self._land(Outcome.CANCELLED)

    # What the dispatcher tells it

    @property
    def wants_decode(self) -> bool:
        """Whether a prompt is ready to be pulled and no decode worker is bound."""
        attempt = self.attempt
        return attempt is not None and attempt.source is not None and attempt.decode is None

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return self._now_s() >= self._deadline_s

    def blocks(self, block_size: int) -> PromptBlocks:
        """What the policy weighs: every token whose KV must exist before the attempt's first can be sampled."""
        emitted = self._emitted if self.attempt is None else self.attempt.emitted
        return PromptBlocks((*self._prompt_tokens, *emitted), block_size, self._cache_salt)

    def submit(self, worker: Worker, *, handoff: bool) -> None:
        """Begin an attempt on ``worker``."""
        assert self.attempt is None
        assert self.outcome is None
        now_s = self._now_s()
        attempt = self.attempt = Attempt(self._num_attempts, worker, handoff, tuple(self._emitted))
        self._num_attempts += 1
        self.state = RequestState.PREFILLING
        if attempt.number == 0:
            self._metrics.observe_phase("queue", now_s - self.arrived_s)
        request = self._wire_request(attempt, now_s)
        worker.promise_prefill(self.request_id, len(self._prompt_tokens) + len(self._emitted))
        worker.session.send(worker_pb2.RouterMessage(submit=worker_pb2.Submit(request=request)))

    def prepare(self, worker: Worker, num_blocks: int) -> None:
        """Bind ``worker`` to decode the current attempt, whose token 0 may be out already."""
        attempt = self.attempt
        assert attempt is not None
        assert attempt.source is not None
        attempt.decode = worker
        attempt.num_bindings += 1
        request = self._wire_request(attempt, self._now_s())
        worker.promise_decode(self.request_id, len(self._prompt_tokens) + len(attempt.emitted), num_blocks)
        prepare = worker_pb2.Prepare(request=request, source=source_to_proto(attempt.source))
        worker.session.send(worker_pb2.RouterMessage(prepare=prepare))

    def token_received(self, worker: Worker, token: ReceivedToken) -> None:
        """Take a token if it is the current attempt's next; drop what is stale or repeated."""
        attempt = self.attempt
        if attempt is None or token.attempt != attempt.number or not attempt.has(worker):
            return
        if token.index < len(self._emitted):
            return
        if token.index == len(self._emitted):
            self._accept(attempt, worker, token)
            decode, overtook, attempt.overtook = attempt.decode, attempt.overtook, []
            for later in overtook:
                assert decode is not None
                self.token_received(decode, later)
        elif worker is attempt.decode and not attempt.first_token_s:
            attempt.overtook.append(token)
        else:
            log.error("request %x: token %d came where %d was next", self.request_id, token.index, len(self._emitted))
            self._failed("a token was lost between worker and router")

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
                # From a decode worker it means that token 0 was the last one, which the prefill worker says.
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
        """End it with an error, on every worker too."""
        if self.outcome is None:
            self._error = error
            self._land(Outcome.REJECTED if error.status == 400 else Outcome.FAILED)

    def fail_late(self) -> None:
        self.fail(GenerationError(504, "the request's deadline has passed"))

    # Its own steps

    def _wire_request(self, attempt: Attempt, now_s: float) -> worker_pb2.Request:
        ttft_slo_s = 0.0
        if self._ttft_slo_s > 0 and not attempt.emitted:
            ttft_slo_s = max(self.arrived_s + self._ttft_slo_s - now_s, 1e-3)
        request = GenerationRequest(
            request_id=self.request_id,
            attempt=attempt.number,
            prompt_tokens=self._prompt_tokens,
            emitted_tokens=attempt.emitted,
            sampling=self._sampling,
            cache_salt=self._cache_salt,
            deadline_s=max(self._deadline_s - now_s, 1e-3),
            ttft_slo_s=ttft_slo_s,
            handoff=attempt.handoff,
        )
        return request_to_proto(request)

    def _accept(self, attempt: Attempt, worker: Worker, received: ReceivedToken) -> None:
        """Hand the next token to the client."""
        now_s = self._now_s()
        if not attempt.first_token_s:
            self._first_token(attempt, now_s)
        elif attempt.handoff and len(self._emitted) == 1:
            self._metrics.handoff_stall_seconds.observe(now_s - self._last_token_s)
        self._last_token_s = now_s
        self._emitted.append(received.token)
        self._deltas.append(TokenDelta(0, received.index, received.token, received.logprobs, received.finish))
        self._changed.set()
        if received.finish is not FinishReason.NONE:
            self._metrics.observe_phase("decode", now_s - max(attempt.joined_s, attempt.first_token_s))
            self._land(Outcome.FINISHED, finisher=worker)

    def _first_token(self, attempt: Attempt, now_s: float) -> None:
        attempt.first_token_s = now_s
        if attempt.started_s:
            self._metrics.observe_phase("prefill", now_s - attempt.started_s)
        if not attempt.handoff or attempt.has_joined:
            self.state = RequestState.DECODING
        else:
            self.state = RequestState.HANDOFF

    def _started(self, attempt: Attempt, worker: Worker, event: worker_pb2.RequestEvent) -> None:
        worker.settle(self.request_id)
        if worker is attempt.decode:
            self._metrics.observe_phase("decode_queue", event.waited_s)
            return
        attempt.started_s = self._now_s()
        self._metrics.observe_phase("prefill_queue", event.waited_s)
        if self._num_cached_tokens is None:
            self._num_cached_tokens = min(event.num_cached_tokens, len(self._prompt_tokens))
            self._metrics.cached_prompt_tokens.inc(self._num_cached_tokens)

    def _last_chunk(self, attempt: Attempt, event: worker_pb2.RequestEvent) -> None:
        if attempt.handoff and attempt.source is None:
            attempt.source = source_from_proto(event.source)
            if not attempt.first_token_s:
                self.state = RequestState.HANDOFF
            self._owner.want_decode(self)

    def _joined(self, attempt: Attempt) -> None:
        attempt.has_joined = True
        attempt.joined_s = self._now_s()
        if attempt.first_token_s:
            self.state = RequestState.DECODING
            self._metrics.observe_phase("handoff", attempt.joined_s - attempt.first_token_s)

    def _rejected(self, worker: Worker, message: str) -> None:
        if not message.startswith(PASSING_REFUSALS):
            self.fail(GenerationError(400, message))
            return
        if message.startswith("draining"):
            worker.load.draining = True
        self._go_on_without(worker, "refused", message)

    def _kv_unavailable(self, attempt: Attempt, worker: Worker, message: str) -> None:
        if worker is attempt.decode and not message.startswith(PULL_REFUSED):
            self._owner.link_failed(attempt.prefill, worker)
            self._go_on_without(worker, "kv_unavailable", message)
        else:
            self._retry("kv_unavailable", message)

    def _failed(self, message: str) -> None:
        self._num_failures += 1
        if self._num_failures >= MAX_FAILURES and not self.is_late:
            self.fail(GenerationError(500, "the model could not compute this request"))
        else:
            self._retry("failed", message)

    def _go_on_without(self, worker: Worker, reason: str, message: str) -> None:
        """``worker`` is done with the attempt: have the parked prompt pulled by another if there is one, else retry."""
        attempt = self.attempt
        assert attempt is not None
        if worker is not attempt.decode or not attempt.may_rebind or self.is_late:
            self._retry(reason, message)
            return
        log.info("request %x, attempt %d is bound anew: %s (%s)", self.request_id, attempt.number, reason, message)
        worker.settle(self.request_id)
        attempt.decode = None
        self._metrics.redispatches.labels("rebound").inc()
        self._owner.want_decode(self)

    def _retry(self, reason: str, message: str) -> None:
        """Give up the attempt and ask for the next one."""
        log.info("request %x, attempt %d: %s (%s)", self.request_id, self._num_attempts - 1, reason, message)
        if self.is_late:  # workers give up what is late, too
            self.fail_late()
            return
        if self._num_attempts >= MAX_ATTEMPTS:
            self.fail(GenerationError(503, f"gave up after {MAX_ATTEMPTS} attempts", retry_after_s=1.0))
            return
        self._abandon()
        self._metrics.redispatches.labels(reason).inc()
        self.state = RequestState.QUEUED
        self.queued_s = self._now_s()
        self._owner.want_prefill(self)

    def _abandon(self, finisher: Worker | None = None) -> None:
        """Free what workers hold of the current attempt. A ``finisher`` that parked nothing holds nothing."""
        attempt, self.attempt = self.attempt, None
        if attempt is None:
            return
        cancel = worker_pb2.Cancel(request_id=self.request_id, attempt=attempt.number)
        for worker in attempt.workers:
            worker.settle(self.request_id)
            has_parked = worker is attempt.prefill and attempt.handoff
            if worker.is_up and (worker is not finisher or has_parked):
                worker.session.send(worker_pb2.RouterMessage(cancel=cancel))

    def _land(self, outcome: Outcome, finisher: Worker | None = None) -> None:
        """Reach the outcome, once."""
        assert self.outcome is None
        self._abandon(finisher)
        self.outcome = outcome
        self._changed.set()
        self._owner.landed(self)
