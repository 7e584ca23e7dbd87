"""Routes whose body is JSON, read more strictly than FastAPI does: what is ambiguous or broken is told, not guessed.

Owns how bytes become an object; what the object may hold is the schema's.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from pdserve.router.errors import MAX_NAME_CHARS, ApiError


class JsonRoute(APIRoute):
    """A route that takes ``application/json`` and nothing else."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if content_type != "application/json":
                shown = content_type[:MAX_NAME_CHARS] or "none"
                raise ApiError(415, f"send the request with Content-Type: application/json; it was {shown}")
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_json


class _JsonRequest(Request):
    async def json(self) -> Any:
        try:
            text = (await self.body()).decode()
        except UnicodeDecodeError as error:
            raise ApiError(400, f"the request body is not UTF-8 at byte {error.start}") from None
        try:
            return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
        except json.JSONDecodeError as error:
            message = f"the request body is not JSON: {error.msg} at character {error.pos}"
        except RecursionError:
            message = "the request body is nested too deeply"
        except ValueError:  # of int(): it reads no more digits than it could write
            message = "the request body has a number with too many digits"
        raise ApiError(400, message)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Readers differ in which of two equal names they take, so there may not be two."""
    members = dict(pairs)
    if len(members) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ApiError(400, f"the request body has {twice[:MAX_NAME_CHARS]!r} twice in one object")
    return members


def _refuse_constant(name: str) -> None:
    raise ApiError(400, f"the request body is not JSON: {name} is no JSON number")
