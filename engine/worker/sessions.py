"""Router sessions of one worker: open streams, the epochs that fence older streams, and each session's send queue.

Owned by the gRPC service and used only on its event loop. Never calls gRPC.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable

from pdserve.proto.v1 import worker_pb2

MAX_QUEUED_BYTES = 16 << 20
MAX_QUEUED_FRAMES = 8192
"""Send queue limit. A router with more queued frames has stalled, and its session is closed."""

MAX_REMEMBERED_ROUTERS = 256
"""Routers whose last epoch is remembered. Beyond this, disconnected routers are forgotten, oldest first."""


class Session:
    """One stream of one router, from hello to end."""

    def __init__(self, session_id: int, router_id: str, epoch: int) -> None:
        self.id = session_id
        """Local id of the session, as in `RequestKey.session`."""
        self.router_id = router_id
        self.epoch = epoch
        self.sent_s = time.monotonic()
        self.close_reason = ""
        """Reason why the worker ends the stream; empty while it is open or if the router ended it."""
        self.untold = worker_pb2.StepFrame()
        """Load and changes of the worker, which every session is told, since this one's last frame."""
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._queued_bytes = 0
        self.closed = asyncio.Event()
        self.has_ended = False
        """Its requests are being cancelled."""

    def send(self, message: worker_pb2.WorkerMessage) -> None:
        """Queue a message. If the queue is full the router has stalled, and the session is closed instead."""
        if self.closed.is_set():
            return
        data = message.SerializeToString()
        if self._queued_bytes + len(data) > MAX_QUEUED_BYTES or self._queue.qsize() >= MAX_QUEUED_FRAMES:
            self.close("the router does not read its stream")
            return
        self._queue.put_nowait(data)
        self._queued_bytes += len(data)
        self.sent_s = time.monotonic()

    def send_frame(self, frame: worker_pb2.StepFrame) -> None:
        """Queue ``frame``, and with it what is untold."""
        frame.MergeFrom(self.untold)
        self.untold.Clear()
        self.send(worker_pb2.WorkerMessage(frame=frame))

    def close(self, reason: str) -> None:
        """End the session from this side and drop queued messages."""
        self.close_reason = self.close_reason or reason
        self._queue = asyncio.Queue()
        self._queued_bytes = 0
        self.closed.set()

    async def next_message(self) -> bytes:
        """Wait for the oldest queued message and return it serialised."""
        data = await self._queue.get()
        self._queued_bytes -= len(data)
        return data


class SessionTable:
    """All sessions of a worker. ``on_end`` receives the id of a session whose requests must be cancelled."""

    def __init__(self, on_end: Callable[[int], None]) -> None:
        self._on_end = on_end
        self._newest: dict[str, Session] = {}
        """Last session of each router."""
        self._ids = itertools.count(1)
        self.open: dict[int, Session] = {}
        """Sessions with an open stream, by id."""

    def enter(self, router_id: str, epoch: int) -> Session | None:
        """Open a session and end the router's older one at once; ``None`` if the epoch is not newer than the last."""
        last = self._newest.get(router_id)
        if last is not None:
            if epoch <= last.epoch:
                return None
            last.close("the router opened a newer session")
            self._end(last)
        session = self._newest[router_id] = Session(next(self._ids), router_id, epoch)
        self.open[session.id] = session
        gone = [router_id for router_id, session in self._newest.items() if session.has_ended]
        for router_id in gone[: max(len(self._newest) - MAX_REMEMBERED_ROUTERS, 0)]:
            del self._newest[router_id]
        return session

    def leave(self, session: Session) -> None:
        """Handle the end of a stream, whoever ended it: the router counts what it sent through it as lost."""
        session.closed.set()
        self._end(session)

    def _end(self, session: Session) -> None:
        self.open.pop(session.id, None)
        if not session.has_ended:
            session.has_ended = True
            self._on_end(session.id)
