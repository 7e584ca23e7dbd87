"""Workers available to the router: one session per target, whose frames keep the dispatch core current.

Translates between the wire and the contracts. The supervisor sets the targets through the admin port. Makes no
decisions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from pdserve.contracts.events import SchedulerLoad
from pdserve.contracts.placement import WorkerEndpoint, WorkerRole
from pdserve.contracts.request import GenerationRequest, KvSource
from pdserve.proto.codec import (
    event_from_proto,
    load_from_proto,
    prompt_logprobs_from_proto,
    request_to_proto,
    source_to_proto,
    unpack_tokens,
)
from pdserve.proto.v1 import worker_pb2
from pdserve.router.cluster.session import Credentials, SessionRefusedError, WorkerSession
from pdserve.router.cluster.worker import Worker
from pdserve.router.metrics import RouterMetrics, WorkerMetrics
from pdserve.router.requests.dispatch import Dispatcher
from pdserve.router.requests.generation import ServedModel

log = logging.getLogger(__name__)


class RemoteWorker(Worker, WorkerSession):
    """One incarnation of a worker, connected by a session."""

    def __init__(
        self, endpoint: WorkerEndpoint, fleet: Fleet, metrics: RouterMetrics, credentials: Credentials
    ) -> None:
        host = endpoint.address.rpartition(":")[0]
        Worker.__init__(self, endpoint.worker_id, endpoint.role, host=host, epoch=endpoint.epoch)
        WorkerSession.__init__(self, endpoint, credentials)
        self.metrics = WorkerMetrics(metrics, endpoint.worker_id, endpoint.role)
        self.welcome = worker_pb2.Welcome()
        self.reported = worker_pb2.Load()
        """Last load as received."""
        self._fleet = fleet
        self._router_metrics = metrics

    # Commands

    def submit(self, request: GenerationRequest) -> None:
        self.send(worker_pb2.RouterMessage(submit=worker_pb2.Submit(request=request_to_proto(request))))

    def prepare(self, request: GenerationRequest, source: KvSource) -> None:
        prepare = worker_pb2.Prepare(request=request_to_proto(request), source=source_to_proto(source))
        self.send(worker_pb2.RouterMessage(prepare=prepare))

    def cancel(self, request_id: int, attempt: int) -> None:
        cancel = worker_pb2.Cancel(request_id=request_id, attempt=attempt)
        self.send(worker_pb2.RouterMessage(cancel=cancel))

    # Session

    def session_opened(self, welcome: worker_pb2.Welcome) -> None:
        self._fleet.check_model(self, welcome)
        self.welcome = welcome
        self.kv_address = welcome.kv_address
        self.block_size = welcome.block_size
        self.max_batch_tokens, self.max_batch_size = welcome.max_batch_tokens, welcome.max_batch_size
        self.reported = worker_pb2.Load(num_blocks_free=welcome.num_blocks)
        self.load = SchedulerLoad(num_blocks_free=welcome.num_blocks)
        self.prefill_correction = self.decode_correction = 1.0
        self.is_draining = False
        self.cached_blocks.clear()
        self.metrics.up.set(1)
        log.info("worker %s is up at %s", self.worker_id, self.endpoint.address)
        self._fleet.dispatcher.worker_up(self)

    def frame_received(self, frame: worker_pb2.StepFrame) -> None:
        """Apply a frame: worker state first, then starts, prompt log probabilities, tokens and ends of requests."""
        if frame.HasField("load"):
            self._take_load(frame.load)
        if frame.HasField("cache"):
            update_cached_blocks(self.cached_blocks, frame.cache, self.welcome.num_blocks)
        for report in frame.transfers:
            self._router_metrics.observe_transfer(report)
        dispatcher = self._fleet.dispatcher
        endings = []
        for message in frame.events:
            event = event_from_proto(message)
            if event.kind.is_terminal:
                endings.append(event)
            else:
                dispatcher.event_received(self, event)
        for prompt_logprobs in frame.prompt_logprobs:
            dispatcher.prompt_logprobs_received(self, prompt_logprobs_from_proto(prompt_logprobs))
        dispatcher.tokens_received(self, unpack_tokens(frame.tokens))
        for event in endings:
            dispatcher.event_received(self, event)

    def _take_load(self, load: worker_pb2.Load) -> None:
        self.reported = load
        self.load = load_from_proto(load)
        was_draining, self.is_draining = self.is_draining, load.draining
        self.prefill_correction = load.prefill_correction or 1.0
        self.decode_correction = load.decode_correction or 1.0
        self.metrics.observe(load)
        if was_draining and not load.draining:
            self._fleet.dispatcher.worker_up(self)

    def session_broken(self, reason: str) -> None:
        self.metrics.up.set(0)
        self._fleet.dispatcher.worker_lost(self)
        self._fleet.worker_lost()


class Fleet:
    """All targets, with one session each."""

    def __init__(self, dispatcher: Dispatcher, metrics: RouterMetrics, credentials: Credentials) -> None:
        self.dispatcher = dispatcher
        self.is_proven = False
        """Whether a round trip through both phases has succeeded since both were last up."""
        self._metrics = metrics
        self._credentials = credentials
        self._workers: dict[str, RemoteWorker] = {}
        self._model: worker_pb2.Welcome | None = None
        self._is_changing = asyncio.Lock()

    @property
    def workers(self) -> list[RemoteWorker]:
        """All targets, up or not, by id."""
        return [self._workers[worker_id] for worker_id in sorted(self._workers)]

    @property
    def targets(self) -> list[WorkerEndpoint]:
        return [worker.endpoint for worker in self.workers]

    @property
    def model(self) -> ServedModel | None:
        """``None`` until the first worker has connected."""
        return None if self._model is None else ServedModel(max_model_len=self._model.max_model_len)

    def worker(self, worker_id: str) -> RemoteWorker:
        return self._workers[worker_id]

    def worker_lost(self) -> None:
        """Clear `is_proven` if a phase has lost its last worker."""
        self.is_proven &= self.serves_both_phases()

    def serves_both_phases(self) -> bool:
        """Whether prefill and decode workers, or a mixed one, accept work now.

        False for decode workers alone: they could serve by prefilling locally, but such a deployment is degraded.
        """
        roles = {worker.role for worker in self._workers.values() if worker.takes_work}
        return WorkerRole.MIXED in roles or {WorkerRole.PREFILL, WorkerRole.DECODE} <= roles

    async def set_targets(self, endpoints: Iterable[WorkerEndpoint]) -> None:
        """Replace the targets: open sessions to new incarnations and close those to absent ones. Of overlapping calls,
        the last one's list wins.

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
        await asyncio.gather(*(worker.close() for worker in gone))
        for worker in gone:
            worker.metrics.remove()
        for endpoint in wanted.values():
            if endpoint.worker_id not in self._workers:
                worker = RemoteWorker(endpoint, self, self._metrics, self._credentials)
                self._workers[endpoint.worker_id] = worker
                worker.start()

    async def close(self) -> None:
        await self.set_targets([])

    def check_model(self, worker: RemoteWorker, welcome: worker_pb2.Welcome) -> None:
        """Check a worker's model against the fleet's: that of the first worker, for as long as any other is up.

        Raises:
            SessionRefusedError: ``worker`` has another model.
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
    """Apply one frame's prefix-cache changes; the index never exceeds the size of the worker's pool."""
    if events.cleared:
        cached_blocks.clear()
    cached_blocks.update(events.stored)
    cached_blocks.difference_update(events.evicted)
    while len(cached_blocks) > max_blocks:
        cached_blocks.pop()
