"""Conversations with a server that records each request."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console

from pdserve.contracts.errors import DeployError
from pdserve.deploy.commands.chat import Conversation, converse


class Server(ThreadingHTTPServer):
    """Streams an answer of two tokens to every request, or refuses those that ask for it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[list[dict[str, str]]] = []
        """Messages of each request."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        messages = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"]
        self.server.asked.append(messages)
        if messages[-1]["content"] == "without a key":
            self.send_response(401)
            self.end_headers()
            return
        if messages[-1]["content"] == "refuse":
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b'{"error": {"message": "too long"}}')
            return
        self.send_response(200)
        self.end_headers()
        events: list[Any] = [{"choices": [{"delta": {"content": piece}}]} for piece in ("forty", "-two")]
        events.append({"choices": [], "usage": {"completion_tokens": 2}})
        for event in events:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def conversation(server: Server) -> Conversation:
    return Conversation(server.url, max_tokens=8, temperature=0, console=Console(width=80))


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """Type these lines at the prompts, and Ctrl-D at the end."""
    coming = iter((*lines, EOFError))

    def read(prompt: str) -> str:
        line = next(coming)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)


def test_the_history_is_sent_with_each_message(server: Server, conversation: Conversation) -> None:
    conversation.say("6 * 7?")
    conversation.say("And again?")
    assert [message["content"] for message in server.asked[1]] == ["6 * 7?", "forty-two", "And again?"]


def test_an_answer_is_shown_with_its_speed(conversation: Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    assert converse(conversation, "6 * 7?") == 0
    answer, speed = capsys.readouterr().out.splitlines()
    assert answer == "forty-two"
    assert speed.startswith("TTFT ")
    assert speed.endswith(" tok/s, 2 tokens")


def test_a_message_that_was_refused_is_forgotten(server: Server, conversation: Conversation) -> None:
    with pytest.raises(DeployError, match="refused: too long"):
        conversation.say("refuse")
    conversation.say("6 * 7?")
    assert [message["content"] for message in server.asked[1]] == ["6 * 7?"]


def test_a_missing_key_is_named_as_commands_read_it(conversation: Conversation) -> None:
    with pytest.raises(DeployError, match="needs a valid API key; set PDSERVE_API_KEY"):
        conversation.say("without a key")


def test_ctrl_c_at_the_prompt_does_not_end_the_conversation_and_ctrl_d_does(
    server: Server, conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "one", KeyboardInterrupt, "  ", "two")
    assert converse(conversation, "") == 0
    assert [len(messages) for messages in server.asked] == [1, 3]


@pytest.mark.parametrize(("is_terminal", "status"), [(True, 0), (False, 1)])
def test_a_conversation_can_be_started_anew_and_a_refusal_is_a_failure_of_a_script(
    server: Server, conversation: Conversation, monkeypatch: pytest.MonkeyPatch, is_terminal: bool, status: int
) -> None:
    typed(monkeypatch, "one", "/new", "refuse", "two")
    monkeypatch.setattr("sys.stdin", Mock(isatty=lambda: is_terminal))
    assert converse(conversation, "") == status
    assert [len(messages) for messages in server.asked] == [1, 1, 1]
