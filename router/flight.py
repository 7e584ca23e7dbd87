"""One request in flight: its state machine over attempts, and the tokens on their way to the client.

``QUEUED -> PREFILLING -> HANDOFF -> DECODING (<-> PREEMPTED) -> outcome``; a lost attempt returns to QUEUED with the
next attempt number and the tokens that the client has. The dispatcher feeds it what workers say and places it when it
asks; the HTTP edge iterates it. Never chooses a worker, never reads a clock other than the one it was given.

The fence: a token counts only if it names the current attempt and the next index. A decode worker's first tokens may
overtake the prefill worker's, because they come on another stream; they wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pdserve.contracts.request import (
    FinishReason,
    GenerationRequest,
    KvSource,
    Outcome,
    RequestState,
    SamplingParams,
)
from pdserve.engine.frames import ReceivedToken
from pdserve.engine.scheduler import RequestEventKind
from pdserve.engine.wire import request_to_proto, source_from_proto, source_to_proto
from pdserve.proto.v1 import worker_pb2
from pdserve.router.fleet import Worker
from pdserve.router.generation import GenerationError, TokenDelta
from pdserve.router.metrics import RouterMetrics
from pdserve.router.policy import PromptBlocks

log = logging.getLogger(__name__)

MAX_FAILURES = 2
"""Failed steps after which the request itself is blamed."""
MAX_ATTEMPTS = 8
"""Dispatches of one request at most, whoever is to blame."""
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

    def landed(self, flight: Flight) -> None:
        """``flight.outcome`` is set: forget it."""
        ...


@dataclass(slots=True, eq=False)
class Attempt:
    """One dispatch of a request."""

    number: int
    prefill: Worker
    handoff: bool
    decode: Worker | None = None
    source: KvSource | None = None
    is_prefill_over: bool = False
    """The prefill worker holds nothing of the request any more."""
    has_joined: bool = False
    """The decode worker holds all of the prompt's KV."""
    started_s: float = 0.0
    first_token_s: float = 0.0
    """When the attempt's first token came, 0 before."""
    joined_s: float = 0.0
    overtook: list[ReceivedToken] = field(default_factory=list)
    """Tokens of the decode worker that came before the prefill worker's."""

    @property
    def workers(self) -> list[Worker]:
        """Workers that may still hold something of the request."""
        prefill = [] if self.is_prefill_over else [self.prefill]
        return prefill if self.decode is None else [*prefill, self.decode]


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

    def cancel(self, *, finished: bool = False) -> None:
        if self.outcome is None:
            self._land(Outcome.FINISHED if finished else Outcome.CANCELLED)

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
        """What the policy weighs: every token whose KV must exist before the next can be sampled."""
        return PromptBlocks((*self._prompt_tokens, *self._emitted), block_size, self._cache_salt)

    def submit(self, worker: Worker, *, handoff: bool) -> None:
        """Begin an attempt on ``worker``."""
        assert self.attempt is None
        assert self.outcome is None
        now_s = self._now_s()
        attempt = self.attempt = Attempt(self._num_attempts, worker, handoff)
        self._num_attempts += 1
        self.state = RequestState.PREFILLING
        if attempt.number == 0:
            self._metrics.observe_phase("queue", now_s - self.arrived_s)
        request = self._wire_request(attempt, now_s)
        worker.promise_prefill(self.request_id, len(self._prompt_tokens) + len(self._emitted))
        worker.session.send(worker_pb2.RouterMessage(submit=worker_pb2.Submit(request=request)))

    def prepare(self, worker: Worker, num_blocks: int) -> None:
        """Bind ``worker`` to decode the current attempt."""
        attempt = self.attempt
        assert attempt is not None
        assert attempt.source is not None
        attempt.decode = worker
        request = self._wire_request(attempt, self._now_s())
        worker.promise_decode(self.request_id, len(self._prompt_tokens) + len(self._emitted), num_blocks)
        prepare = worker_pb2.Prepare(request=request, source=source_to_proto(attempt.source))
        worker.session.send(worker_pb2.RouterMessage(prepare=prepare))

    def token_received(self, worker: Worker, token: ReceivedToken) -> None:
        """Take a token if it is the current attempt's next; drop what is stale or repeated."""
        attempt = self.attempt
        if attempt is None or token.attempt != attempt.number or token.index < len(self._emitted):
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
        if attempt is None or event.attempt != attempt.number:
            return
        match RequestEventKind(event.kind):
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
                attempt.is_prefill_over = True
            case RequestEventKind.REJECTED:
                self._rejected(worker, event.message)
            case RequestEventKind.FAILED:
                self._failed(event.message)
            case RequestEventKind.KV_UNAVAILABLE:
                self._retry("kv_unavailable", event.message)
            case RequestEventKind.CANCELLED:
                self._retry("cancelled", event.message)

    def worker_lost(self, worker: Worker) -> None:
        """``worker`` is gone: start over elsewhere unless it had nothing left to give."""
        attempt = self.attempt
        if attempt is None or worker not in attempt.workers:
            return
        if worker is attempt.prefill and attempt.has_joined and attempt.first_token_s:
            attempt.is_prefill_over = True
        else:
            self._retry("worker_lost", f"worker {worker.worker_id} was lost")

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
        if self._ttft_slo_s > 0 and not self._emitted:
            ttft_slo_s = max(self.arrived_s + self._ttft_slo_s - now_s, 1e-3)
        request = GenerationRequest(
            request_id=self.request_id,
            attempt=attempt.number,
            prompt_tokens=self._prompt_tokens,
            emitted_tokens=tuple(self._emitted),
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
        self._deltas.append(TokenDelta(received.index, received.token, received.logprobs, received.finish))
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
        self._retry("refused", message)

    def _failed(self, message: str) -> None:
        self._num_failures += 1
        if self._num_failures >= MAX_FAILURES and not self.is_late:
            self.fail(GenerationError(500, "the model could not compute this request"))
        else:
            self._retry("failed", message)

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
