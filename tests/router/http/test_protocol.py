"""A connection without a complete request head is closed, and its memory stays bounded until then."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator

import pytest

from pdserve.contracts.request import FinishReason
from pdserve.router.http import protocol
from tests.patience import HANG_S
from tests.router.edge_server import EdgeServer, running_edge, saying, stuck_after

LIVE = b"GET /live HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def edge() -> Iterator[EdgeServer]:
    with running_edge() as edge:
        yield edge


def connect(edge: EdgeServer) -> socket.socket:
    host, port = edge.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=HANG_S)


def read_answer(connection: socket.socket) -> bytes:
    """One answer; its head and its body, a JSON object, may arrive apart."""
    answer = b""
    while not answer.endswith(b"}"):
        part = connection.recv(4096)
        assert part, answer
        answer += part
    return answer


def read_to_end(connection: socket.socket) -> bytes:
    """Everything received before the server closes the connection."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


@pytest.mark.parametrize("line", [b"X-A: %b\r\n" % (b"a" * 1000), b"a" * 1000])
@pytest.mark.parametrize("is_first", [True, False])
def test_headers_without_end_are_refused(edge: EdgeServer, line: bytes, is_first: bool) -> None:
    """Many headers or a long one, in the connection's first request or a later one."""
    with connect(edge) as connection:
        if not is_first:
            connection.sendall(LIVE + b"\r\n")
            assert read_answer(connection).startswith(b"HTTP/1.1 200 ")
        connection.sendall(LIVE + b"X-B: ")
        num_lines = 0
        try:
            while num_lines < 10_000:
                connection.sendall(line)
                num_lines += 1
        except OSError:
            pass
        answer = read_to_end(connection)
    assert num_lines < 10_000
    assert not answer or answer.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("line", [b"X-A: %b\r\n" % (b"a" * 1000), b"a" * 1000])
@pytest.mark.parametrize("end", [b"0\r\nX-B: ", b"2;x="])
def test_a_body_without_end_may_not_be_bare(edge: EdgeServer, end: bytes, line: bytes) -> None:
    """Trailers, or an extension of a chunk, follow part of the body without end."""
    with connect(edge) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n" + end)
        num_lines = 0
        try:
            while num_lines < 10_000:
                connection.sendall(line)
                num_lines += 1
        except OSError:
            pass
    assert num_lines < 10_000


@pytest.mark.parametrize("start", [b"", LIVE[:10], LIVE])
def test_a_head_that_does_not_arrive_closes_the_connection(
    edge: EdgeServer, monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    monkeypatch.setattr("pdserve.router.http.protocol.HEAD_TIMEOUT_S", 0.2)
    with connect(edge) as connection:
        connection.sendall(start)
        assert read_to_end(connection) == b""


def test_a_connection_may_rest_between_requests(edge: EdgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.router.http.protocol.HEAD_TIMEOUT_S", 0.2)
    with connect(edge) as connection:
        for _ in range(2):
            connection.sendall(LIVE + b"\r\n")
            assert read_answer(connection).startswith(b"HTTP/1.1 200 ")
            connection.settimeout(0.5)
            with pytest.raises(TimeoutError):
                connection.recv(1)
            connection.settimeout(10)
        connection.sendall(LIVE)  # a later request has its own deadline
        assert read_to_end(connection) == b""


def test_large_headers_below_the_limit_are_served(edge: EdgeServer) -> None:
    with connect(edge) as connection:
        connection.sendall(LIVE + b"X-A: %b\r\n\r\n" % (b"a" * 40_000))
        assert read_answer(connection).startswith(b"HTTP/1.1 200 ")


def test_requests_in_one_piece_are_no_large_head(edge: EdgeServer) -> None:
    num_requests = 2500
    with connect(edge) as connection:
        connection.sendall((LIVE + b"\r\n") * num_requests + LIVE)
        answers = b""
        while answers.count(b"HTTP/1.1 200 ") < num_requests:
            part = connection.recv(2**20)
            assert part, "closed"
            answers += part
        connection.sendall(b"\r\n")
        assert read_answer(connection).startswith(b"HTTP/1.1 200 ")


def test_connections_beyond_the_limit_are_refused(
    edge: EdgeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of before are served, as are questions whether the router lives, and far more are closed."""
    edge.metrics.responses.clear()
    with connect(edge) as first:
        first.sendall(LIVE + b"\r\n")
        assert read_answer(first).startswith(b"HTTP/1.1 200 ")
        monkeypatch.setattr(protocol, "MAX_CONNECTIONS", 1)
        monkeypatch.setattr(protocol, "MAX_REFUSED", 1)
        with connect(edge) as second:
            second.sendall(LIVE + b"\r\n")
            assert read_answer(second).startswith(b"HTTP/1.1 200 ")
            second.sendall(LIVE.replace(b"/live", b"/version"))
            with connect(edge) as third:
                assert read_to_end(third) == b""
            second.sendall(b"\r\n")
            answer = read_to_end(second)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1\r\n" in answer.lower()
        first.sendall(LIVE + b"\r\n")
        assert read_answer(first).startswith(b"HTTP/1.1 200 ")
    assert edge.metrics.responses == [("/live", 200), ("/live", 200), ("connections", 503), ("/live", 200)]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    monkeypatch.undo()
    with connect(edge) as fourth:
        fourth.sendall(LIVE + b"\r\n")
        assert read_answer(fourth).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("tokens", "sign"), [([], b"HTTP/1.1 100 Continue\r\n\r\n"), ([50], b"\r\n3\r\n:\n\n\r\n")], ids=["before", "amid"]
)
def test_a_client_that_sends_no_more_and_then_leaves_is_noticed(
    edge: EdgeServer, monkeypatch: pytest.MonkeyPatch, tokens: list[int], sign: bytes
) -> None:
    """Before its answer and in the middle of it: interim responses and comments tell whether it is still there."""
    monkeypatch.setattr(protocol, "LOOKS_PER_SIGN", 2)
    edge.generator.script = stuck_after(tokens)
    edge.generator.started.clear()
    content = b'{"prompt": "x", "stream": true}'
    with connect(edge) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Content-Length: %d\r\n\r\n%b" % (len(content), content))
        assert edge.generator.started.wait(HANG_S)
        received = connection.recv(10_000) if tokens else b""
        connection.shutdown(socket.SHUT_WR)
        while not received.endswith(sign):
            received += connection.recv(10_000)
        assert not edge.generator.last.cancelled.wait(0.3)
    assert edge.generator.last.cancelled.wait(HANG_S)


def test_an_older_client_gets_a_stream_that_ends_with_the_connection(edge: EdgeServer) -> None:
    edge.generator.script = saying([50] * 8, FinishReason.LENGTH)
    content = b'{"prompt": "x", "stream": true}'
    head = b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
    with connect(edge) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n%b" % (len(content), content))
        answered, _, body = read_to_end(connection).partition(b"\r\n\r\n")
    assert b"chunked" not in answered.lower()
    assert answered.startswith(b"HTTP/1.1 200"), "an interim response"
    assert all(event.startswith(b"data: ") for event in body.removesuffix(b"\n\n").split(b"\n\n")), "no chunks"
    assert body.endswith(b"data: [DONE]\n\n")
