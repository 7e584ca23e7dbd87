"""Session with one worker: a bidirectional gRPC stream that is reopened whenever it breaks.

Owns the channel, reconnects and the stall timeout; a subclass receives messages in stream order. Commands are queued,
never awaited. Knows nothing of requests: when a stream breaks, everything sent through it is void.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from pdserve.contracts.placement import WorkerEndpoint
from pdserve.kv_transfer.rpc import call_metadata
from pdserve.proto.v1 import worker_pb2
from pdserve.proto.v1.worker_pb2_grpc import WorkerStub

log = logging.getLogger(__name__)

STALL_TICKS = 6
"""Silent periods after which a stream counts as broken. Counting periods instead of seconds keeps a pause of the
router's own process from being taken for silence of the worker."""
MAX_MESSAGE_BYTES = 64 << 20
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A cut cable sends no FIN: ping from this side as the worker does from the other.
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    # A failed connection must not delay the next session to a worker restarted on the same port.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Identity of the router towards its workers."""

    router_id: str
    """Constant for the life of the process."""
    cluster_token: str = ""
    stall_timeout_s: float = 3.0
    """Seconds of silence after which a session is broken; workers send at least every half second."""


class SessionRefusedError(Exception):
    """The peer is not the expected worker, or does not fit the fleet."""


class WorkerSession(ABC):
    """Keeps a session to one incarnation of a worker open until `close`. The event loop calls the abstract methods,
    which must not block."""

    def __init__(self, endpoint: WorkerEndpoint, credentials: Credentials) -> None:
        self.endpoint = endpoint
        self.is_open = False
        self._router_id = credentials.router_id
        self._metadata = call_metadata(credentials.cluster_token)
        self._tick_s = credentials.stall_timeout_s / STALL_TICKS
        self._num_received = 0
        self._commands: asyncio.Queue[worker_pb2.RouterMessage] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    @abstractmethod
    def session_opened(self, welcome: worker_pb2.Welcome) -> None:
        """The worker answered; commands may be sent.

        Raises:
            SessionRefusedError: the worker does not fit; the session closes and retries later.
        """

    @abstractmethod
    def frame_received(self, frame: worker_pb2.StepFrame) -> None: ...

    @abstractmethod
    def session_broken(self, reason: str) -> None:
        """The stream broke; called exactly once per `session_opened` that returned."""

    def start(self) -> None:
        """Begin to connect; requires a running event loop."""
        assert self._task is None
        self._task = asyncio.create_task(self._run(), name=f"session {self.endpoint.worker_id}")

    async def close(self) -> None:
        """End the session for good; calls `session_broken` if it was open."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def send(self, message: worker_pb2.RouterMessage) -> None:
        """Queue a command; requires an open session. A break voids everything sent before it."""
        assert self.is_open
        self._commands.put_nowait(message)

    async def _run(self) -> None:
        """Run one stream after another, with backoff between them."""
        backoff_s = MIN_BACKOFF_S
        last_reason = ""
        while True:
            reason, was_open = await self._live_once()
            if reason != last_reason or was_open:
                log.warning("session with %s at %s: %s", self.endpoint.worker_id, self.endpoint.address, reason)
            last_reason = reason
            backoff_s = MIN_BACKOFF_S if was_open else min(2 * backoff_s, MAX_BACKOFF_S)
            await asyncio.sleep(backoff_s * random.uniform(0.75, 1.25))

    async def _live_once(self) -> tuple[str, bool]:
        """Run one stream from hello to break; return why it ended and whether the worker had answered."""
        self._commands = asyncio.Queue()
        reason, was_open = "closed", False
        async with grpc.aio.insecure_channel(self.endpoint.address, options=CHANNEL_OPTIONS) as channel:
            reader = asyncio.create_task(self._read(channel))
            try:
                reason = await self._watch(reader)
            finally:
                was_open, self.is_open = self.is_open, False
                reader.cancel()
                if was_open:
                    self._report_broken(reason)
                await asyncio.wait({reader})
        return reason, was_open

    def _report_broken(self, reason: str) -> None:
        try:
            self.session_broken(reason)
        except Exception:  # the worker must be able to reconnect all the same
            log.exception("session with %s: its end could not be handled", self.endpoint.worker_id)

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
        call = WorkerStub(channel).Session(self._outgoing(self._commands), metadata=self._metadata)
        try:
            async for message in call:
                self._num_received += 1
                self._receive(message)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        except SessionRefusedError as error:
            return str(error)
        except Exception:
            log.exception("session with %s: a message could not be handled", self.endpoint.worker_id)
            return "a message could not be handled"
        finally:
            call.cancel()
        return "the worker ended the stream"

    async def _outgoing(
        self, commands: asyncio.Queue[worker_pb2.RouterMessage]
    ) -> AsyncIterator[worker_pb2.RouterMessage]:
        # The clock grows over all sessions to a worker, even if it left the targets and returned.
        hello = worker_pb2.Hello(router_id=self._router_id, session_epoch=time.monotonic_ns())
        yield worker_pb2.RouterMessage(hello=hello)
        while True:
            yield await commands.get()

    def _receive(self, message: worker_pb2.WorkerMessage) -> None:
        body = message.WhichOneof("body")
        if body == "frame" and self.is_open:
            self.frame_received(message.frame)
        elif body == "welcome" and not self.is_open:
            self._check_identity(message.welcome)
            self._open(message.welcome)
        else:
            raise SessionRefusedError(f"unexpected message {body!r}")

    def _open(self, welcome: worker_pb2.Welcome) -> None:
        self.is_open = True  # commands may be sent at once
        try:
            self.session_opened(welcome)
        except SessionRefusedError:
            self.is_open = False
            raise

    def _check_identity(self, welcome: worker_pb2.Welcome) -> None:
        wanted = self.endpoint
        if (welcome.worker_id, welcome.worker_epoch, welcome.role) != (
            wanted.worker_id, wanted.epoch, wanted.role.value,
        ):  # fmt: skip
            raise SessionRefusedError(
                f"another worker answers: {welcome.worker_id!r} ({welcome.role}), epoch {welcome.worker_epoch}"
            )
