"""What the edge needs of one HTTP request on its way to an answer, and the memory that it holds."""

from __future__ import annotations

import re
import time
import uuid
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from pdserve.contracts.request import Grammar
from pdserve.router.http.errors import ApiError
from pdserve.router.http.keys import Caller
from pdserve.router.http.protocol import PartWriter
from pdserve.router.record import RequestRecord

MAX_HELD_BYTES = 2**30
"""Limit for bodies, prompts and whole answers of all requests together."""

CLOSE = {"Connection": "close"}
"""The rest of the body is not read."""
FULL = {**CLOSE, "Retry-After": "1"}

_CLIENT_ID = re.compile(r"[\x21-\x7e]{1,128}")
"""Id that a client may choose for its request."""


@dataclass(slots=True)
class Memory:
    """Bounded number of bytes that requests hold."""

    max_bytes: int
    num_bytes: int = 0


class Exchange(Request):
    """One request: what it sent, and what `EdgeMiddleware` and the edge find out. Handlers get it in place of
    Starlette's request, whose ``state`` has it as ``exchange``."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, memory: Memory, max_prompt_tokens: int) -> None:
        """``send``: for the parts of a stream; those further in only look at the start of a response."""
        super().__init__(scope, receive, send)
        self.send = send
        self.parts: PartWriter | None = scope["state"].pop("parts", None)
        """For those of a stream, if the server has one."""
        wanted_id = self.headers.get("x-request-id", "")
        request_id = wanted_id if _CLIENT_ID.fullmatch(wanted_id) else uuid.uuid4().hex
        traceparent = self.headers.get("traceparent", "")
        self.record = RequestRecord(request_id, scope["path"], time.monotonic(), traceparent)
        self.caller: Caller | None = None
        """Who holds the request's key; None without keys."""
        self.grammar: Grammar | None = None
        """Grammar of its answers, once it is admitted."""
        self.num_body_bytes = 0
        """Length of the body, once it has arrived."""
        self.max_prompt_tokens = max_prompt_tokens
        self._num_held_bytes = 0
        self._memory = memory

    def hold(self, num_bytes: int) -> None:
        """Take memory until `release`.

        Raises:
            ApiError: requests hold too much already.
        """
        if self._memory.num_bytes + num_bytes > self._memory.max_bytes:
            raise ApiError(429, "the router holds as many large requests as it can; try again", headers=FULL)
        self._memory.num_bytes += num_bytes
        self._num_held_bytes += num_bytes

    def release(self) -> None:
        self._memory.num_bytes -= self._num_held_bytes
        self._num_held_bytes = 0
