"""Admin port: metrics, discovery, workers, plan, drain and status. Loopback by default; requests need the admin token.

The supervisor puts the whole list of workers; Prometheus and `pdserve status` read. Serves no client requests.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from fastapi import Body, FastAPI, HTTPException, Request
from prometheus_client.exposition import choose_encoder
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from pdserve.contracts import metrics
from pdserve.contracts.worker_config import WorkerEndpoint, WorkerRole
from pdserve.router.cluster.cluster import Cluster
from pdserve.router.cluster.remote_worker import RemoteWorker
from pdserve.router.overview import Overview
from pdserve.router.process_config import RouterProcessConfig
from pdserve.router.requests.placement import Costs

_WELCOME_FIELDS = (
    *("hardware", "tensor_parallel", "pipeline_parallel"),
    *("dtype", "kv_dtype", "quantization", "cpu_products", "products"),
)
_LIMITS = ("max_model_len", "block_size", "num_blocks", "max_batch_tokens", "max_batch_size")
"""Fields of a worker's welcome, too."""


_Rate = Annotated[float, Body(ge=0)]

OPEN_PATHS = ("/metrics", "/targets")
"""Paths that ``router.open_metrics`` serves without the token."""


class Target(BaseModel):
    """A `WorkerEndpoint` in JSON."""

    model_config = ConfigDict(extra="forbid")

    worker_id: str = Field(min_length=1)
    role: WorkerRole
    address: str = Field(pattern=r":\d+$")
    epoch: int = Field(ge=0, lt=2**64)


