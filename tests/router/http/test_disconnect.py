"""A client that leaves frees its generation at once in every state; a slow one delays no other."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping

import httpx
import psutil
import pytest

from pdserve.contracts.step import TokenLogprobs
from tests.patience import HANG_S
from tests.router.edge_server import EdgeServer, endless, running_edge, stuck_after

CANCEL_DEADLINE_S = 1.0


@pytest.fixture
def edge() -> Iterator[EdgeServer]:
    with running_edge() as edge:
        yield edge


def connect(edge: EdgeServer, body: Mapping[str, object]) -> socket.socket:
    """Send a completion request and leave the connection open. Few bytes of the answer have room in it."""
    host, port = edge.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(HANG_S)
    connection.connect((host, int(port)))
    content = json.dumps({"prompt": "x", **body}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    connection.sendall(head.encode() + b"\r\n\r\n" + content)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 2])
def test_leaving_cancels(edge: EdgeServer, stream: bool, num_tokens: int) -> None:
    """Queued and streaming, streamed and whole."""
    edge.generator.script = stuck_after([50] * num_tokens)
    connection = connect(edge, {"stream": stream})
    assert edge.generator.started.wait(HANG_S)
    if stream and num_tokens:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    assert not edge.generator.last.cancelled.is_set()
    connection.close()
    assert edge.generator.last.cancelled.wait(CANCEL_DEADLINE_S)
    assert edge.generator.last.cancels == [False]
    assert edge.metrics.answers == []


def test_a_request_that_nobody_waits_for_is_counted_as_such(edge: EdgeServer) -> None:
    edge.generator.script = stuck_after([])
    connection = connect(edge, {})
    assert edge.generator.started.wait(HANG_S)
    connection.close()
    deadline_s = time.monotonic() + HANG_S
    while not edge.metrics.responses and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert edge.metrics.responses == [("/v1/completions", 499)]


def test_a_reader_that_stops_reading_stops_its_stream_alone_and_can_still_leave(edge: EdgeServer) -> None:
    edge.generator.script = endless(50)
    connection = connect(edge, {"stream": True})
    slow_reader = wait_until_still(edge)
    edge.say("others are served")
    answer = httpx.post(f"{edge.url}/v1/completions", json={"prompt": "x"}, timeout=HANG_S)
    assert answer.json()["choices"][0]["text"] == "others are served"
    connection.close()
    assert edge.generator.generations[0].cancelled.wait(CANCEL_DEADLINE_S)
    assert slow_reader > 0


def test_a_reader_that_stops_reading_for_good_is_given_up(edge: EdgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.router.http.protocol.WRITE_TIMEOUT_S", 0.5)
    edge.generator.script = endless(50)
    with connect(edge, {"stream": True}) as connection:
        assert edge.generator.started.wait(HANG_S)
        assert edge.generator.last.cancelled.wait(HANG_S)
        assert edge.generator.last.cancels == [False]
        edge.say("others are served")
        assert httpx.post(f"{edge.url}/v1/completions", json={"prompt": "x"}, timeout=HANG_S).status_code == 200
        assert_given_up(connection)


def test_an_answer_that_nobody_reads_keeps_no_connection(edge: EdgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.router.http.protocol.WRITE_TIMEOUT_S", 0.5)
    edge.generator.max_model_len = 100_000
    num_tokens = edge.say("x" * 60_000, logprobs=TokenLogprobs(-0.5, tuple((token, -0.5) for token in range(5))))
    body = {"logprobs": 5, "max_tokens": num_tokens}  # 5 MB, more than has room in the system
    with connect(edge, body) as connection:
        assert edge.generator.started.wait(HANG_S)
        assert_given_up(connection)


def assert_given_up(connection: socket.socket) -> None:
    """Wait until the server has closed its end of a connection of which nothing is read."""
    ends, deadline_s = {connection.getsockname(), connection.getpeername()}, time.monotonic() + HANG_S
    while sum({each.laddr, each.raddr} == ends for each in psutil.Process().net_connections("tcp")) == 2:
        assert time.monotonic() < deadline_s, "the connection stays"
        time.sleep(0.05)


def wait_until_still(edge: EdgeServer) -> int:
    """Wait until no more tokens are written; return how many were."""
    num_tokens = -1
    deadline_s = time.monotonic() + HANG_S
    while num_tokens != (num_tokens := len(edge.metrics.gaps_s)) or num_tokens == 0:
        assert time.monotonic() < deadline_s, "the edge buffers without end"
        threading.Event().wait(0.3)
    return num_tokens


def test_a_connection_serves_another_request_after_an_answer(edge: EdgeServer) -> None:
    """Listening for a disconnect consumes nothing of the next request."""
    edge.say("again")
    with httpx.Client(base_url=edge.url) as http:
        for stream in (False, True, False):
            answer = http.post("/v1/completions", json={"prompt": "x", "stream": stream})
            assert "again" in answer.text.replace('"}', "") or stream
            assert answer.status_code == 200
    assert all(not generation.cancels for generation in edge.generator.generations)
