"""Public HTTP application: OpenAI's API and Anthropic's over a `Cluster`, plus the health routes.

Owns the routes. `pdserve.router.main` runs it under uvicorn. Metrics and control have their own port.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse

from pdserve.contracts.deployment import DeploymentConfig
from pdserve.router.cluster.cluster import Cluster
from pdserve.router.http.asgi import EdgeMiddleware
from pdserve.router.http.edge import Edge
from pdserve.router.http.errors import MESSAGES_PATH, ApiError, install_error_handlers
from pdserve.router.http.json_body import BodyRoute
from pdserve.router.http.keys import RATE_HEADERS, KeyFile
from pdserve.router.http.page import add_page_routes
from pdserve.router.http.writer import VERSION
from pdserve.router.overview import Overview
from pdserve.router.record import RecordSink
from pdserve.router.text.tokenizer import ChatTokenizer

_READ = ["GET", "HEAD"]

CORS_MAX_AGE_S = 600
"""Seconds for which a browser need not ask again."""


def create_app(
    cluster: Cluster,
    tokenizer: ChatTokenizer,
    deployment: DeploymentConfig,
    *,
    defaults: Mapping[str, float] | None = None,
    keys: KeyFile | None = None,
    sinks: Sequence[RecordSink] = (),
    overview: Overview | None = None,
) -> FastAPI:
    """Create the application for one model.

    Args:
        defaults: `Edge.defaults`.
        keys: every route but ``/live`` and the page's files needs one of these; None serves everybody.
        sinks: get the record of each POST at its end.
        overview: what the page at ``/`` shows; None serves no page.
    """
    router = deployment.router
    edge = Edge(cluster, tokenizer, deployment.model.served_name, router.keep_alive_seconds, defaults or {})
    app = FastAPI(title="pdserve", version=VERSION, docs_url=None, redoc_url=None, redirect_slashes=False)
    install_error_handlers(app)
    app.add_middleware(EdgeMiddleware, cluster=cluster, keys=keys, sinks=sinks)
    if router.cors_origins:  # outermost: a browser asks before it sends a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=router.cors_origins,
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
