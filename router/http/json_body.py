"""JSON bodies: received in time, bounded before anything of them is built, decoded, and checked by a model.

While C code builds or checks objects, no other thread of the process runs, the event loop included. So the number of
objects is bounded while a body arrives, and large bodies are read in a thread, one at a time and part by part.
"""

from __future__ import annotations

import asyncio
import codecs
import gc
import re
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any, ClassVar, TypeVar, get_args, get_type_hints

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from pdserve.router.http.errors import MAX_NAME_CHARS, ApiError
from pdserve.router.http.exchange import CLOSE, Exchange
from pdserve.router.off_loop import off_loop, pause

MAX_BODY_BYTES = 8 * 2**20
"""Enough for about a million prompt tokens."""
BODY_TIMEOUT_S = 60.0
"""Seconds from a request's headers to the end of its body."""
LARGE_BYTES = 2**16
"""A larger body is read in a thread, as is what follows from it."""
MAX_CONTAINERS = 2**16
"""Objects and lists in a body."""
MAX_STRINGS = 2**17
"""Names included."""
MAX_VALUES = 2**18
"""Or as many as a prompt of token ids may have, and `MAX_MEMBERS`."""
MAX_MEMBERS = 256
"""Most members of an object; both APIs have fewer than 100 fields."""

PART_LEVELS = 4
"""Of objects and lists that are decoded part by part: a body, its messages, their parts. Each is searched once more."""

_PIECE_BYTES = 2**16
_START_BYTES = 64
"""In which the first members of a list and an object are told apart."""

_PAIR = rb"\\u[dD][89abAB]..\\u[dD][c-fC-F].."
_HALVES = re.compile(
    rb"((?:(?!%b)\\u[dD][89a-fA-F]..){1,1000})|(?:[^\\]{1,100}|\\[^u]|\\u(?![dD][89a-fA-F])|%b){1,1000}"
    % (_PAIR, _PAIR),
    re.DOTALL,
)
"""Halves of surrogate pairs, in group 1, or what has none: no more at once than other threads can wait for. Not
possessive: Python before 3.11.5 matches that wrongly."""

Model = TypeVar("Model", bound=BaseModel)

_decode = msgspec.json.Decoder().decode
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_items = msgspec.json.Decoder(list[msgspec.Raw]).decode

_MESSAGES = {
    "dict_type": "Input should be an object", "model_type": "Input should be an object",
    "none_required": "This field is not supported; leave it out",
}  # fmt: skip
"""In place of pydantic's, which name Python's types and classes of ours."""

_NOTHING: tuple[object, ...] = ("", [], {})
"""Values of a field that was left empty: those that forms send, and PHP for an empty object."""


def _takes(annotation: Any, *kinds: type) -> bool:
    """Whether a field takes values of one of ``kinds``."""
    return annotation in kinds or any(_takes(each, *kinds) for each in get_args(annotation))


class Body(BaseModel):
    """Object of a request. Null is a field that was left out, as are an empty text, list or object where the field has
    a default, but for ``may_be_empty``. Numbers and booleans may be texts, such as "0.7", and integers 16.0, as some
    languages write them; booleans are no numbers."""

    model_config = ConfigDict(extra="allow", coerce_numbers_to_str=True, allow_inf_nan=False)
    may_be_empty: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _read_members(cls, value: object) -> object:
        pause()
        if not isinstance(value, dict):
            return value
        if len(value) > MAX_MEMBERS:
            raise PydanticCustomError("members", f"There may be {MAX_MEMBERS} members at most")
        fields, read = cls.model_fields, dict[object, object]()
        for name, member in value.items():
            field = fields.get(name)
            if field is not None:
                if member in _NOTHING and name not in cls.may_be_empty and not field.is_required():
                    continue
                kind = field.annotation
                if isinstance(member, bool) and _takes(kind, int, float) and not _takes(kind, bool):
                    member = str(member)  # which is no number
            read[name] = member
        return read


