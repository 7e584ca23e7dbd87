"""A worker behind a session: a bidirectional gRPC stream that is reopened whenever it breaks.

Owns the channel, reconnects and the stall timeout, and translates between the wire and the contracts. Commands are
queued, never awaited. When a stream breaks, everything sent through it is void.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

import grpc

from pdserve.contracts.events import SchedulerLoad
from pdserve.contracts.request import GenerationRequest, Grammar, KvSource
from pdserve.contracts.worker_config import WorkerEndpoint, whole_worker_id
from pdserve.proto.codec import (
    event_from_proto,
    grammar_to_proto,
    load_from_proto,
    prompt_logprobs_from_proto,
    request_to_proto,
    source_to_proto,
    unpack_tokens,
)
from pdserve.proto.rpc import channel_options, open_channel
from pdserve.proto.token_proof import ClientProof
from pdserve.proto.v1 import worker_pb2
from pdserve.proto.v1.worker_pb2_grpc import WorkerStub
from pdserve.router.cluster.block_set import BlockSet
from pdserve.router.cluster.worker import Worker
from pdserve.router.cluster.worker_metrics import WorkerMetrics
from pdserve.router.requests.retries import backoff_s

if TYPE_CHECKING:
    from pdserve.router.cluster.cluster import Cluster

log = logging.getLogger(__name__)

STALL_TICKS = 10
"""Silent periods after which a stream counts as broken. Counting periods instead of seconds keeps a pause of the
router's own process from being taken for silence of the worker."""
MAX_MESSAGE_BYTES = 64 << 20
MAX_ANNOUNCED = 256

_Call = grpc.aio.StreamStreamCall[worker_pb2.RouterMessage, worker_pb2.WorkerMessage]


class SessionRefusedError(Exception):
    """The peer is not the expected worker, or does not fit the cluster."""


