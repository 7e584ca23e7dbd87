"""Socket in the cluster's folder through which its user changes it: ``pdserve scale``, ``drain`` and ``restart``.

The folder is readable by the user only, so the socket needs no token. A command is one line of JSON; what becomes of it
comes back as lines of JSON, the last of which has ``error``, empty after success.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pdserve.contracts.errors import DeployError

_NAME = "control"
_READ_TIMEOUT_S = 0.5
_MAX_BYTES = 2**16

Begin = Callable[[dict[str, Any]], Iterator[str]]
"""Begins the change that a command describes, or raises `DeployError`."""


class _Running(NamedTuple):
    """A change in progress."""

    change: Iterator[str]
    client: socket.socket | None = None
    """None of a change that nobody sent."""

    def tell(self, line: dict[str, str]) -> None:
        if self.client is not None:
            _send(self.client, line)

    def end(self, error: str) -> None:
        self.tell({"error": error})
        if self.client is not None:
            self.client.close()


class ControlPort:
    """The supervisor's end."""

    def __init__(self, folder: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(folder / _NAME))
        self._listener.listen()
        self._listener.setblocking(False)
        self._waiting: deque[socket.socket] = deque()
        self._running: deque[_Running] = deque()

    def turn(self, begin: Begin) -> str:
        """Take a command, or the next step of a change in progress, whose client may have left; returns what was said.
        Commands wait for the end of all changes, and are told so."""
        with contextlib.suppress(OSError):  # nobody is there, or no file is left for another client
            client, _ = self._listener.accept()
            self._waiting.append(client)
            if self._running:
                _send(client, {"say": "another change is in progress; this one begins after it"})
        if not self._running:
            if not self._waiting:
                return ""
            client = self._waiting.popleft()
            try:
                client.settimeout(_READ_TIMEOUT_S)
                command = json.loads(client.makefile("rb").readline(_MAX_BYTES))
            except (OSError, ValueError):
                _Running(iter(()), client).end("the command did not arrive")
                return ""
            self._running.append(_Running(_begun(begin, command), client))
        running = self._running.popleft()
        try:
            if said := next(running.change):
                running.tell({"say": said})
            self._running.append(running)
            return said
        except StopIteration:
            failure = ""
        except DeployError as error:
            failure = str(error)
        except Exception as error:  # the cluster outlives whatever a client sends
            failure = f"it failed: {type(error).__name__}: {error}"
        running.end(failure)
        return failure

    @property
    def is_busy(self) -> bool:
        """Whether a command is carried out, or waits."""
        return bool(self._waiting) or any(running.client is not None for running in self._running)

    def begin(self, change: Iterator[str]) -> None:
        """Begin a change that nobody sent, beside others alike."""
        self._running.append(_Running(change))

    def close(self) -> None:
        for running in self._running:
            running.end("the cluster ends")
        for client in self._waiting:
            client.close()
        self._listener.close()


def _send(client: socket.socket, line: dict[str, str]) -> None:
    with contextlib.suppress(OSError):  # the client has left
        client.sendall(json.dumps(line).encode() + b"\n")


def _begun(begin: Begin, command: dict[str, Any]) -> Iterator[str]:
    yield from begin(command)


def send_command(folder: Path, command: dict[str, Any]) -> Iterator[str]:
    """Send a command to the cluster with that folder; yields what it says until the end.

    Raises:
        DeployError: the cluster refused it, or ended.
    """
    error = "the cluster has ended"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client, contextlib.suppress(OSError):
        client.connect(str(folder / _NAME))
        client.sendall(json.dumps(command).encode() + b"\n")
        for line in client.makefile("rb"):
            answer = json.loads(line)
            if "say" in answer:
                yield answer["say"]
            else:
                error = answer["error"]
    if error:
        raise DeployError(error)
