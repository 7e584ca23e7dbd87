"""One dispatch of a leg: the workers it is on, how far each of them has come, and what they are told.

A lost or failing decode worker does not cost the attempt while the prefill worker still holds the parked prompt: the
attempt is bound to another one, which pulls the same prompt. Its number stays, because the prefill worker's tokens and
events carry it, and because the decode worker that is let go has no more to say: its session broke, or it ended the
attempt itself, and in both cases before it joined, so that it sent no token.

Owned by its `pdserve.router.leg.Leg`, which decides everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.contracts.request import GenerationRequest, KvSource
from pdserve.engine.frames import ReceivedToken
from pdserve.engine.wire import request_to_proto, source_to_proto
from pdserve.proto.v1 import worker_pb2
from pdserve.router.fleet import Worker
from pdserve.router.job import Job

MAX_BINDINGS = 2
"""Decode workers that may try to pull one parked prompt, before it is prefilled again."""


@dataclass(slots=True, eq=False)
class Attempt:
    """See above. Only the current attempt of a leg exists."""

    request_id: int
    number: int
    job: Job
    choices: range
    """That were asked for; some may be over by now."""
    prefill: Worker
    handoff: bool
    emitted: tuple[int, ...]
    """Tokens of earlier attempts; none where the attempt is at several choices."""
    awaited: set[int]
    """Choices whose first token of the attempt has not come."""
    decode: Worker | None = None
    num_bindings: int = 0
    """Decode workers so far."""
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
    dropped: list[int] = field(default_factory=list)
    """Choices that were asked for and are not wanted any more."""

    @property
    def needs_prefill(self) -> bool:
        """Whether the prefill worker has something left to give: token 0 of a choice, or KV."""
        return bool(self.awaited) or not self.has_joined

    @property
    def may_rebind(self) -> bool:
        """Whether another decode worker could pull the prompt."""
        is_parked = self.source is not None and not self.is_prefill_over
        return is_parked and not self.has_joined and self.num_bindings < MAX_BINDINGS

    @property
    def wants_decode(self) -> bool:
        """Whether a prompt is ready to be pulled and no decode worker is bound."""
        return self.source is not None and self.decode is None

    def has(self, worker: Worker) -> bool:
        """Whether what ``worker`` says of the attempt counts."""
        return worker is self.decode or worker is self.prefill

    @property
    def workers(self) -> list[Worker]:
        """Workers that may still hold something of the request."""
        prefill = [] if self.is_prefill_over else [self.prefill]
        return prefill if self.decode is None else [*prefill, self.decode]

    # What workers are told

    def submit(self, num_cached_tokens: int, num_blocks: int, now_s: float) -> None:
        """Give the request, of ``num_blocks`` blocks, to the prefill worker, which is expected to find so many of its
        tokens in its cache."""
        request = self._request(now_s)
        self.prefill.promises.prefill(self.request_id, request.num_known_tokens - num_cached_tokens)
        if not self.handoff:
            self.prefill.promises.decode(self.request_id, request.num_choices, request.num_known_tokens, num_blocks)
        submit = worker_pb2.Submit(request=request_to_proto(request))
        self.prefill.session.send(worker_pb2.RouterMessage(submit=submit))

    def bind(self, worker: Worker, num_blocks: int, now_s: float) -> None:
        """Have ``worker`` pull the parked prompt, of ``num_blocks`` blocks, and decode."""
        assert self.source is not None
        request = self._request(now_s)
        self.decode = worker
        self.num_bindings += 1
        worker.promises.decode(self.request_id, request.num_choices, request.num_known_tokens, num_blocks)
        prepare = worker_pb2.Prepare(request=request_to_proto(request), source=source_to_proto(self.source))
        worker.session.send(worker_pb2.RouterMessage(prepare=prepare))
        if self.dropped:
            self._cancel(worker, self.dropped)

    def unbind(self) -> None:
        """The decode worker is done with the attempt, and another may pull the prompt."""
        assert self.decode is not None
        self.decode.promises.settle(self.request_id)
        self.decode = None

    def drop(self, choice: int) -> None:
        """Stop one of several choices where they are generated; a prefill worker that hands off has no more to do."""
        self.awaited.discard(choice)
        self.dropped.append(choice)
        generator = self.decode if self.handoff else self.prefill
        if generator is not None and generator.is_up:
            self._cancel(generator, [choice])

    def abandon(self, finisher: Worker | None) -> None:
        """Free what workers hold of it. A ``finisher`` said the last token, and holds nothing unless it parked."""
        for worker in self.workers:
            worker.promises.settle(self.request_id)
            has_parked = worker is self.prefill and self.handoff
            if worker.is_up and (worker is not finisher or has_parked):
                self._cancel(worker)

    def _request(self, now_s: float) -> GenerationRequest:
        """The same for both workers, but for the time that is left."""
        return self.job.request(
            request_id=self.request_id,
            attempt=self.number,
            choices=self.choices,
            emitted_tokens=self.emitted,
            handoff=self.handoff,
            now_s=now_s,
        )

    def _cancel(self, worker: Worker, choices: Sequence[int] = ()) -> None:
        """All choices where none is named."""
        cancel = worker_pb2.Cancel(request_id=self.request_id, attempt=self.number, choices=choices)
        worker.session.send(worker_pb2.RouterMessage(cancel=cancel))