class RemoteWorker(Worker):
    """Keeps a session to one incarnation of a worker open until `close`."""

    def __init__(self, endpoint: WorkerEndpoint, cluster: Cluster) -> None:
        host = endpoint.address.rpartition(":")[0]
        super().__init__(endpoint.worker_id, endpoint.role, host=host, epoch=endpoint.epoch)
        self.cached_blocks: BlockSet = BlockSet(0)
        self.endpoint = endpoint
        self.metrics = WorkerMetrics(cluster.metrics, endpoint.worker_id, endpoint.role)
        self.welcome = worker_pb2.Welcome()
        self.step_s = 0.0
        """Duration of the last step, if the last frame told of one."""
        self._cluster = cluster
        self._tick_s = cluster.stall_timeout_s / STALL_TICKS
        self._num_received = 0
        self._announced: OrderedDict[Grammar, None] = OrderedDict()
        """Grammars announced in this session, the latest ones."""
        self._commands: asyncio.Queue[worker_pb2.RouterMessage] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._is_closing = False

    def relabel(self, endpoint: WorkerEndpoint) -> None:
        """Take the role that the targets now give this incarnation: the session, and all that goes through it, stay."""
        log.info("worker %s is a %s worker from now on", self.worker_id, endpoint.role.value)
        self.endpoint = endpoint
        self.take_role(endpoint.role)
        self.metrics.remove()
        self.metrics = WorkerMetrics(self._cluster.metrics, self.worker_id, self.role, self.metrics)
        if self.is_up:
            self._came_up()

    # Commands

    def submit(self, request: GenerationRequest) -> None:
        self.send(worker_pb2.RouterMessage(submit=worker_pb2.Submit(request=request_to_proto(request))))

    def prepare(self, request: GenerationRequest, source: KvSource) -> None:
        prepare = worker_pb2.Prepare(request=request_to_proto(request), source=source_to_proto(source))
        self.send(worker_pb2.RouterMessage(prepare=prepare))

    def cancel(self, request_id: int, attempt: int) -> None:
        cancel = worker_pb2.Cancel(request_id=request_id, attempt=attempt)
        self.send(worker_pb2.RouterMessage(cancel=cancel))

    def announce(self, grammar: Grammar) -> None:
        if grammar in self._announced:
            return
        self._announced[grammar] = None
        if len(self._announced) > MAX_ANNOUNCED:
            self._announced.popitem(last=False)
        self.send(worker_pb2.RouterMessage(announce=grammar_to_proto(grammar)))

    def send(self, message: worker_pb2.RouterMessage) -> None:
        """Queue a command. A break voids everything sent before it."""
        assert self.is_up
        self._commands.put_nowait(message)

    # Messages of the worker

    def session_opened(self, welcome: worker_pb2.Welcome) -> None:
        """Take work.

        Raises:
            SessionRefusedError: the worker does not fit the cluster; the session closes and retries later.
        """
        self._cluster.check_model(self, welcome)
        self.welcome = welcome
        self.kv_address = welcome.kv_address
        self.block_size = welcome.block_size
        self.max_batch_tokens, self.max_batch_size = welcome.max_batch_tokens, welcome.max_batch_size
        self.load = SchedulerLoad(num_blocks_free=welcome.num_blocks)
        self.is_draining = False
        self.cached_blocks = BlockSet(welcome.num_blocks + welcome.num_tier_blocks)
        self._announced.clear()
        log.info("worker %s is up at %s", self.worker_id, self.endpoint.address)
        self._came_up()

    def _came_up(self) -> None:
        dispatcher = self._cluster.dispatcher
        cost = dispatcher.costs.get(self.role)
        self.metrics.came_up(self.welcome, cost.hardware.price_per_hour_usd if cost else None)
        dispatcher.worker_up(self)

    def frame_received(self, frame: worker_pb2.StepFrame) -> None:
        """Apply a frame: worker state first, then starts, prompt log probabilities, tokens and ends of requests."""
        dispatcher = self._cluster.dispatcher
        was_draining = self.is_draining
        if frame.HasField("load"):
            self.load = load_from_proto(frame.load)
            self.is_draining = self.load.draining
            self.metrics.observe(self.load, frame.steps)
            self.step_s = frame.steps[-1].seconds if frame.steps else 0.0
        for events in frame.cache:
            self._update_cached_blocks(events)
        if was_draining and not self.is_draining:
            dispatcher.worker_up(self)
        for report in frame.transfers:
            source, target = self._cluster.worker_at(report.source), whole_worker_id(self.worker_id)
            if report.is_prefix:
                self._cluster.prefix_pulled(self, report)
            if not report.is_prefix or not report.failure_stage:
                self._cluster.metrics.observe_transfer(report, source, target)
            if report.num_tokens and not report.failure_stage:
                is_same_host = report.source.rpartition(":")[0] == self.host
                placement, num_tokens = dispatcher.placement, report.num_tokens
                placement.pulled(self.role, num_tokens, report.seconds, source, same_host=is_same_host)
        endings = []
        for message in frame.events:
            event = event_from_proto(message)
            if event.kind.is_terminal:
                endings.append(event)
            else:
                dispatcher.event_received(self, event)
        for prompt_logprobs in frame.prompt_logprobs:
            dispatcher.prompt_logprobs_received(self, prompt_logprobs_from_proto(prompt_logprobs))
        if frame.tokens.request_id:
            self.num_steps += len(frame.tokens.request_id) / len(set(frame.tokens.request_id))
            self.stepped_s = time.monotonic()
        dispatcher.tokens_received(self, unpack_tokens(frame.tokens))
        for event in endings:
            dispatcher.event_received(self, event)
        self.snapshot()  # made now, so that no decision takes that time

    def session_broken(self, reason: str) -> None:
        """The stream broke; called exactly once per `session_opened` that returned."""
        if not self._is_closing:
            self._cluster.metrics.failed(f"{self.worker_id} was lost: {reason}")
        self.metrics.went_down()
        self._cluster.worker_lost(self)

    def _update_cached_blocks(self, events: worker_pb2.CacheEvents) -> None:
        if events.cleared:
            self.cached_blocks = BlockSet(self.welcome.num_blocks + self.welcome.num_tier_blocks)
        self.cached_blocks.difference_update(events.evicted)
        self.cached_blocks.update(events.stored)

    # The session

    def start(self) -> None:
        """Begin to connect; requires a running event loop."""
        assert self._task is None
        self._task = asyncio.create_task(self._run(), name=f"session {self.worker_id}")

    async def close(self) -> None:
        """End the session for good; calls `session_broken` if it was open."""
        self._is_closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        """Run one stream after another, with backoff between them."""
        num_failures = 0
        last_reason = ""
        while True:
            reason, was_up = await self._live_once()
            if reason != last_reason or was_up:
                log.warning("session with %s at %s: %s", self.worker_id, self.endpoint.address, reason)
            last_reason = reason
            num_failures = 1 if was_up else num_failures + 1
            await asyncio.sleep(backoff_s(num_failures, random.random()))

    async def _live_once(self) -> tuple[str, bool]:
        """Run one stream from hello to break; return why it ended and whether the worker had answered."""
        self._commands = asyncio.Queue()
        reason, was_up = "closed", False
        try:
            opened = open_channel(self.endpoint.address, channel_options(MAX_MESSAGE_BYTES), self._cluster.tls)
        except ValueError as error:  # a certificate is being replaced
            return str(error), False
        async with opened as channel:
            reader = asyncio.create_task(self._read(channel))
            try:
                reason = await self._watch(reader)
            finally:
                was_up = self.is_up
                reader.cancel()
                try:
                    if was_up:
                        self.session_broken(reason)
                except Exception:  # the worker must be able to reconnect all the same
                    log.exception("session with %s: its end could not be handled", self.worker_id)
                await asyncio.wait({reader})
        return reason, was_up

    async def _watch(self, reader: asyncio.Task[str]) -> str:
        """Wait until ``reader`` ends or has been silent for too long; return the reason."""
        silent_ticks = 0
        while silent_ticks < STALL_TICKS:
            num_received = self._num_received
            done, _ = await asyncio.wait({reader}, timeout=self._tick_s)
            if done:
                return reader.result()
            silent_ticks = silent_ticks + 1 if self._num_received == num_received else 0
        return f"silent for {self._tick_s * STALL_TICKS:g} s"

    async def _read(self, channel: grpc.aio.Channel) -> str:
        """Receive until the stream ends; return the reason."""
        ours = ClientProof(self._cluster.cluster_token, self.endpoint.address)
        call = WorkerStub(channel).Session(None, metadata=ours.metadata)
        writer: asyncio.Task[None] | None = None
        try:
            proof = await ours.answer(call)
            writer = asyncio.create_task(self._write(call, proof, self._commands))
            async for message in call:
                self._num_received += 1
                self._receive(message)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        except (PermissionError, SessionRefusedError) as error:
            return str(error)
        except Exception:
            log.exception("session with %s: a message could not be handled", self.worker_id)
            return "a message could not be handled"
        finally:
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
        return "the worker ended the stream"

    async def _write(self, call: _Call, proof: bytes, commands: asyncio.Queue[worker_pb2.RouterMessage]) -> None:
        """Send commands until cancelled; ends the stream. gRPC would not end a task that reads an iterator for it."""
        # The clock grows over all sessions to a worker, even if it left the targets and returned.
        epoch = time.monotonic_ns()
        hello = worker_pb2.Hello(router_id=self._cluster.router_id, session_epoch=epoch, proof=proof)
        try:
            await call.write(worker_pb2.RouterMessage(hello=hello))
            while True:
                await call.write(await commands.get())
        finally:
            call.cancel()

    def _receive(self, message: worker_pb2.WorkerMessage) -> None:
        body = message.WhichOneof("body")
        if body == "frame" and self.is_up:
            self.frame_received(message.frame)
        elif body == "welcome" and not self.is_up:
            self._check_identity(message.welcome)
            self.session_opened(message.welcome)
        else:
            raise SessionRefusedError(f"unexpected message {body!r}")

    def _check_identity(self, welcome: worker_pb2.Welcome) -> None:
        if (welcome.worker_id, welcome.worker_epoch) != (self.worker_id, self.epoch):
            raise SessionRefusedError(f"another worker answers: {welcome.worker_id!r}, epoch {welcome.worker_epoch}")
