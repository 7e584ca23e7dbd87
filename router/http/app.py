"""Public HTTP application: OpenAI's API and Anthropic's over a `Cluster`, plus the health routes.

Owns the routes. `pdserve.router.main` runs it under uvicorn. Metrics and control have their own port.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse

from pdserve.router.cluster.cluster import Cluster
from pdserve.router.http.asgi import EdgeMiddleware
from pdserve.router.http.edge import Edge
from pdserve.router.http.errors import MESSAGES_PATH, ApiError, install_error_handlers
from pdserve.router.http.json_body import BodyRoute
from pdserve.router.http.keys import RATE_HEADERS, KeyFile
from pdserve.router.http.page import add_page_routes
from pdserve.router.http.request_log import RequestLog
from pdserve.router.http.writer import VERSION
from pdserve.router.metrics import RouterMetrics
from pdserve.router.overview import Overview
from pdserve.router.text.tokenizer import ChatTokenizer

if TYPE_CHECKING:  # it needs an extra
    from pdserve.router.http.tracing import Tracer

_READ = ["GET", "HEAD"]

MAX_BODY_BYTES = 8 * 2**20
"""Enough for about a million prompt tokens."""

CORS_MAX_AGE_S = 600
"""Seconds for which a browser need not ask again."""


def create_app(
    cluster: Cluster,
    tokenizer: ChatTokenizer,
    *,
    served_name: str,
    metrics: RouterMetrics,
    defaults: Mapping[str, float] | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    keys: KeyFile | None = None,
    cors_origins: Sequence[str] = (),
    request_log: RequestLog | None = None,
    tracer: Tracer | None = None,
    overview: Overview | None = None,
    keep_alive_s: float = 10.0,
) -> FastAPI:
    """Create the application for one model.

    Args:
        served_name: model name for clients.
        defaults: `Edge.defaults`.
        max_body_bytes: larger request bodies are refused with 413.
        keys: every route but ``/live`` and the page's files needs one of these; None serves everybody.
        cors_origins: origins whose pages may call the API.
        request_log: gets a line for each request; None writes none.
        tracer: gets the spans of each request; None emits none.
        overview: what the page at ``/`` shows; None serves no page.
        keep_alive_s: seconds between comments of a stream before token 0; 0 for none.
    """
    edge = Edge(
        cluster=cluster,
        tokenizer=tokenizer,
        served_name=served_name,
        metrics=metrics,
        keep_alive_s=keep_alive_s,
        defaults=defaults or {},
    )
    app = FastAPI(title="pdserve", version=VERSION, docs_url=None, redoc_url=None, redirect_slashes=False)
    install_error_handlers(app)
    app.add_middleware(
        EdgeMiddleware,
        metrics=metrics,
        max_body_bytes=max_body_bytes,
        max_model_len=lambda: cluster.max_model_len,
        keys=keys,
        request_log=request_log,
        tracer=tracer,
    )
    if cors_origins:  # outermost: a browser asks before it sends a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["Retry-After", "X-Request-Id", "X-Should-Retry", *RATE_HEADERS],
            max_age=CORS_MAX_AGE_S,
        )
    _add_model_routes(app, edge)
    _add_status_routes(app, cluster)
    if overview is not None:
        add_page_routes(app, overview, keys)
    return app


def _add_model_routes(app: FastAPI, edge: Edge) -> None:
    created = int(time.time())

    def model_card() -> dict[str, Any]:
        return {
            "id": edge.served_name,
            "object": "model",
            "created": created,
            "owned_by": "pdserve",
            "root": edge.served_name,
            "parent": None,
            "max_model_len": edge.cluster.max_model_len,
            "permission": [],
        }

    routes = APIRouter(route_class=BodyRoute)
    routes.post("/v1/chat/completions")(edge.create_chat_completion)
    routes.post("/v1/completions")(edge.create_completion)
    routes.post("/v1/responses")(edge.create_response)
    routes.post(MESSAGES_PATH)(edge.create_message)
    routes.post(f"{MESSAGES_PATH}/count_tokens")(edge.count_tokens)
    routes.post("/tokenize")(edge.tokenize)
    routes.post("/detokenize")(edge.detokenize)
    app.include_router(routes)
    app.api_route("/tokenizer_info", methods=_READ)(edge.tokenizer_info)

    @app.api_route("/v1/models", methods=_READ)
    async def list_models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [model_card()]})

    @app.api_route("/v1/models/{name:path}", methods=_READ)
    async def get_model(name: str) -> JSONResponse:
        if name != edge.served_name:
            raise ApiError(404, f"the model `{name}` does not exist", param="model", code="model_not_found")
        return JSONResponse(model_card())


def _add_status_routes(app: FastAPI, cluster: Cluster) -> None:
    @app.api_route("/health", methods=_READ)
    async def health() -> JSONResponse:
        """Whether a request sent now would be served."""
        if cluster.is_ready:
            return JSONResponse({"status": "ready"})
        missing = "a worker" if cluster.max_model_len is None else "a round trip through prefill and decode"
        return JSONResponse({"status": "not ready", "missing": missing}, 503)

    @app.api_route("/live", methods=_READ)
    async def live() -> JSONResponse:
        """Whether this process serves HTTP at all."""
        return JSONResponse({"status": "live"})

    @app.api_route("/version", methods=_READ)
    async def show_version() -> JSONResponse:
        return JSONResponse({"version": VERSION})
