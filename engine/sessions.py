"""Router sessions of one worker: who is connected, which epoch fences which, and what waits to be sent to each.

Owned by the gRPC service and used on its event loop only. Never talks gRPC itself.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable

from pdserve.proto.v1 import worker_pb2

MAX_QUEUED_BYTES = 16 << 20
MAX_QUEUED_FRAMES = 8192
"""A router that lets more than this pile up has stalled; its session is closed."""

MAX_REMEMBERED_ROUTERS = 256
"""Routers whose last epoch is kept after they left."""


class Session:
    """One stream of one router, from its hello to its end."""

    def __init__(self, session: int, router_id: str, epoch: int) -> None:
        self.number = session
        """Local name of the session, as in `RequestKey.session`."""
        self.router_id = router_id
        self.epoch = epoch
        self.sent_s = time.monotonic()
        """When something was last queued."""
        self.close_reason = ""
        """Why the worker ends the stream; empty while it stands or when the router ended it."""
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._changed = asyncio.Event()
        self.closed = asyncio.Event()

    def send(self, message: worker_pb2.WorkerMessage) -> None:
        """Queue a message. One that finds the queue full closes the session instead: the router has stalled."""
        if self.closed.is_set():
            return
        data = message.SerializeToString()
        if self._queued_bytes + len(data) > MAX_QUEUED_BYTES or len(self._queue) >= MAX_QUEUED_FRAMES:
            self.close("the router does not read its stream")
            return
        self._queue.append(data)
        self._queued_bytes += len(data)
        self.sent_s = time.monotonic()
        self._changed.set()

    def send_frame(self, frame: worker_pb2.StepFrame) -> None:
        self.send(worker_pb2.WorkerMessage(frame=frame))

    def close(self, reason: str) -> None:
        """End the session from this side; what is queued is dropped."""
        self.close_reason = self.close_reason or reason
        self._queue.clear()
        self._queued_bytes = 0
        self.closed.set()

    async def next_message(self) -> bytes:
        """The oldest queued message, serialised; waits for one."""
        while not self._queue:
            self._changed.clear()
            await self._changed.wait()
        data = self._queue.popleft()
        self._queued_bytes -= len(data)
        return data


class _Seat:
    """What is known of one router: its newest epoch, its session, and the end that a broken one is waiting for."""

    def __init__(self) -> None:
        self.epoch = -1
        self.session: Session | None = None
        self.grace: asyncio.TimerHandle | None = None


class SessionTable:
    """All sessions of a worker. ``on_end`` hears a session's number once its requests are to be cancelled."""

    def __init__(self, *, grace_s: float, on_end: Callable[[int], None]) -> None:
        self._grace_s = grace_s
        self._on_end = on_end
        self._seats: dict[str, _Seat] = {}
        self._numbers = itertools.count(1)
        self.open: dict[int, Session] = {}
        """Sessions whose stream stands, by number."""

    def enter(self, router_id: str, epoch: int) -> Session | None:
        """Open a session, ending the router's older one at once; ``None`` when the epoch is not newer than the last."""
        seat = self._seats.setdefault(router_id, _Seat())
        if epoch <= seat.epoch:
            return None
        if seat.session is not None:
            seat.session.close("the router opened a newer session")
            self._end(seat)
        seat.epoch = epoch
        seat.session = Session(next(self._numbers), router_id, epoch)
        self.open[seat.session.number] = seat.session
        self._forget_old_routers()
        return seat.session

    def leave(self, session: Session) -> None:
        """The stream is gone. Its requests live on for the grace time, or end now if this side closed it."""
        self.open.pop(session.number, None)
        session.closed.set()
        seat = self._seats.get(session.router_id)
        if seat is None or seat.session is not session:
            return
        if session.close_reason:
            self._end(seat)
        else:
            seat.grace = asyncio.get_running_loop().call_later(self._grace_s, self._end, seat)

    def _end(self, seat: _Seat) -> None:
        if seat.grace is not None:
            seat.grace.cancel()
            seat.grace = None
        assert seat.session is not None
        self.open.pop(seat.session.number, None)
        self._on_end(seat.session.number)
        seat.session = None

    def _forget_old_routers(self) -> None:
        gone = [router_id for router_id, seat in self._seats.items() if seat.session is None]
        for router_id in gone[: max(len(self._seats) - MAX_REMEMBERED_ROUTERS, 0)]:
            del self._seats[router_id]
