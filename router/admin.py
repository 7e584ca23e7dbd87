"""Admin port: metrics, targets, drain and status. Loopback by default; it has no authentication.

The supervisor puts the whole list of workers; Prometheus and `pdserve status` read. Serves no client requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from fastapi import FastAPI, HTTPException
from google.protobuf.json_format import MessageToDict
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.placement import WorkerEndpoint, WorkerRole
from pdserve.model.cost.hardware import Hardware
from pdserve.router.cluster.cluster import Cluster
from pdserve.router.cluster.fleet import Fleet, RemoteWorker
from pdserve.router.metrics import RouterMetrics
from pdserve.router.requests.dispatch import Dispatcher

_LIMITS = ("max_model_len", "block_size", "num_blocks", "max_batch_tokens", "max_batch_size")
_HELD = ("hardware", "tensor_parallel", "dtype", "kv_dtype", "quantization")
"""Fields of a worker's welcome."""


class Target(BaseModel):
    """A `WorkerEndpoint` in JSON."""

    model_config = ConfigDict(extra="forbid")

    worker_id: str = Field(min_length=1)
    role: WorkerRole
    address: str = Field(pattern=r":\d+$")
    epoch: int = Field(ge=0, lt=2**64)

    def endpoint(self) -> WorkerEndpoint:
        return WorkerEndpoint(**self.model_dump())


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedCluster:
    """Deployment parameters that the router received, for `/status`."""

    model_path: str
    """Absolute path of the model folder on the router's host."""
    served_name: str
    slo: SloConfig
    devices: Mapping[WorkerRole, Hardware]
    """Hardware that predicts the workers of each role: as measured, slowed if emulated."""


def create_admin_app(
    cluster: Cluster, dispatcher: Dispatcher, fleet: Fleet, metrics: RouterMetrics, served: ServedCluster
) -> FastAPI:
    app = FastAPI(title="pdserve admin", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/targets")
    async def list_targets() -> list[dict[str, Any]]:
        return [asdict(endpoint) for endpoint in fleet.targets]

    @app.put("/targets")
    async def put_targets(targets: list[Target]) -> list[dict[str, Any]]:
        """Replace the whole list: absent workers are dropped, and a new epoch replaces the worker of the same id."""
        try:
            await fleet.set_targets(target.endpoint() for target in targets)
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        return [asdict(endpoint) for endpoint in fleet.targets]

    @app.post("/drain")
    async def drain() -> dict[str, Any]:
        """Refuse new requests; running ones continue. The process stays; SIGTERM ends it once `in_flight` is 0."""
        dispatcher.begin_drain()
        return {"draining": True, "in_flight": dispatcher.num_in_flight}

    @app.get("/status")
    async def status() -> dict[str, Any]:
        return {**router_status(cluster, dispatcher, fleet), **_deployment_status(served)}

    return app


def router_status(cluster: Cluster, dispatcher: Dispatcher, fleet: Fleet) -> dict[str, Any]:
    """Router state, as shown by `pdserve status`."""
    return {
        "ready": cluster.is_ready,
        "draining": dispatcher.is_draining,
        "in_flight": dispatcher.num_in_flight,
        "queued": dispatcher.num_queued,
        "accepted": dispatcher.num_accepted,
        "outcomes": {outcome.value: count for outcome, count in dispatcher.outcomes.items()},
        "workers": [_worker_status(worker) for worker in fleet.workers],
    }


def _deployment_status(served: ServedCluster) -> dict[str, Any]:
    """Constant part of the status; `pdserve plan --live` uses it."""
    return {
        "model": {"path": served.model_path, "name": served.served_name},
        "slo": asdict(served.slo),
        # Sources are most of a device's text, and readers of the status do not need them.
        "devices": {role.value: asdict(replace(device, sources={})) for role, device in served.devices.items()},
    }


def _worker_status(worker: RemoteWorker) -> dict[str, Any]:
    load = MessageToDict(worker.reported, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    for name in ("num_preemptions", "num_swap_outs", "num_swap_ins"):
        load[name] = getattr(worker.reported, name)  # protobuf's JSON mapping writes 64-bit integers as strings
    welcome = worker.welcome
    limits = {name: getattr(welcome, name) for name in _LIMITS}
    held = {name: getattr(welcome, name) for name in _HELD}
    return {**asdict(worker.endpoint), "up": worker.is_up, **held, "limits": limits, "load": load}
