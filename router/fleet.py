"""The workers that the router may use: their sessions, and what their frames have told of them.

Owns one `Worker` per target and keeps it current: load, prefix-cache index, and what was sent to it and does not show
in its load yet. The supervisor sets the targets through the admin port; the dispatcher listens. Decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Protocol

from pdserve.contracts.placement import WorkerEndpoint, WorkerRole
from pdserve.engine.frames import ReceivedToken, unpack_tokens
from pdserve.engine.scheduler import RequestEventKind
from pdserve.proto.v1 import worker_pb2
from pdserve.router.generation import ServedModel
from pdserve.router.metrics import RouterMetrics, WorkerMetrics
from pdserve.router.policy import WorkerSnapshot
from pdserve.router.promises import Promises
from pdserve.router.session import Credentials, SessionRefusedError, WorkerSession

log = logging.getLogger(__name__)


class FleetListener(Protocol):
    """Who hears of workers and of what they say; the dispatcher. Calls must not block."""

    def worker_up(self, worker: Worker) -> None:
        """A session to ``worker`` stands and it can take work."""
        ...

    def worker_lost(self, worker: Worker, reason: str) -> None:
        """The session broke: everything sent to ``worker`` before is void."""
        ...

    def tokens_received(self, worker: Worker, tokens: Iterable[ReceivedToken]) -> None:
        """Those of one frame."""
        ...

    def prompt_logprobs_received(self, worker: Worker, message: worker_pb2.PromptLogprobs) -> None: ...

    def event_received(self, worker: Worker, event: worker_pb2.RequestEvent) -> None: ...


class Worker:
    """One incarnation of a worker, as the router knows it; the `SessionSink` of its session."""

    def __init__(self, endpoint: WorkerEndpoint, fleet: Fleet, metrics: RouterMetrics) -> None:
        self.endpoint = endpoint
        self.metrics = WorkerMetrics(metrics, endpoint.worker_id, endpoint.role)
        self._fleet = fleet
        self._router_metrics = metrics
        self.welcome = worker_pb2.Welcome()
        self.load = worker_pb2.Load()
        self.cached_blocks: set[bytes] = set()
        self.session = WorkerSession(endpoint, self, fleet.credentials)
        self.promises = Promises()

    @property
    def worker_id(self) -> str:
        return self.endpoint.worker_id

    @property
    def role(self) -> WorkerRole:
        return self.endpoint.role

    @property
    def host(self) -> str:
        """Of its address."""
        return self.endpoint.address.rpartition(":")[0]

    @property
    def is_up(self) -> bool:
        """Whether the session stands."""
        return self.session.is_open

    @property
    def takes_work(self) -> bool:
        """Whether it is up and not draining."""
        return self.is_up and not self.load.draining

    def snapshot(self) -> WorkerSnapshot:
        """For one decision of the policy."""
        load, welcome = self.load, self.welcome
        return self.promises.snapshot(
            worker_id=self.endpoint.worker_id,
            role=self.endpoint.role,
            max_batch_tokens=welcome.max_batch_tokens,
            max_batch_size=welcome.max_batch_size,
            load=load,
            cached_blocks=self.cached_blocks,
            host=self.host,
            prefill_correction=load.prefill_correction or 1.0,
            decode_correction=load.decode_correction or 1.0,
        )

    # SessionSink

    def session_opened(self, session: WorkerSession, welcome: worker_pb2.Welcome) -> None:
        self._fleet.check_model(self, welcome)
        self.welcome = welcome
        self.load = worker_pb2.Load(num_blocks_free=welcome.num_blocks)
        self.cached_blocks.clear()
        self.metrics.up.set(1)
        log.info("worker %s is up at %s", self.worker_id, self.endpoint.address)
        self._fleet.listener.worker_up(self)

    def frame_received(self, session: WorkerSession, frame: worker_pb2.StepFrame) -> None:
        """Take what a frame says of the worker, then of requests: what began, the prompts, the tokens, what ended."""
        if frame.HasField("load"):
            self.load = frame.load
            self.metrics.observe(frame.load)
        if frame.HasField("cache"):
            update_cached_blocks(self.cached_blocks, frame.cache, self.welcome.num_blocks)
        for report in frame.transfers:
            self._router_metrics.observe_transfer(report)
        listener = self._fleet.listener
        endings = []
        for event in frame.events:
            if RequestEventKind(event.kind).is_terminal:
                endings.append(event)
            else:
                listener.event_received(self, event)
        for prompt_logprobs in frame.prompt_logprobs:
            listener.prompt_logprobs_received(self, prompt_logprobs)
        listener.tokens_received(self, unpack_tokens(frame.tokens))
        for event in endings:
            listener.event_received(self, event)

    def session_broken(self, session: WorkerSession, reason: str) -> None:
        self.metrics.up.set(0)
        self.promises.clear()
        self._fleet.listener.worker_lost(self, reason)


class Fleet:
    """Every target, with a session each."""

    def __init__(self, metrics: RouterMetrics, credentials: Credentials) -> None:
        self.credentials = credentials
        self.listener: FleetListener
        """Who hears of the workers; see `attach`."""
        self._metrics = metrics
        self._workers: dict[str, Worker] = {}
        self._model: worker_pb2.Welcome | None = None
        self._is_changing = asyncio.Lock()

    def attach(self, listener: FleetListener) -> None:
        """Name the one listener, before the first targets."""
        self.listener = listener

    @property
    def workers(self) -> list[Worker]:
        """Every target, up or not, by id."""
        return [self._workers[worker_id] for worker_id in sorted(self._workers)]

    @property
    def targets(self) -> list[WorkerEndpoint]:
        return [worker.endpoint for worker in self.workers]

    @property
    def model(self) -> ServedModel | None:
        """What the workers serve; ``None`` until the first has answered."""
        return None if self._model is None else ServedModel(max_model_len=self._model.max_model_len)

    @property
    def block_size(self) -> int:
        """Tokens per KV block, once a worker has answered."""
        assert self._model is not None
        return self._model.block_size

    def snapshots(self) -> list[WorkerSnapshot]:
        """Of the workers that take work now."""
        return [worker.snapshot() for worker in self._workers.values() if worker.takes_work]

    def worker(self, worker_id: str) -> Worker:
        return self._workers[worker_id]

    def serves_both_phases(self) -> bool:
        """Whether prefill and decode workers, or a mixed one, take work now.

        A decode worker alone would serve too, by prefilling for itself, but a deployment that has come to that is
        degraded, and this is false.
        """
        roles = {worker.role for worker in self._workers.values() if worker.takes_work}
        return WorkerRole.MIXED in roles or {WorkerRole.PREFILL, WorkerRole.DECODE} <= roles

    async def set_targets(self, endpoints: Iterable[WorkerEndpoint]) -> None:
        """Replace the targets: sessions to new incarnations open, those to absent ones close. Of calls that overlap,
        the later one's list stands.

        Raises:
            ValueError: two targets share a worker id.
        """
        listed = list(endpoints)
        wanted = {endpoint.worker_id: endpoint for endpoint in listed}
        if len(wanted) != len(listed):
            raise ValueError("two targets have the same worker_id; list each worker once")
        async with self._is_changing:
            await self._change_targets(wanted)

    async def _change_targets(self, wanted: dict[str, WorkerEndpoint]) -> None:
        gone = [worker for worker in self._workers.values() if wanted.get(worker.worker_id) != worker.endpoint]
        for worker in gone:
            del self._workers[worker.worker_id]
        await asyncio.gather(*(worker.session.close() for worker in gone))
        for worker in gone:
            worker.metrics.remove()
        for endpoint in wanted.values():
            if endpoint.worker_id not in self._workers:
                worker = self._workers[endpoint.worker_id] = Worker(endpoint, self, self._metrics)
                worker.session.start()

    async def close(self) -> None:
        """End every session."""
        await self.set_targets([])

    def check_model(self, worker: Worker, welcome: worker_pb2.Welcome) -> None:
        """The first worker's model is the fleet's for as long as any other worker is up.

        Raises:
            SessionRefusedError: ``worker`` holds another.
        """
        others_up = any(other.is_up for other in self._workers.values() if other is not worker)
        if self._model is None or not others_up:
            self._model = welcome
        elif (welcome.model_hash, welcome.block_size) != (self._model.model_hash, self._model.block_size):
            raise SessionRefusedError(
                f"it holds another model ({welcome.model_hash}, block size {welcome.block_size}) than the fleet "
                f"({self._model.model_hash}, block size {self._model.block_size})"
            )


def update_cached_blocks(cached_blocks: set[bytes], events: worker_pb2.CacheEvents, max_blocks: int) -> None:
    """Apply one frame's prefix-cache changes; the index never outgrows the worker's pool."""
    if events.cleared:
        cached_blocks.clear()
    cached_blocks.update(events.stored)
    cached_blocks.difference_update(events.evicted)
    while len(cached_blocks) > max_blocks:
        cached_blocks.pop()