def create_admin_app(cluster: Cluster, config: RouterProcessConfig, costs: Costs, overview: Overview) -> FastAPI:
    deployment, name = config.deployment, config.deployment.model.served_name
    model = {"path": str(Path(deployment.model.path).resolve()), "name": name}
    replicas = cluster.dispatcher.replicas
    app = FastAPI(title="pdserve admin", docs_url=None, redoc_url=None, openapi_url=None)

    def routers(request: Request) -> list[str]:
        """Admin addresses: that at which this router was asked, then those of its replicas."""
        own_port = request.scope["server"][1]
        others = [request.url.replace(port=port).netloc for port in replicas.admin_ports if port != own_port]
        return [request.url.netloc, *others]

    @app.middleware("http")
    async def check_caller(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        if refusal := _refusal(request, config):
            return refusal
        return await answer(request)

    @app.get("/metrics")
    async def show_metrics(request: Request) -> Response:
        """Metrics for Prometheus, with request ids as exemplars if it takes them. Written in a thread, because those of
        many workers take longer than tokens may wait."""
        write, content_type = choose_encoder(request.headers.get("accept", ""))
        cluster.metrics.refresh()
        return Response(await asyncio.to_thread(write, cluster.metrics.registry), media_type=content_type)

    @app.get("/targets")
    async def discover(request: Request) -> list[dict[str, Any]]:
        """Targets in the format of Prometheus' HTTP service discovery: this router, by the address at which it was
        asked, and its replicas. The first one reports for all workers."""
        return [{"targets": routers(request), "labels": {"__meta_pdserve_model": name}}]

    @app.get("/workers")
    async def list_workers() -> list[dict[str, Any]]:
        return [asdict(worker.endpoint) for _, worker in sorted(cluster.workers.items())]

    @app.put("/workers")
    async def put_workers(targets: list[Target]) -> list[dict[str, Any]]:
        """Replace the whole list: absent workers are dropped, and a new epoch replaces the worker of the same id."""
        try:
            await cluster.set_targets(WorkerEndpoint(**target.model_dump()) for target in targets)
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        return await list_workers()

    @app.put("/routers")
    async def put_routers(admin_ports: list[int]) -> None:
        """Replace the list of routers that share the port of the API: those that are up, this one included."""
        replicas.put(admin_ports)

    @app.put("/plan")
    async def put_plan(running: _Rate, best: _Rate, workers: Annotated[dict[WorkerRole, int], Body()]) -> None:
        """Show what `pdserve plan --live` found among the metrics: requests per second within the SLO as placed now and
        by the best placement, and the workers of that."""
        cluster.metrics.planned({"running": running, "best": best}, workers)

    @app.get("/demand")
    async def show_demand() -> dict[str, Any]:
        """The work that requests bring, for the supervisor."""
        return cluster.dispatcher.demand()._asdict()

    @app.put("/scaled")
    async def put_scaled(reason: str) -> None:
        """Count a change of the numbers of workers among the metrics."""
        if reason not in metrics.SCALE_REASONS:
            raise HTTPException(400, f"reason is none of {', '.join(metrics.SCALE_REASONS)}")
        cluster.metrics[metrics.SCALE_CHANGES].labels(reason).inc()

    @app.post("/drain")
    async def drain() -> dict[str, Any]:
        """Refuse new requests; running ones continue. The process stays; SIGTERM ends it once `in_flight` is 0."""
        cluster.dispatcher.admission.begin_drain()
        return {"draining": True, "in_flight": cluster.dispatcher.num_in_flight}

    @app.get("/overview")
    async def show_overview() -> dict[str, Any]:
        """Figures of the last minute, for `pdserve top`."""
        return overview.now()

    @app.get("/status")
    async def status(request: Request) -> dict[str, Any]:
        """State of the router and its workers, and what `pdserve plan --live` needs to know of the deployment."""
        dispatcher = cluster.dispatcher
        return {
            "routers": routers(request),
            "ready": cluster.is_ready,
            "draining": dispatcher.admission.is_draining,
            "in_flight": dispatcher.num_in_flight,
            "queued": dispatcher.num_queued,
            "accepted": dispatcher.num_accepted,
            "outcomes": {outcome.value: count for outcome, count in dispatcher.outcomes.items()},
            "workers": [_worker_status(worker) for _, worker in sorted(cluster.workers.items())],
            "model": model,
            "slo": asdict(deployment.slo),
            "policy": config.router.policy,
            # Sources are most of a device's text, and readers of the status do not need them.
            "kv_transport": deployment.kv_transfer.transport,
            "expert_parallel": [role.value for role in WorkerRole if deployment.phase(role).expert_parallel],
            "devices": {role.value: asdict(replace(cost.hardware, sources={})) for role, cost in costs.items()},
        }

    return app


def _refusal(request: Request, config: RouterProcessConfig) -> Response | None:
    """Answer to a stranger: a page in a browser, a name that points here by DNS, or a caller without the token."""
    if "origin" in request.headers or not _is_own_name(request.url.hostname or "", config.router.admin_host):
        return JSONResponse({"detail": "name the admin port by its address; browsers' pages are refused"}, 403)
    given = request.headers.get("authorization", "").encode()
    is_open = not config.admin_token or (config.router.open_metrics and request.scope["path"] in OPEN_PATHS)
    if is_open or hmac.compare_digest(given, f"Bearer {config.admin_token}".encode()):
        return None
    detail = "give the admin token of the cluster, its file admin_token, as a bearer token"
    if request.scope["path"] in OPEN_PATHS:
        detail += "; or set router.open_metrics: true"
    return JSONResponse({"detail": detail}, 401, {"WWW-Authenticate": "Bearer"})


def _is_own_name(name: str, admin_host: str) -> bool:
    """True for an address or a name of this host, which no other site's DNS can claim."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in ("localhost", socket.gethostname(), admin_host)
    return True


def _worker_status(worker: RemoteWorker) -> dict[str, Any]:
    model = {name: getattr(worker.welcome, name) for name in _WELCOME_FIELDS}
    limits = {name: getattr(worker.welcome, name) for name in _LIMITS}
    return {**asdict(worker.endpoint), "up": worker.is_up, **model, "limits": limits, "load": worker.load._asdict()}
