"""Errors in the format of OpenAI's API: ``{"error": {"message", "type", "param", "code"}}``, or of Anthropic's.

Handlers raise `ApiError` for a client's mistake and pass on `GenerationError` of the cluster; errors of FastAPI's
routing are rewritten here. Details of an unexpected exception are logged and never reach a client.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from pdserve.router.requests.request import GenerationError

logger = logging.getLogger(__name__)

CLIENT_LEFT = 499
"""Status, in metrics and the log only, of a request whose client left before another status was sent."""

MAX_MESSAGE_CHARS = 1000
MAX_NAME_CHARS = 64
"""Limit for a name chosen by a client, such as a key of ``logit_bias``."""

_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "service_unavailable_error", 504: "timeout_error"}

MESSAGES_PATH = "/v1/messages"
"""Errors of this route, and of those below it, are in Anthropic's format."""
_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 500: "api_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


class ApiError(HTTPException):
    """A request that cannot be served as it is. ``param`` names the field to change."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        # A message may quote any amount of the client's text
        shortened = message if len(message) <= MAX_MESSAGE_CHARS else f"{message[:MAX_MESSAGE_CHARS]}..."
        super().__init__(status, shortened, headers)
        self.param = param
        self.code = code or ("rate_limit_exceeded" if status == 429 else None)

    def body(self, path: str) -> bytes:
        """JSON for a request to ``path``."""
        if path.startswith(MESSAGES_PATH):
            kind = _ANTHROPIC_TYPES.get(self.status_code, "invalid_request_error")
            # Claude Code compacts a conversation at these words
            before = "prompt is too long: " if self.code == "context_length_exceeded" else ""
            return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": before + self.detail}})
        error = {
            "message": self.detail,
            "type": _TYPES.get(self.status_code, "invalid_request_error"),
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})

    def response(self, path: str) -> Response:
        return Response(self.body(path), self.status_code, self.headers, media_type="application/json")


def refusal(field: str, message: str) -> ApiError:
    """Error of a field, whose name begins the message."""
    return ApiError(400, f"{field} {message}", param=field)


def api_error(error: Exception) -> ApiError:
    """Convert an exception to an error for the client; log an unexpected one and return 500."""
    match error:
        case ApiError():
            return error
        case GenerationError():
            return ApiError(error.status, error.message, headers=_retry_headers(error))
        case TimeoutError():
            return ApiError(503, "the router is too busy to answer in time; try again", headers={"Retry-After": "1"})
        case HTTPException():
            return ApiError(error.status_code, error.detail, headers=error.headers)
        case RecursionError():  # what reads or writes JSON has a limit, each another one
            logger.warning("a request passed the limit of recursion: %s", error)
            return ApiError(400, "the request body is nested too deeply")
    logger.error("unexpected error in the HTTP edge", exc_info=error)
    return ApiError(500, "internal error of the router; its log has the cause")


def _retry_headers(error: GenerationError) -> dict[str, str]:
    """``Retry-After`` for clients of an overloaded cluster, in whole seconds. A request that could not be computed, or
    ended workers, would do so again: ``x-should-retry`` keeps OpenAI's clients from sending it anew."""
    headers = {"x-should-retry": "false"} if error.status == 500 else {}
    if error.retry_after_s is not None or error.status == 429:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s or 0)))
    return headers


async def answer_error(request: Request, error: Exception) -> Response:
    """Response to errors of the routes and FastAPI's own; `EdgeMiddleware` handles all other exceptions."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_LEFT)
    if isinstance(error, HTTPException) and not isinstance(error, ApiError):
        if error.status_code == 404:
            error.detail = (
                f"there is no route {request.method} {request.url.path}; {_remedy_of_route(request.url.path)}"
            )
        elif error.status_code == 405:
            error.detail = f"{request.url.path} does not take {request.method}"
            if request.method == "OPTIONS" and (origin := request.headers.get("Origin")):
                error.detail += f"; for pages in a browser, add {origin} to router.cors_origins"
    return api_error(error).response(request.url.path)


_PROBED = frozenset({"/healthz", "/readyz", "/livez", "/ready", "/ping", "/v1/health"})


def _remedy_of_route(path: str) -> str:
    if path == "/metrics":
        return "metrics are on the admin port, whose address pdserve up prints"
    if path in _PROBED:
        return "probes ask /health (ready) or /live"
    remedy = "GET /openapi.json lists the routes"
    if path.startswith("/v1/") and not path.startswith("/v1/v1"):
        return remedy
    return f"base URLs of clients end with /v1, those of Anthropic's clients before it; {remedy}"
