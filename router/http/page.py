"""The page at ``/``: its files, the stream of what they show, and a cookie for browsers that gave an API key.

Plain HTML, CSS and JavaScript in ``static/``, which request nothing from any other host.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from pdserve.router.http.errors import ApiError
from pdserve.router.http.keys import KeyFile
from pdserve.router.overview import Overview

_FILES = {
    "/": ("index.html", "text/html"),
    "/page/page.css": ("page.css", "text/css"),
    "/page/page.js": ("page.js", "text/javascript"),
}
PAGE_PATHS = frozenset(_FILES)
"""Paths of the files."""
KEY_COOKIE = "pdserve_key"
"""Holds the API key of a browser until it is closed; scripts cannot read it, and other sites cannot send it."""
MAX_VIEWERS = 64
"""Open streams."""

_STATIC = Path(__file__).parent / "static"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def add_page_routes(app: FastAPI, overview: Overview, keys: KeyFile | None = None) -> None:
    num_viewers = 0

    async def show_file(request: Request, *, data: bytes, media_type: str) -> Response:
        if keys is not None:
            await keys.refresh()
            if keys.caller(request.cookies.get(KEY_COOKIE, "")) is None:
                data = data.replace(b"<body>", b"<body data-needs-key>")  # so that it asks before a request is refused
        return Response(data, media_type=media_type, headers=_HEADERS)

    for path, (name, media_type) in _FILES.items():
        show = partial(show_file, data=(_STATIC / name).read_bytes(), media_type=media_type)
        app.add_route(path, show, methods=["GET", "HEAD"])

    @app.get("/page/events")
    async def stream() -> Response:
        if num_viewers >= MAX_VIEWERS:
            raise ApiError(503, f"{MAX_VIEWERS} pages are open already; close one", headers={"Retry-After": "5"})
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(events(), media_type="text/event-stream", headers=headers)

    async def events() -> AsyncIterator[bytes]:
        """The trend so far, then the state after each sample, with new points of the trend."""
        nonlocal num_viewers
        num_viewers += 1
        sent_s = float("-inf")
        try:
            while not overview.is_over:
                points = [point for point in overview.points if point["at_s"] > sent_s]
                sent_s = points[-1]["at_s"] if points else sent_s
                yield b"data: " + msgspec.json.encode({"now": overview.shown, "points": points}) + b"\n\n"
                async with overview.sampled:
                    await overview.sampled.wait()
        finally:
            num_viewers -= 1

    @app.post("/page/session")
    async def keep_key(request: Request) -> Response:
        """Keep the API key of this request in the browser."""
        _, _, key = request.headers.get("authorization", "").partition(" ")
        response = Response(status_code=204)
        is_secure = request.url.scheme == "https"
        response.set_cookie(KEY_COOKIE, key.strip(), httponly=True, samesite="strict", secure=is_secure)
        return response
