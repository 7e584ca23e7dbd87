"""The end of a cluster whose Ray has lost it, and the moment to start it anew.

An existing Ray loses a cluster when its control store restarts without its data, or when the node of the supervisor's
host ends. Its workers then run on for up to a minute and are served. The supervisor can join no second Ray: it ends,
and the command starts itself anew.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from pdserve.contracts.errors import DeployError
from pdserve.contracts.worker_config import WorkerRole
from pdserve.deploy.cluster.processes import end_session
from pdserve.deploy.cluster.ray_cluster import ExistingRay
from pdserve.deploy.cluster.router_process import RouterProcess
from pdserve.deploy.commands.status import fetch_status

OUTLIVE_S = 120.0
"""Time in which the hosts of a lost Ray cluster have ended their workers."""
_ASK_S = 1.0
_PROBE_S = 60.0


class RayLostError(Exception):
    """An existing Ray cluster was lost and can be joined again, by another process only."""

    def __init__(self, port: int, replicas: Mapping[WorkerRole, int]) -> None:
        """``port``: that of the API. ``replicas``: workers that the cluster had."""
        super().__init__("Ray was lost")
        self.port, self.replicas = port, replicas


class RayLoss:
    """Waits until nothing runs of a cluster that Ray has lost, and then until Ray can be joined again."""

    def __init__(self, ray: ExistingRay, log_path: Path, now_s: float) -> None:
        self._ray = ray
        self._log_path = log_path
        self._deadline_s = now_s + OUTLIVE_S
        self._is_serving = True
        self._asked_s = 0.0
        self._probe: subprocess.Popen[bytes] | None = None

    def is_over(self, now_s: float, router: RouterProcess) -> bool:
        """True once the cluster can start anew; does not wait."""
        if self._probe is not None and now_s - self._asked_s > _PROBE_S:
            self._probe.kill()
        if self._probe is not None and (status := self._probe.poll()) is not None:
            self._probe = None
            if status == 0:
                return True
        if now_s - self._asked_s > _ASK_S and self._probe is None:
            self._asked_s = now_s
            if self._is_serving:
                self._is_serving = now_s < self._deadline_s and _serves(router)
            else:
                self._probe = self._ray.start_probe(self._log_path)
        return False

    def end(self) -> None:
        if self._probe is not None:
            end_session(self._probe, 0)


def _serves(router: RouterProcess) -> bool:
    try:
        return any(worker["up"] for worker in fetch_status(router.admin_url)["workers"])
    except DeployError:  # it is restarted
        return True
