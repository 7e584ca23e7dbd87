"""Configuration of a router process: one JSON object, written by the supervisor, read by `pdserve.router.main`."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.contracts.deployment import DEFAULT_POLICY, Policy, SloConfig, ToolFormatName
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
    tool_format: ToolFormatName = "auto"
    """How the model writes tool calls; ``auto`` if its chat template says."""
    generation_config: str = "none"
    """``auto``: the checkpoint's sampling is that of requests that do not say."""
    host: str = "127.0.0.1"
    port: int = 8000
    """Port of the API; 0 picks a free one."""
    replica: int = 0
    """Number of this router among ``num_replicas``, which share ``port``. The first one's metrics have the workers'."""
    num_replicas: int = 1
    admin_host: str = "127.0.0.1"
    admin_port: int = 0
    """Port of metrics, targets, drain and status; 0 picks a free one."""
    admin_token: str = ""
    """Bearer token that the admin port requires; empty requires none."""
    open_metrics: bool = False
    """Serve ``/metrics`` and ``/targets`` without the token."""
    keep_alive_s: float = 10.0
    """Seconds between comments of a stream before token 0; 0 for none."""
    keys_file: str = ""
    """File of API keys (`pdserve.router.http.keys`); empty serves everybody."""
    tls_certificate: str = ""
    """Certificate chain of the API's port (PEM), which then speaks HTTPS."""
    tls_key: str = ""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call the API."""
    page: bool = True
    """Serve the page, which shows the cluster, at ``/``."""
    request_log: str = ""
    """File that gets a line of JSON for each request (`pdserve.router.http.request_log`); empty writes none."""
    log_format: str = "text"
    """``text``, or ``json``: an object per line."""
    tracing: str = ""
    """URL of an OpenTelemetry collector (OTLP over HTTP) that gets the spans of requests; empty for none."""
    slo: SloConfig = field(default_factory=SloConfig)
    policy: Policy = DEFAULT_POLICY
    max_silence_s: float = 600.0
    """Seconds without a token after which a request is given up."""
    max_queued_requests: int = 1024
    """Maximum answers requested and not finished."""
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
