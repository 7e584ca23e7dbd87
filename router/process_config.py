"""Configuration of a router process: one JSON object, written by the supervisor, read by `pdserve.router.main`."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.contracts.deployment import DeploymentConfig, RouterConfig
from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.cost.hardware import Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterProcessConfig:
    """All settings of a router process, which never reads the environment. Workers arrive through the admin port."""

    deployment: DeploymentConfig = field(default_factory=DeploymentConfig)
    """The deployment file, with absolute paths, the served name and dtype of the model, and this process's
    ``router.admin_port``."""
    replica: int = 0
    """Number of this router among `RouterConfig.replicas`. The first one's metrics have the workers'."""
    admin_token: str = ""
    """Bearer token that the admin port requires; empty requires none."""
    cluster_token: str = ""
    """Secret that router and workers prove to each other to know."""
    hardware: str = "cpu"
    """Device of a worker's rank, for predictions: a name in `pdserve.model.cost.hardware`."""
    devices: dict[WorkerRole, Hardware] = field(default_factory=dict)
    """Measured device by role, where available; overrides ``hardware``."""
    cores_per_rank: int = 1
    """Cores of each rank of a worker on ``cpu``."""
    time_scale: float = 1.0
    """Factor by which an emulated worker's steps are slower than those of ``hardware``."""
    drain_timeout_s: float = 30.0
    """Seconds for requests in flight to finish after SIGTERM."""

    @property
    def router(self) -> RouterConfig:
        return self.deployment.router
