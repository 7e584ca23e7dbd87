"""``pdserve chat``: a conversation over the OpenAI API, with the speed of each answer.

Called by the command line. Keeps the messages of one conversation; the server keeps none.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape

from pdserve.contracts.errors import DeployError

_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 600.0
_NEW = "/new"
_HELP = f"Ctrl-C stops an answer, {_NEW} forgets what was said, Ctrl-D ends."


@dataclass(frozen=True, slots=True)
class AnswerSpeed:
    num_tokens: int
    ttft_s: float
    """Time from sending the request to the first piece of text."""
    total_s: float

    def __str__(self) -> str:
        text = f"TTFT {self.ttft_s * 1000:.0f} ms"
        if self.num_tokens > 1 and self.total_s > self.ttft_s:
            text += f", {(self.num_tokens - 1) / (self.total_s - self.ttft_s):.1f} tok/s"
        return f"{text}, {self.num_tokens} token{'s' * (self.num_tokens != 1)}"


class Conversation:
    """Messages of a conversation, and the server that answers them."""

    def __init__(self, url: str, *, max_tokens: int, temperature: float, console: Console) -> None:
        base_url = url.rstrip("/").removesuffix("/v1")
        timeout = httpx.Timeout(_READ_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
        self.url = base_url
        self._http = httpx.Client(base_url=base_url, timeout=timeout, trust_env=False)
        self._parameters = {"max_tokens": max_tokens, "temperature": temperature}
        self._console = console
        self._messages: list[dict[str, str]] = []

    def start_anew(self) -> None:
        self._messages.clear()

    def say(self, message: str) -> None:
        """Send ``message``, print the answer as it arrives, then its speed. Ctrl-C stops it and keeps what arrived.

        Raises:
            DeployError: no answer, or only part of one; the message is forgotten.
        """
        self._messages.append({"role": "user", "content": message})
        answer: list[str] = []
        try:
            for piece in self._stream(answer):
                self._console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
        except KeyboardInterrupt:
            self._console.print(" [dim](stopped)[/]", end="")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            self._messages.pop()
            raise DeployError(f"no answer from {self.url}: {error}; is it running? (pdserve status)") from error
        except DeployError:
            self._messages.pop()
            raise
        finally:
            self._console.print()
        self._messages.append({"role": "assistant", "content": "".join(answer)})

    def _stream(self, answer: list[str]) -> Iterator[str]:
        """Yield pieces of the answer and append them to ``answer``; prints a line on its speed at the end."""
        body = {
            "messages": self._messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._parameters,
        }
        begin_s = time.monotonic()
        first_s = 0.0
        num_tokens = 0
        with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                response.read()
                raise DeployError(f"{self.url} refused: {_error_text(response)}")
            for event in _events(response):
                if "error" in event:
                    raise DeployError(f"the answer broke off: {event['error'].get('message', event['error'])}")
                num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
                for choice in event.get("choices", ()):
                    if text := choice["delta"].get("content"):
                        first_s = first_s or time.monotonic()
                        answer.append(text)
                        yield text
        end_s = time.monotonic()
        self._console.print()
        speed = AnswerSpeed(num_tokens, (first_s or end_s) - begin_s, end_s - begin_s)
        self._console.print(f"[dim]{escape(str(speed))}[/]", end="")


def converse(conversation: Conversation, message: str) -> int:
    """Send ``message``; without one, read messages until the input ends. Returns 0.

    Raises:
        DeployError: ``message`` got no answer. A conversation shows the error and reads the next message instead.
    """
    if message:
        conversation.say(message)
        return 0
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() a line editor and a history)
    console = Console(stderr=True)
    console.print(_HELP, style="dim", highlight=False)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return 0
        except KeyboardInterrupt:  # perhaps meant for an answer that has just ended
            console.print()
            continue
        if line == _NEW:
            conversation.start_anew()
        elif line:
            try:
                conversation.say(line)
            except DeployError as error:
                console.print(str(error), markup=False, highlight=False, soft_wrap=True)


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Server-sent events up to the end of the stream."""
    for line in response.iter_lines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            yield json.loads(data)


def _error_text(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}"
