"""JSON bodies: bounded before anything of them is built, decoded, and checked by the model of the route.

While C code builds or checks objects, no other thread of the process runs, the event loop included. So the number of
objects is bounded, and large bodies are read in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from pdserve.router.http.errors import MAX_NAME_CHARS, ApiError

LARGE_BYTES = 2**16
"""A larger body is read in a thread, as is what follows from it."""
MAX_CONTAINERS = 2**16
"""Objects and lists in a body."""
MAX_STRINGS = 2**17
"""Names included."""
MAX_VALUES = 2**20
"""Prompts of token ids may be that long."""

_decode = msgspec.json.Decoder().decode


class JsonRoute(APIRoute):
    """Route that accepts only ``application/json``. Sets ``num_body_bytes`` in the request's state."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        assert self.body_field is not None
        model = self.body_field.field_info.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)

        async def handle_json(request: Request) -> Response:
            content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if content_type != "application/json":
                shown = content_type[:MAX_NAME_CHARS] or "none"
                raise ApiError(415, f"send the request with Content-Type: application/json; it was {shown}")
            return await handle(_JsonRequest(request, model))

        return handle_json


class _JsonRequest(Request):
    """`json` returns the body as an instance of its model, which FastAPI passes on as it is."""

    def __init__(self, request: Request, model: type[BaseModel]) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model

    async def json(self) -> Any:
        data = await self.body()
        self._body = b""
        self.state.num_body_bytes = len(data)
        if len(data) <= LARGE_BYTES:
            return read_body(data, self._model)
        return await asyncio.to_thread(read_body, data, self._model)


def read_body(data: bytes, model: type[BaseModel]) -> BaseModel:
    """
    Raises:
        ApiError: it is not JSON, too large in structure, or not of the model.
    """
    if len(data) > LARGE_BYTES:
        _check_structure(data)
    try:
        return model.model_validate(_decode(data))
    except UnicodeDecodeError:
        raise ApiError(400, "the request body is not UTF-8") from None
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the request body is not JSON: {error}") from None
    except RecursionError:
        raise ApiError(400, "the request body is nested too deeply") from None
    except ValidationError as error:
        raise refusal_of(error) from None


def refusal_of(error: ValidationError) -> ApiError:
    """The first thing that is wrong."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = ".".join(str(part)[:MAX_NAME_CHARS] for part in first["loc"])
    if not param and first["type"] == "model_type":
        return ApiError(400, "the request body must be a JSON object")
    return ApiError(400, f"{param}: {first['msg']}" if param else first["msg"], param=param or None)


def _check_structure(data: bytes) -> None:
    """Count what would be built. Never counts less, whether the bytes are JSON or not."""
    if not any(number > most for _, number, most in _counts(data, data)):
        return  # with the text of strings, which is usually far below
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside = b"".join(unescaped.split(b'"')[::2]) if unescaped.count(b'"') <= 2 * MAX_STRINGS else b""
    for what, number, most in _counts(unescaped, outside):
        if number > most:
            raise ApiError(400, f"the request body has {number} {what}; send {most} at most")


def _counts(unescaped: bytes, outside: bytes) -> tuple[tuple[str, int, int], ...]:
    """Parts, their number and its limit. ``outside`` is the text outside strings."""
    return (
        ("strings", unescaped.count(b'"') // 2, MAX_STRINGS),
        ("objects and lists", outside.count(b"{") + outside.count(b"["), MAX_CONTAINERS),
        ("values", outside.count(b",") + 1, MAX_VALUES),
    )
