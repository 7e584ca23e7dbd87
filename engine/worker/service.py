"""The worker's gRPC service: router sessions on an event loop in its own thread.

Validates routers' commands and puts them into the step loop's inbox. Receives the step loop's reports through
`WorkerService.publish` and packs what is in them for a router's own requests into a frame that it sends at once. Load,
steps and cache changes go with it, and within `NEWS_INTERVAL_S` to every other router. A router that does not read its
stream, or loses its connection, loses its own session only and never delays a step. Never touches the scheduler.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress

import grpc

from pdserve.contracts.events import RefusalCode, RequestEvent, RequestEventKind, RequestKey, SchedulerLoad
from pdserve.contracts.request import Grammar
from pdserve.contracts.step import ModelLimits
from pdserve.contracts.worker_config import WorkerConfig
from pdserve.engine.worker.live_loop import STALL_LIMIT_S, Inbox
from pdserve.engine.worker.loop import StepReport
from pdserve.engine.worker.messages import AddRequest, CancelRequest, SessionEnded
from pdserve.engine.worker.sessions import Session, SessionTable
from pdserve.proto.codec import (
    WireError,
    event_to_proto,
    grammar_from_proto,
    load_to_proto,
    pack_frames,
    request_from_proto,
    source_from_proto,
)
from pdserve.proto.rpc import listen, server_options
from pdserve.proto.token_proof import ServerProof, UnprovenCalls, UnprovenError
from pdserve.proto.v1 import worker_pb2

HEARTBEAT_S = 0.5
"""Maximum interval between messages on a healthy session."""

NEWS_INTERVAL_S = 0.05
"""Minimum interval between frames without tokens or events of the router's own. Each costs a router as much as one with
tokens, and it gets them from all workers, while the load that a decision needs is a few steps old anyway."""

HELLO_TIMEOUT_S = 10.0
MAX_UNPROVEN_SESSIONS = 64
"""Streams without a hello, each of which may hold a message of `_serve`'s limit. Further ones end the oldest."""
MAX_ROUTER_ID_LENGTH = 128
HASHES_PER_FRAME = 8192
"""Block hashes in one of the first frames of a session, which say what is cached. Streams of the router go on between
frames."""
MAX_SNAPSHOT_HASHES = 64 * HASHES_PER_FRAME
"""In all of these frames: 9.4 MB. Of more, the router misses those cached last until they are stored anew."""

MAX_WAITING_REPORTS = 256
"""Reports of the step loop, two for a step, that wait for the event loop; at the next one the step loop waits, too."""

STOP_GRACE_S = 0.5
"""Time for queued messages to leave before the sessions are cut."""

BYTES_PER_TOKEN_ON_WIRE = 5

_log = logging.getLogger(__name__)
_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name

_RequestStream = AsyncIterator[worker_pb2.RouterMessage]
_Context = grpc.aio.ServicerContext[worker_pb2.RouterMessage, bytes]


