"""``pdserve chat``: a conversation over the OpenAI API, with the speed of each answer.

The server keeps no messages.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
from rich.console import Console

from pdserve.contracts.errors import DeployError
from pdserve.deploy.cluster.folder import NEEDS_KEY
from pdserve.loadgen.server_tls import server_tls

_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 600.0
_NEW = "/new"
_HELP = f"Ctrl-C stops an answer, {_NEW} starts a new conversation, Ctrl-D ends."


class Conversation:
    """Messages of a conversation, and the server that answers them."""

    def __init__(self, url: str, *, max_tokens: int, temperature: float, console: Console, api_key: str = "") -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        timeout = httpx.Timeout(_READ_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(
            base_url=self._url, timeout=timeout, headers=headers, trust_env=False, verify=server_tls(url) or False
        )
        self._parameters = {"max_tokens": max_tokens, "temperature": temperature}
        self._console = console
        self._messages: list[dict[str, str]] = []

    def clear(self) -> None:
        self._messages.clear()

    def say(self, message: str) -> None:
        """Send ``message``, print the answer as it arrives, then its speed. Ctrl-C stops it and keeps its beginning.

        Raises:
            DeployError: no answer, or only part of one; the message is forgotten.
        """
        self._messages.append({"role": "user", "content": message})
        pieces: list[str] = []
        num_tokens = 0
        first_s, begin_s = 0.0, time.monotonic()
        try:
            for event in self._events():
                num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
                for choice in event.get("choices", ()):
                    if text := choice["delta"].get("content"):
                        first_s = first_s or time.monotonic()
                        pieces.append(text)
                        self._console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
            self._console.print()
            end_s = time.monotonic()
            speed = _speed(num_tokens, (first_s or end_s) - begin_s, end_s - begin_s)
            self._console.print(speed, style="dim", highlight=False, end="")
        except KeyboardInterrupt:
            self._console.print(" [dim](stopped)[/]", end="")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            self._messages.pop()
            raise DeployError(f"no answer from {self._url}: {error}; is it running? (pdserve status)") from error
        except DeployError:
            self._messages.pop()
            raise
        finally:
            self._console.print()
        self._messages.append({"role": "assistant", "content": "".join(pieces)})

    def _events(self) -> Iterator[dict[str, Any]]:
        """Send the messages; server-sent events of the answer."""
        body = {"messages": self._messages, "stream": True, "stream_options": {"include_usage": True}}
        with self._http.stream("POST", "/v1/chat/completions", json=body | self._parameters) as response:
            if response.status_code == httpx.codes.UNAUTHORIZED:
                raise DeployError(f"{self._url} {NEEDS_KEY}")
            if response.status_code != httpx.codes.OK:
                response.read()
                raise DeployError(f"{self._url} refused: {_error_text(response)}")
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise DeployError(f"the answer broke off: {event['error'].get('message', event['error'])}")
                yield event


def converse(conversation: Conversation, message: str) -> int:
    """Send ``message``; without one, read messages until the input ends. Returns 0; 1 if one from a pipe had no answer.

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
    status = 0
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return 0 if sys.stdin.isatty() else status
        except KeyboardInterrupt:  # perhaps meant for an answer that has just ended
            console.print()
            continue
        if line == _NEW:
            conversation.clear()
        elif line:
            try:
                conversation.say(line)
            except DeployError as error:
                status = 1
                console.print(str(error), markup=False, highlight=False, soft_wrap=True)


def _speed(num_tokens: int, ttft_s: float, total_s: float) -> str:
    text = f"TTFT {ttft_s * 1000:.0f} ms"
    if num_tokens > 1 and total_s > ttft_s:
        text += f", {(num_tokens - 1) / (total_s - ttft_s):.1f} tok/s"
    return f"{text}, {num_tokens} token{'s' * (num_tokens != 1)}"


def _error_text(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}"
