"""The Ray cluster that the workers live in: a private one on this machine, or an existing one.

Owns the private cluster's processes, its token and its folder. The supervisor starts it, connects and stops it. Ray
places and watches the workers; no token and no KV passes through it. Never calls `ray stop`, which ends every Ray on
the machine.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from pdserve.contracts.errors import DeployError
from pdserve.deploy.cluster.processes import end_session, last_line, session_members, start_tied

WORKER_RESOURCE = "pdserve_worker"
"""Custom resource that each worker takes one of, where the cluster offers it; workers ask for no CPU."""

NAMESPACE = "pdserve"
_OBJECT_STORE_BYTES = 80_000_000  # Ray refuses less than 75 MB; nothing of ours is kept in it
_STARTED = "Ray runtime started."
_STOP_GRACE_S = 5.0


class PrivateRay:
    """A Ray head for one deployment: loopback only, behind a random token, in a session and a folder of its own."""

    def __init__(self, folder: Path, num_workers: int, token: str) -> None:
        """Start it; returns at once.

        Args:
            folder: a folder of its own for its files, short enough for the socket paths below it.
            num_workers: worker processes that Ray starts ahead of need.
            token: what every call to it must carry. Ray reads it once in the life of a process, so that all clusters
                that this process ever joins must have the same.
        """
        self.address = f"127.0.0.1:{_free_port()}"
        self._folder = folder
        self._log_path = folder / "start.log"
        self._token = token
        folder.mkdir(exist_ok=True)
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
            f"--port={self.address.rpartition(':')[2]}",
            f"--temp-dir={folder / 'r'}",
            f"--num-cpus={num_workers}",
            f"--object-store-memory={_OBJECT_STORE_BYTES}",
            f"--resources={json.dumps({WORKER_RESOURCE: 10_000})}",
            *("--include-dashboard=false", "--dashboard-agent-listen-port=0", "--include-log-monitor=false"),
            *("--no-monitor", "--disable-usage-stats"),
        ]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment = {**inherited, **self._environment, "RAY_START_HOOK": f"{__name__}.trim_ray_start"}
        self._process = start_tied(command, env=environment, log_path=self._log_path)
        # Importing Ray takes most of a second, which the start of the cluster leaves; it reads the environment then.
        os.environ.update(self._environment)
        threading.Thread(target=importlib.import_module, args=("ray",), daemon=True).start()

    @property
    def _environment(self) -> dict[str, str]:
        """Environment variables of Ray, in its own processes and in the driver's."""
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._token,
            "RAY_USAGE_STATS_ENABLED": "0",
            # Despite its name, set to 0 it keeps Ray on the loopback address on every system.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            # No history of calls is kept; a driver would spend 5 s on handing it to a cluster that is gone.
            "RAY_task_events_report_interval_ms": "0",
            # Ray's own pages on the end of a worker; ours is one line.
            "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
        }

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def is_started(self) -> bool:
        """Whether `connect` can be called."""
        return _STARTED in self._log_path.read_text(errors="replace")

    @property
    def failure(self) -> str:
        """Why it ended, in one line."""
        return last_line(self._log_path)

    def connect(self) -> None:
        """Make this process its driver.

        Raises:
            DeployError: it does not answer.
        """
        _connect(self.address)

    def stop(self) -> None:
        """Disconnect, end every process of the cluster and remove its files. Safe to call twice."""
        disconnect()
        end_session(self._process, _STOP_GRACE_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def process_ids(self) -> list[int]:
        """All processes of the cluster, workers included."""
        return [process.pid for process in session_members(self._process.pid)]


def connect_existing(address: str) -> None:
    """Make this process a driver of the cluster at ``address`` (``host:port``).

    Raises:
        DeployError: it cannot be reached, or has hosts other than this one.
    """
    # Give up on a token that is refused after two tries.
    os.environ["RAY_NUM_REDIS_GET_RETRIES"] = "2"
    import ray

    _connect(address)
    hosts = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    if len(hosts) != 1:
        disconnect()
        raise DeployError(
            f"the Ray cluster at {address} has {len(hosts)} hosts; clusters of one host are supported today"
        )


def disconnect() -> None:
    """Leave the cluster, if this process is in one; its actors end. Resets what SIGTERM does to its default."""
    if "ray" in sys.modules:
        import ray

        if ray.is_initialized():
            ray.shutdown()


def worker_resources() -> dict[str, float]:
    """The custom resource by which Ray counts workers, if the cluster offers it."""
    import ray

    return {WORKER_RESOURCE: 1} if WORKER_RESOURCE in ray.cluster_resources() else {}


def num_gpus() -> float:
    """GPUs of the cluster that this process is in."""
    import ray

    return float(ray.cluster_resources().get("GPU", 0))


def _connect(address: str) -> None:
    import ray

    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="critical")
    except (ConnectionError, RuntimeError, ValueError) as error:
        disconnect()
        cause = str(error).splitlines()[0]
        raise DeployError(f"cannot connect to Ray at {address}: {cause}; check --ray-address and its token") from error


def trim_ray_start(ray_params: Any, head: bool) -> None:
    """Leave out two servers that nothing here uses. Runs inside `ray start`, which loads it by ``RAY_START_HOOK``.

    The Ray Client server would listen on a fixed port, and the API server (which runs even without a dashboard, and
    which the start waits two seconds for) on another; both would collide between clusters. The API server has no
    switch, but the start goes on without it when its address cannot be bound.
    """
    ray_params.ray_client_server_port = None
    ray_params.dashboard_host = "0.0.0.1"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