class WorkerService:
    """Serves `Worker.Session`. Any thread may call ``start``, ``publish`` and ``stop``."""

    def __init__(
        self,
        config: WorkerConfig,
        limits: ModelLimits,
        welcome: worker_pb2.Welcome,
        inbox: Inbox,
        *,
        is_healthy: Callable[[], bool],
        announce: Callable[[Grammar], object] = lambda grammar: None,
    ) -> None:
        """
        Args:
            welcome: first message on every session.
            announce: called with grammars of requests that may follow; returns at once.
            is_healthy: whether the step loop turns; heartbeats stop when it does not.
        """
        self._config = config
        self._limits = limits
        self._welcome = welcome
        self._inbox = inbox
        self._is_healthy = is_healthy
        self._announce = announce
        self._sessions = SessionTable(lambda n: inbox.put(SessionEnded(n)))
        self._unproven = UnprovenCalls(MAX_UNPROVEN_SESSIONS, HELLO_TIMEOUT_S)
        self._load = load_to_proto(SchedulerLoad())
        """Load in the last report."""
        self._has_news = asyncio.Event()
        """Something is untold in a session."""
        self._cached_hashes: dict[bytes, None] = {}
        """Prefix cache contents according to the reports, parents first, for sessions that open later."""
        self._room = threading.Semaphore(MAX_WAITING_REPORTS)
        self._address = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> str:
        """Listen on a free port in a new thread; returns ``host:port``."""
        address: Future[str] = Future()
        self._thread = threading.Thread(target=self._run, args=(address,), name="worker-service", daemon=True)
        self._thread.start()
        return address.result()

    def publish(self, report: StepReport) -> None:
        """Send a report of the step loop; returns at once unless `MAX_WAITING_REPORTS` wait.

        Raises:
            RuntimeError: the event loop takes none.
        """
        assert self._loop is not None, "start comes first"
        if not self._room.acquire(timeout=STALL_LIMIT_S):
            raise RuntimeError("the gRPC service takes no reports")
        self._loop.call_soon_threadsafe(self._deliver, report)

    def stop(self) -> None:
        """Close every session and the port. The step loop must not publish afterwards."""
        if self._thread is not None and self._thread.is_alive():
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _run(self, address: Future[str]) -> None:
        try:
            asyncio.run(self._serve(address))
        except Exception as error:
            if address.done():
                self._die()
            else:
                address.set_exception(error)

    def _die(self) -> None:
        """Report the service as dead: a service that lost a frame or its event loop must not continue silently."""
        _log.exception("the gRPC service died")
        self._inbox.stop("the gRPC service died")

    async def _serve(self, address: Future[str]) -> None:
        self._loop = asyncio.get_running_loop()
        # Apart from its tokens a request has a few short fields: four times the tokens' size is ample.
        max_receive_bytes = max(4 * BYTES_PER_TOKEN_ON_WIRE * self._limits.max_model_len, 1 << 20)
        server = grpc.aio.server(options=server_options(max_receive_bytes))
        handler = grpc.stream_stream_rpc_method_handler(
            self._session, request_deserializer=worker_pb2.RouterMessage.FromString
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {"Session": handler}),))
        self._address = listen(server, self._config.host, self._config.tls, self._config.ports)
        await server.start()
        async with asyncio.TaskGroup() as tasks:
            news = tasks.create_task(self._send_news())
            address.set_result(self._address)
            await self._stop.wait()
            news.cancel()
        await server.stop(STOP_GRACE_S)

    async def _session(self, requests: _RequestStream, context: _Context) -> None:
        proof = ServerProof(self._config.cluster_token, self._address, dict(context.invocation_metadata() or ()))
        session = await self._open_session(requests, context, proof)
        work = (self._read(session, requests), _write(session, context), session.closed.wait())
        tasks = [asyncio.ensure_future(part) for part in work]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            try:
                outcomes = await asyncio.gather(*tasks, return_exceptions=True)
                if isinstance(outcomes[0], WireError):
                    session.close(str(outcomes[0]))
            finally:  # the call may be cancelled during cleanup
                self._sessions.leave(session)
        if session.close_reason:
            await context.abort(grpc.StatusCode.ABORTED, session.close_reason)

    async def _open_session(self, requests: _RequestStream, context: _Context, proof: ServerProof) -> Session:
        """Read the hello, fence older streams and queue the welcome. Aborts the call if no session can be opened."""
        try:
            async with self._unproven.wait():
                await context.send_initial_metadata(proof.metadata)
                first = await anext(aiter(requests), None)
        except UnprovenError as error:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
        if first is None or first.WhichOneof("body") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a session starts with a hello")
        hello = first.hello
        if not proof.is_proven(hello.proof):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the router does not know the cluster token")
        if not 1 <= len(hello.router_id) <= MAX_ROUTER_ID_LENGTH:
            message = f"router_id must have 1..{MAX_ROUTER_ID_LENGTH} letters"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)
        session = self._sessions.enter(hello.router_id, hello.session_epoch)
        if session is None:
            message = f"session epoch {hello.session_epoch} is not newer than this router's last"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
        session.send(worker_pb2.WorkerMessage(welcome=self._welcome))
        known = list(itertools.islice(self._cached_hashes, MAX_SNAPSHOT_HASHES))
        for start in range(0, len(known) or 1, HASHES_PER_FRAME):
            cache = worker_pb2.CacheEvents(cleared=not start, stored=known[start : start + HASHES_PER_FRAME])
            session.send_frame(worker_pb2.StepFrame(load=self._load, cache=[cache]))
        return session

    async def _read(self, session: Session, requests: _RequestStream) -> None:
        """Turn commands into inbox messages until the router closes its half or the session is closed.

        Raises:
            WireError: no version of the protocol allows the command here.
        """
        async for message in requests:
            if session.closed.is_set():
                return  # its end is already in the inbox: later requests would never be cancelled
            body = message.WhichOneof("body")
            if body in ("submit", "prepare"):
                self._read_request(session, message)
            elif body == "cancel":
                key = RequestKey(session.id, message.cancel.request_id, message.cancel.attempt)
                self._inbox.put(CancelRequest(key))
            elif body == "announce":
                with suppress(WireError):  # requests with it will be refused
                    self._announce(grammar_from_proto(message.announce, self._limits))
            else:
                raise WireError(f"a session does not take {body or 'an empty message'} here")

    def _read_request(self, session: Session, message: worker_pb2.RouterMessage) -> None:
        """Read a request. One that breaks a limit is refused with an event; the session continues."""
        is_prepare = message.HasField("prepare")
        wire_request = message.prepare.request if is_prepare else message.submit.request
        key = RequestKey(session.id, wire_request.request_id, wire_request.attempt)
        if self._inbox.is_full:
            self._refuse(session, key, RefusalCode.OVERLOADED, "the worker is overloaded")
            return
        try:
            request = request_from_proto(wire_request, self._limits)
            source = source_from_proto(message.prepare.source) if is_prepare else None
        except WireError as error:
            self._refuse(session, key, RefusalCode.INVALID, str(error))
            return
        self._inbox.put(AddRequest(key, request, time.monotonic(), source))

    def _refuse(self, session: Session, key: RequestKey, code: RefusalCode, message: str) -> None:
        refused = event_to_proto(RequestEvent(key, RequestEventKind.REJECTED, message, refusal=code))
        session.send_frame(worker_pb2.StepFrame(events=[refused], load=self._load))

    def _deliver(self, report: StepReport) -> None:
        """Send a report, on the event loop."""
        try:
            self._queue_frames(report)
        except Exception:
            self._die()
        finally:
            self._room.release()

    def _queue_frames(self, report: StepReport) -> None:
        """Pack a report and queue it to the sessions with an event in it; the others are told soon."""
        self._cached_hashes.update(dict.fromkeys(report.cache.stored))
        for block_hash in report.cache.evicted:
            self._cached_hashes.pop(block_hash, None)
        last_load, self._load = self._load, load_to_proto(report.load)
        news = _news(report)
        is_news = self._load != last_load or news.ByteSize() > 0
        frames = pack_frames(report.events)  # also for sessions that ended: their requests are being cancelled
        for session in self._sessions.open.values():
            frame = frames.get(session.id)
            if frame is None and not is_news:
                continue
            session.untold.MergeFrom(news)
            session.untold.load.CopyFrom(self._load)
            if frame is not None:
                session.send_frame(frame)
            else:
                self._has_news.set()

    async def _send_news(self) -> None:
        """Send what is untold, and a heartbeat through each quiet session."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S / 2 - NEWS_INTERVAL_S):
                    await self._has_news.wait()
            self._has_news.clear()
            quiet_since_s = time.monotonic() - HEARTBEAT_S / 2
            for session in self._sessions.open.values():
                if session.untold.HasField("load"):
                    session.send_frame(worker_pb2.StepFrame())
                elif session.sent_s <= quiet_since_s and self._is_healthy():
                    session.send_frame(worker_pb2.StepFrame(load=self._load))
            await asyncio.sleep(NEWS_INTERVAL_S)


def _news(report: StepReport) -> worker_pb2.StepFrame:
    """What every session is told of a report, apart from its load."""
    news = worker_pb2.StepFrame()
    if report.step is not None:
        step = news.steps.add(seconds=report.step_s, num_tokens=report.step.num_new_tokens)
        if report.step.prediction is not None:
            step.predicted_s = report.step.prediction.predicted_s
            step.has_prefill = report.step.prediction.has_prefill
    for pull in report.pulls:
        news.transfers.add(
            transport=pull.transport,
            seconds=pull.seconds,
            bytes=pull.num_bytes,
            failure_stage=pull.failure_stage,
            ended_request=pull.first_token is not None and bool(pull.first_token.finish),
            source=pull.source,
            is_prefix=pull.is_prefix,
            num_tokens=pull.num_tokens,
        )
    if report.cache.stored or report.cache.evicted:
        news.cache.add(stored=report.cache.stored, evicted=report.cache.evicted)
    return news


async def _write(session: Session, context: _Context) -> None:
    while True:
        await context.write(await session.next_message())
