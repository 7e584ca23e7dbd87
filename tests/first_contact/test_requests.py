"""Requests as clients write them, byte for byte, each answered by the real edge as its file says.

A case is a file of ``requests/``:

- ``about``: which client sends it.
- ``packets``: texts sent one after another, as Latin-1, with every line break as CRLF.
- ``ends``: true closes the sending half of the connection after the last packet.
- ``answers``: for each answer its ``status``, and ``has``, a part of its headers and body.
- ``closed``: whether the connection ends after the last answer; left open otherwise.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from http.client import HTTPResponse
from io import BufferedReader
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.patience import HANG_S
from tests.router.edge_server import EdgeServer, running_edge

CASES = sorted((Path(__file__).parent / "requests").glob("*.yaml"))
BETWEEN_PACKETS_S = 0.03
STAYS_OPEN_S = 0.1


class _Received:
    """What `HTTPResponse` needs of a socket. Answers share one buffer, because they may arrive together."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rb")
        self._file.close = lambda: None  # type: ignore[method-assign]  # a response closes it at its end

    def makefile(self, mode: str) -> BufferedReader:
        return self._file


@pytest.fixture(scope="module")
def edge() -> Iterator[EdgeServer]:
    with running_edge() as edge:
        edge.say("hello")
        yield edge


def test_there_are_cases() -> None:
    assert CASES


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_request_is_answered(edge: EdgeServer, path: Path) -> None:
    case: dict[str, Any] = yaml.safe_load(path.read_text())
    assert not case.keys() - {"about", "packets", "ends", "answers", "closed"}
    host, port = edge.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=HANG_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number, packet in enumerate(case["packets"]):
            time.sleep(BETWEEN_PACKETS_S if number else 0)
            connection.sendall(packet.replace("\n", "\r\n").encode("latin-1"))
        if case.get("ends"):
            connection.shutdown(socket.SHUT_WR)
        received = _Received(connection)
        for expected in case["answers"]:
            method = case["packets"][0].partition(" ")[0]
            response = HTTPResponse(received, method=method)  # type: ignore[arg-type]
            response.begin()
            text = f"{response.headers}{response.read().decode()}"
            assert response.status == expected["status"], text
            assert expected.get("has", "") in text
        connection.settimeout(10 if case.get("closed") else STAYS_OPEN_S)
        if case.get("closed"):
            assert received.makefile("rb").read(1) == b""
        else:
            with pytest.raises(TimeoutError):
                received.makefile("rb").read(1)
