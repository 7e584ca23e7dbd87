"""The one door into the step loop: what sessions, the transfer process and the owner of the worker tell it.

Any thread puts messages; the loop alone takes them, at the top of each turn. Never interprets a message.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from threading import Condition

from pdserve.contracts.request import GenerationRequest, KvSource
from pdserve.engine.scheduler import RequestKey
from pdserve.proto.v1 import transfer_pb2

MAX_WAITING_MESSAGES = 8192
"""Messages that wait for the loop before new requests are refused."""


@dataclass(frozen=True, slots=True)
class AddRequest:
    """Prefill here."""

    key: RequestKey
    request: GenerationRequest
    received_s: float
    """By ``time.monotonic()``: objectives run from here, not from when the loop has time to look."""


@dataclass(frozen=True, slots=True)
class PrepareRequest:
    """Decode here what another worker prefills."""

    key: RequestKey
    request: GenerationRequest
    source: KvSource
    received_s: float


@dataclass(frozen=True, slots=True)
class CancelRequest:
    key: RequestKey


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """A session is gone for good: cancel all its requests."""

    session: int


@dataclass(frozen=True, slots=True)
class TransferSaid:
    message: transfer_pb2.TransferToEngine


@dataclass(frozen=True, slots=True)
class PartDied:
    """Something that the worker cannot go on without ended on its own."""

    part: str


@dataclass(frozen=True, slots=True)
class StartDrain:
    """Refuse new work; finish what runs."""


@dataclass(frozen=True, slots=True)
class StopLoop:
    """Leave the loop after the steps in flight."""


Message = AddRequest | PrepareRequest | CancelRequest | SessionEnded | TransferSaid | PartDied | StartDrain | StopLoop


class Inbox:
    """A thread-safe queue that the loop empties in one go."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._condition = Condition()

    @property
    def is_full(self) -> bool:
        """Whether new requests should be refused. Every other message is always accepted: it ends work."""
        return len(self._messages) >= MAX_WAITING_MESSAGES

    def put(self, message: Message) -> None:
        with self._condition:
            self._messages.append(message)
            self._condition.notify()

    def take_all(self, timeout_s: float) -> list[Message]:
        """Every waiting message in order; waits up to ``timeout_s`` for the first one."""
        with self._condition:
            if not self._messages and timeout_s > 0:
                self._condition.wait(timeout_s)
            messages = list(self._messages)
            self._messages.clear()
        return messages
