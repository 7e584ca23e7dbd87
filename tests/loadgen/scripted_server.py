"""An HTTP server that answers completions as a test says: events with pauses between them, refusals, broken streams."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """How one request is answered."""

    status: int = 200
    events: tuple[bytes, ...] = ()
    pause_s: float = 0.0
    """Before each event."""
    refusal: bytes = b""
    breaks_off: bool = False
    """The connection closes in the middle of the answer."""


@dataclass(slots=True)
class ScriptedServer:
    """What it was asked, and where it listens."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)
    connections: set[int] = field(default_factory=set)
    """Ports of clients that sent something."""


def token_events(num_tokens: int, *, token_ids: bool = False, done: bool = True) -> tuple[bytes, ...]:
    """A whole answer as pdserve streams it: the last token and the end come together."""
    choices = [
        {"text": "a", "finish_reason": None, **({"token_ids": [n]} if token_ids else {})} for n in range(num_tokens)
    ]
    chunks: list[dict[str, Any]] = [{"choices": [choice], "usage": None} for choice in choices]
    usage = {"completion_tokens": num_tokens, "prompt_tokens_details": {"cached_tokens": 3}}
    ends = [{"choices": [{"text": "", "finish_reason": "length"}]}, {"choices": [], "usage": usage}]
    data = [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in (*chunks, *ends)]
    ending = b"".join([*data[num_tokens - 1 :], b"data: [DONE]\n\n" if done else b""])
    return (*data[: num_tokens - 1], ending)


@contextmanager
def scripted_server(script: Callable[[dict[str, Any]], Script]) -> Iterator[ScriptedServer]:
    """A server whose answer to each body is ``script(body)``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            server.arrived_s.append(time.monotonic())
            server.connections.add(self.client_address[1])
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.bodies.append({**body, "path": self.path})
            self.answer(script(body))

        def answer(self, script: Script) -> None:
            self.send_response(script.status)
            if script.status != 200:
                self.send_header("Content-Length", str(len(script.refusal)))
                self.end_headers()
                self.wfile.write(script.refusal)
                return
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for event in script.events:
                time.sleep(script.pause_s)
                self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
            if script.breaks_off:
                self.close_connection = True
            else:
                self.wfile.write(b"0\r\n\r\n")

        def log_message(self, format: str, *args: object) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    server = ScriptedServer(f"http://127.0.0.1:{listener.server_address[1]}")
    thread = threading.Thread(target=listener.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()
