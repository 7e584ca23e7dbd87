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
from typing import Any

from pdserve.contracts.errors import DeployError

_NAME = "control"
_READ_TIMEOUT_S = 0.5
_MAX_BYTES = 2**16

Begin = Callable[[dict[str, Any]], Iterator[str]]
"""Begins the change that a command describes, or raises `DeployError`."""


class ControlPort:
    """The supervisor's end."""

    def __init__(self, folder: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(folder / _NAME))
        self._listener.listen()
        self._listener.setblocking(False)
        self._waiting: deque[socket.socket] = deque()
        self._client: socket.socket | None = None
        self._change: Iterator[str] | None = None

    def turn(self, begin: Begin) -> str:
        """Take a command, or the next step of the one in progress, whose client may have left; returns what was said.
        Other commands wait for its end, and are told so."""
        with contextlib.suppress(OSError):  # nobody is there, or no file is left for another client
            client, _ = self._listener.accept()
            self._waiting.append(client)
            if self._change is not None:
                _send(client, {"say": "another change is in progress; this one begins after it"})
        if self._change is None:
            if not self._waiting:
                return ""
            self._client = self._waiting.popleft()
            try:
                self._client.settimeout(_READ_TIMEOUT_S)
                command = json.loads(self._client.makefile("rb").readline(_MAX_BYTES))
            except (OSError, ValueError):
                self._finish("the command did not arrive")
                return ""
            self._change = _begun(begin, command)
        try:
            if said := next(self._change):
                self._tell({"say": said})
            return said
        except StopIteration:
            self._finish("")
            return ""
        except DeployError as error:
            failure = str(error)
        except Exception as error:  # the cluster outlives whatever a client sends
            failure = f"it failed: {type(error).__name__}: {error}"
        self._finish(failure)
        return failure

    @property
    def is_busy(self) -> bool:
        """Whether a change is in progress, or a command waits."""
        return self._change is not None or bool(self._waiting)

    def begin(self, change: Iterator[str]) -> None:
        """Begin a change that nobody sent; none is in progress."""
        assert self._change is None
        self._change = change

    def close(self) -> None:
        if self._client is not None:
            self._finish("the cluster ends")
        for client in self._waiting:
            client.close()
        self._listener.close()

    def _finish(self, error: str) -> None:
        self._tell({"error": error})
        if self._client is not None:
            self._client.close()
        self._client = self._change = None

    def _tell(self, line: dict[str, str]) -> None:
        if self._client is not None:  # a change that nobody sent has none
            _send(self._client, line)


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
