"""Configuration of a router process: one JSON object, written by the supervisor, read by `pdserve.router.main`."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.contracts.deployment import RouterConfig, SloConfig, ToolFormatName
from pdserve.contracts.precision import Precision
from pdserve.contracts.worker_config import TlsFiles, WorkerRole
from pdserve.model.cost.hardware import Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterProcessConfig:
    """All settings of a router process, which never reads the environment. Workers arrive through the admin port."""

    model_path: str
    """Folder with config.json and the tokenizer."""
    served_name: str
    """Model name for clients."""
    router: RouterConfig = field(default_factory=RouterConfig)
    """Section of the deployment file, with absolute paths and this process's ``admin_port``."""
    tool_format: ToolFormatName = "auto"
    """How the model writes tool calls; ``auto`` if its chat template says."""
    generation_config: str = "none"
    """``auto``: the checkpoint's sampling is that of requests that do not say."""
    replica: int = 0
    """Number of this router among `RouterConfig.replicas`. The first one's metrics have the workers'."""
    admin_token: str = ""
    """Bearer token that the admin port requires; empty requires none."""
    slo: SloConfig = field(default_factory=SloConfig)
    cluster_token: str = ""
    """Secret that router and workers prove to each other to know."""
    tls: TlsFiles | None = None
    """Encrypts the sessions with workers."""
    hardware: str = "cpu"
    """Device of a worker's rank, for predictions: a name in `pdserve.model.cost.hardware`."""
    devices: dict[WorkerRole, Hardware] = field(default_factory=dict)
    """Measured device by role, where available; overrides ``hardware``."""
    cores_per_rank: int = 1
    """Cores of each rank of a worker on ``cpu``."""
    time_scale: float = 1.0
    """Factor by which an emulated worker's steps are slower than those of ``hardware``."""
    tensor_parallel: dict[WorkerRole, int] = field(default_factory=dict)
    """Tensor-parallel ranks of a worker by role, where more than one."""
    pipeline_parallel: dict[WorkerRole, int] = field(default_factory=dict)
    """Pipeline stages of a worker by role, where more than one."""
    expert_parallel: dict[WorkerRole, bool] = field(default_factory=dict)
    """Whether ranks of a worker have whole experts, by role."""
    precision: Precision = field(default_factory=Precision)
    kv_transport: str = "auto"
    """``kv_transfer.transport``, for predictions."""
    drain_timeout_s: float = 30.0
    """Seconds for requests in flight to finish after SIGTERM."""