class BodyRoute(APIRoute):
    """Route whose handler gets a body, as `read` returns it, and the `Exchange`. FastAPI makes ``/openapi.json`` of the
    handler's signature; its own path to a body would have no bounds."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = self.endpoint
        model: type[BaseModel] = get_type_hints(handle)["body"]

        async def handle_body(request: Request) -> Response:
            exchange: Exchange = request.state.exchange
            response: Response = await handle(await read(exchange, model), exchange)
            return response

        return handle_body


async def read(exchange: Exchange, model: type[Model]) -> Model:
    """Receive and decode the body of a request, whose key must have something left.

    Raises:
        ApiError: it is not ``application/json``, or not of the model.
    """
    content_type = exchange.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        shown = content_type[:MAX_NAME_CHARS] or "none"
        raise ApiError(415, f"send the request with Content-Type: application/json; it was {shown}")
    encoding = exchange.headers.get("content-encoding", "").strip().lower() or "identity"
    if encoding != "identity":
        message = f"send the request without Content-Encoding; it was {encoding[:MAX_NAME_CHARS]}"
        raise ApiError(415, message, headers={"Accept-Encoding": "identity"})
    if exchange.caller is not None:
        exchange.caller.check_left()
    data = await _receive(exchange)
    if data.startswith(codecs.BOM_UTF8):
        del data[: len(codecs.BOM_UTF8)]  # without a copy
    exchange.num_body_bytes = len(data)
    exchange.record.arrived_s = time.monotonic()  # a slow upload is no wait
    if len(data) <= LARGE_BYTES:
        return read_body(data, model)
    return await off_loop(len(data), partial(_read_large, data, model), LARGE_BYTES)


async def _receive(exchange: Exchange) -> bytearray:
    """Body of a request; a declared length is checked before reading."""
    structure = Structure(max(MAX_VALUES, exchange.max_prompt_tokens + MAX_MEMBERS))
    data = bytearray()
    length = exchange.headers.get("content-length", "")
    if length.isdecimal() and int(length) > MAX_BODY_BYTES:
        raise _too_large()
    try:
        left_s = exchange.record.arrived_s + BODY_TIMEOUT_S - time.monotonic()
        async with asyncio.timeout(left_s), aclosing(exchange.stream()) as pieces:
            async for piece in pieces:
                exchange.hold(len(piece))
                if len(data) + len(piece) > MAX_BODY_BYTES:
                    raise _too_large()
                structure.add(piece)
                data += piece
    except TimeoutError:
        refusal = f"the request body did not arrive within {BODY_TIMEOUT_S:g} s"
        raise ApiError(408, refusal, headers=CLOSE) from None
    return data


def _too_large() -> ApiError:
    return ApiError(413, f"the request body is larger than {MAX_BODY_BYTES} bytes; shorten the prompt", headers=CLOSE)


def _read_large(data: bytearray, model: type[Model]) -> Model:
    """`read_body` without the collections that so many new objects cause: none of them is garbage, and a collection
    holds up the event loop for longer than all else."""
    gc.disable()
    try:
        return read_body(data, model)
    finally:
        gc.enable()


def read_body(data: bytes | bytearray, model: type[Model]) -> Model:
    """Decode a body whose structure is bounded.

    Raises:
        ApiError: it is not JSON, or not of the model.
    """
    if not data:
        raise ApiError(400, "the request body must be a JSON object")
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ApiError(400, "the request body is UTF-16; send it as UTF-8")
    try:
        content = decoded(data)
    except UnicodeDecodeError:
        raise ApiError(400, "the request body is not UTF-8") from None
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the request body is not JSON: {error}") from None
    try:
        return model.model_validate(content)
    except ValidationError as error:
        _free(content)
        raise refusal_of(error) from None


def _free(content: object) -> None:
    """Free the content of a body item by item, so that other threads run between them."""
    for member in content.values() if isinstance(content, dict) else ():
        while isinstance(member, list) and member:
            pause()
            member.pop()


def decoded(data: bytes | bytearray) -> Any:
    """Decode JSON. Half of a surrogate pair, as clients send that cut texts in 16-bit characters, becomes U+FFFD.

    Raises:
        msgspec.DecodeError: it is not JSON.
        UnicodeDecodeError: it is not UTF-8.
    """
    try:
        return _in_parts(data)
    except msgspec.DecodeError:
        mended = None
        for match in _HALVES.finditer(data):
            pause()
            if match[1]:
                mended = bytearray(data) if mended is None else mended
                mended[match.start() : match.end()] = rb"\ufffd" * (len(match[1]) // 6)
        if mended is None:
            raise
        return _in_parts(mended)


def _in_parts(data: bytes | bytearray | msgspec.Raw, most_levels: int = PART_LEVELS) -> Any:
    """Decode JSON, of a large object each member, and of a large list of objects each item by itself, so that other
    threads run between them. To find where they end takes a tenth of the time to decode them."""
    pause()
    if len(data) > LARGE_BYTES and most_levels:
        start = bytes(memoryview(data)[:_START_BYTES]).translate(None, b" \t\r\n")
        if start.startswith(b"{"):
            return {name: _in_parts(member, most_levels - 1) for name, member in _members(data).items()}
        if start.startswith(b"[{"):
            return [_in_parts(item, most_levels - 1) for item in _items(data)]
    return _decode(data)


def refusal_of(error: ValidationError) -> ApiError:
    """The first thing that is wrong."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = ".".join(str(part)[:MAX_NAME_CHARS] for part in first["loc"])
    if not param and first["type"] == "model_type":
        return ApiError(400, "the request body must be a JSON object")
    message = _MESSAGES.get(first["type"], first["msg"])
    return ApiError(400, f"{param}: {message}" if param else message, param=param or None)


class Structure:
    """Counts what a body would build, while it arrives. Never counts less, whether the bytes are JSON or not."""

    def __init__(self, most_values: int = MAX_VALUES) -> None:
        self._most_values = most_values
        self._num_quotes = self._num_containers = self._num_commas = 0
        self._is_in_string = False
        self._rest = b""
        """A backslash whose character has not arrived."""

    def add(self, data: bytes) -> None:
        """Count the next bytes.

        Raises:
            ApiError: there are too many parts of a kind.
        """
        for start in range(0, len(data), _PIECE_BYTES):
            self._add(self._rest + data[start : start + _PIECE_BYTES])

    def end_text(self) -> None:
        """What is added next is another text: a string in which this one ended does not go on in it."""
        self._is_in_string, self._rest = False, b""

    def _add(self, data: bytes) -> None:
        self._rest = b""
        if b"\\" in data:
            if (len(data) - len(data.rstrip(b"\\"))) % 2:
                data, self._rest = data[:-1], b"\\"
            data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = data.split(b'"')
        outside = b"".join(parts[self._is_in_string :: 2])
        self._is_in_string ^= len(parts) % 2 == 0
        self._num_quotes += len(parts) - 1
        self._num_containers += outside.count(b"{") + outside.count(b"[")
        self._num_commas += outside.count(b",")
        for what, number, most in (
            ("strings", self._num_quotes // 2, MAX_STRINGS),
            ("objects and lists", self._num_containers, MAX_CONTAINERS),
            ("values", self._num_commas + 1, self._most_values),
        ):
            if number > most:
                raise ApiError(400, f"the request body has more than {most} {what}; send fewer")
