"""The Ray cluster of the workers: a private one on this machine, or an existing one of any number of hosts.

Owns the private cluster's processes, token and folder. Ray places and watches the workers; no token and no KV passes
through it. Never calls `ray stop`, which ends every Ray on the machine.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from pdserve.contracts.errors import DeployError
from pdserve.deploy.cluster.processes import end_session, is_alive, last_line, session_members, start_tied
from pdserve.deploy.cluster.ray_desk import RayDesk
from pdserve.deploy.cluster.supervised_process import SupervisedProcess

WORKER_RESOURCE = "pdserve_worker"
"""Custom resource of which each worker takes one, if the cluster offers it; workers request no CPU."""

NAMESPACE = "pdserve"
_OBJECT_STORE_BYTES = 80_000_000  # Ray refuses less than 75 MB; we keep nothing in it
_SERVERS = ("gcs_server", "raylet")
_FATAL = re.compile(r" C \d+ \d+\] \((\w+)\) \S+ (.*)")
"""Line of a server that ends: its name, and why."""
_STARTED = "Ray runtime started."
_START_TIMEOUT_S = 60.0
_STOP_GRACE_S = 3.0
_LEAVE_S = 1.0
_CALL_S = 1
_NO_REPORTS = {"RAY_DEDUP_LOGS_SKIP_REGEX": "."}
"""Hides Ray's long reports on dead workers and nodes; we print one line."""
_DRIVER = {
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a call after the end of a cluster would start another
    "RAY_gcs_rpc_server_reconnect_timeout_s": str(2**30),  # Ray ends processes whose control store is silent for longer
    **_NO_REPORTS,
}
_CURRENT_CLUSTER = Path("ray/ray_current_cluster")
"""File below the temporary folder into which `ray start` writes the address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    node_id: str
    address: str
    hostname: str
    resources: dict[str, float]
    """Those in use included."""


class RayCluster(SupervisedProcess):
    """The Ray cluster that this process joins; it is up once this process is its driver."""

    _probe_interval_s = 5.0

    def __init__(self, desk: RayDesk) -> None:
        super().__init__("ray")
        self.desk = desk
        self.resources: dict[str, float] = {}
        """Resources of the cluster when it was joined."""
        self.nodes: list[RayNode] = []
        """Live nodes, as Ray last told them."""
        self.is_lost = False
        """True once an existing Ray no longer knows this process: its control store has lost its data, or the node of
        this host has ended. This process can join no other cluster."""
        self._joining: Future[dict[str, float]] | None = None
        self._probe: Future[Any] | None = None
        self._probed_at_s = 0.0
        self._has_ended = threading.Event()
        """Frees the desk from a question that nobody will answer."""

    @property
    def worker_resources(self) -> dict[str, float]:
        """Custom resource that counts workers, if the cluster offers it."""
        return {WORKER_RESOURCE: 1} if WORKER_RESOURCE in self.resources else {}

    @property
    def num_gpus(self) -> float:
        return float(self.resources.get("GPU", 0))

    def end(self) -> None:
        """Leave the cluster, if this process has joined it; its actors end. Waits up to 1 s for Ray."""
        self._has_ended.set()
        self._joining = self._probe = None
        futures.wait([self.desk.submit(_leave)], _LEAVE_S)

    def request_hosts(self, bundles: Sequence[Mapping[str, float]]) -> None:
        """Have Ray's autoscaler keep hosts for all bundles of resources, those in use included, until the next request.
        Nothing follows where none runs, as on one machine."""

    def _has_joined(self, join: Callable[[], dict[str, float]]) -> bool:
        if self._joining is None:
            self._joining = self.desk.submit(join)
        if not self._joining.done():
            return False
        self.resources = self._joining.result()
        return True

    def _question(self, has_ended: threading.Event) -> Any:
        """What Ray is asked now and then."""
        _wait_for_answer(has_ended)

    def _ask(self, now_s: float) -> None:
        """Call Ray now and then, so that its silence is noticed; raises the error of the last call."""
        if self._probe is None or (self._probe.done() and now_s - self._probed_at_s > self._probe_interval_s):
            if self._probe is not None:
                self._probe.result()
            self._has_ended = has_ended = threading.Event()
            self._probe, self._probed_at_s = self.desk.submit(lambda: self._question(has_ended)), now_s


class ExistingRay(RayCluster):
    """A Ray cluster at ``address`` (``host:port``) that others start and end."""

    _probe_interval_s = 1.0  # hosts come and go

    def __init__(self, desk: RayDesk, address: str) -> None:
        super().__init__(desk)
        self._address = address
        self._raylet: psutil.Process | None = None
        """Of the node of this host."""
        self._has_requested = False

    @property
    def address(self) -> str:
        return self._address

    def request_hosts(self, bundles: Sequence[Mapping[str, float]]) -> None:
        self._has_requested = True
        self.desk.submit(lambda: _request_hosts(bundles))

    def end(self) -> None:
        if self._has_requested:
            self.request_hosts([])  # or hosts would stay
        super().end()

    def _start(self) -> None:
        os.environ |= {
            "RAY_NUM_REDIS_GET_RETRIES": "2",  # give up after two attempts if the token is refused
            **_DRIVER,
        }

    def _check_starting(self, now_s: float) -> bool:
        if self._joining is None:
            self._connect()  # Ray itself would look for a missing cluster for half a minute
        if not self._has_joined(lambda: _join(self._address)):
            return False
        self._raylet = self._raylet or _own_raylet()
        self._ask(now_s)
        return bool(self.nodes)

    def _question(self, has_ended: threading.Event) -> None:
        while not has_ended.is_set():
            try:
                self.nodes = _live_nodes()
                self.is_lost = _own_node() not in [node.node_id for node in self.nodes]
                return
            except Exception as error:  # asked again soon
                self.is_lost = "WrongClusterID" in str(error)
                if self.is_lost:
                    return
            has_ended.wait(0.1)

    def _check_up(self, now_s: float) -> None:
        self.is_lost |= self._raylet is not None and not is_alive(self._raylet)
        if not self.is_lost:
            self._ask(now_s)

    def _connect(self) -> None:
        """Raises OSError if nothing listens at the address."""
        socket.create_connection(split_address(self._address), timeout=0.5).close()

    def _reason(self, error: Exception) -> str:
        return str(error) if isinstance(error, DeployError) else f"no cluster answers at {self._address}: {error}"


class PrivateRay(RayCluster):
    """Ray head of one deployment: loopback only, protected by a random token, with its own session and folder."""

    def __init__(self, desk: RayDesk, folder: Path, num_workers: int, token: str) -> None:
        """Prepare the head; it is up once this process is its driver.

        Args:
            folder: folder for Ray's files, short enough for the socket paths below it.
            num_workers: worker processes that Ray starts ahead of need.
            token: credential of every call to the head. Ray reads it once per process, so all clusters that a process
                ever joins must share it.
        """
        super().__init__(desk)
        self._port = 0
        self._folder = folder
        self._log_path = folder / "start.log"
        self._num_workers = num_workers
        self._environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": token,
            "RAY_USAGE_STATS_ENABLED": "0",
            # Despite its name, 0 keeps Ray on the loopback address on every system.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            # No history of calls: a driver would spend 5 s on sending it to a cluster that is gone.
            "RAY_task_events_report_interval_ms": "0",
            **_DRIVER,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._servers: dict[str, psutil.Process] = {}
        """Control store and raylet of a cluster that is up, by name."""
        self._deadline_s = 0.0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def process_ids(self) -> list[int]:
        """Ids of all processes of the cluster, workers included."""
        return [process.pid for process in session_members(self._process.pid)] if self._process else []

    def end(self) -> None:
        """Disconnect, end every process of the cluster and remove its files."""
        super().end()
        if self._process is not None:
            end_session(self._process, 0 if self.desk.is_stuck else _STOP_GRACE_S)
            self._process = None  # another session may have its number later
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        self._folder.mkdir(exist_ok=True)
        self._port = _free_port()
        self._deadline_s = time.monotonic() + _START_TIMEOUT_S
        command = [
            *(sys.executable, "-P", "-m", "pdserve.deploy.cluster.ray_start", "start", "--head", "--block"),
            f"--port={self._port}",
            f"--temp-dir={self._folder / 'r'}",
            f"--num-cpus={self._num_workers}",
            f"--object-store-memory={_OBJECT_STORE_BYTES}",
            f"--resources={json.dumps({WORKER_RESOURCE: 10_000})}",
            *("--include-dashboard=false", "--dashboard-agent-listen-port=0", "--include-log-monitor=false"),
            *("--no-monitor", "--disable-usage-stats"),
        ]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self._process = start_tied(command, env={**inherited, **self._environment}, log_path=self._log_path)
        # Ray reads the environment when it is imported. The import takes most of a second, which the head needs anyway.
        for name in os.environ.keys() - inherited.keys():
            del os.environ[name]
        os.environ.update(self._environment)
        self.desk.submit(lambda: importlib.import_module("ray") and None)

    def _check_starting(self, now_s: float) -> bool:
        self._check_process()
        if now_s > self._deadline_s:
            raise TimeoutError(f"no answer for {_START_TIMEOUT_S:.0f} s")
        if _STARTED not in self._log_path.read_text(errors="replace"):
            return False
        if not self._has_joined(lambda: _join(self.address)):
            return False
        assert self._process is not None
        self._servers = _find_servers(self._process.pid)
        return True

    def _check_up(self, now_s: float) -> None:
        self._check_process()
        for name, server in self._servers.items():
            if not is_alive(server):  # `ray start` would notice within a second, and end the others gently
                assert self._process is not None
                self._process.kill()
                self._process.wait()
                raise RuntimeError(f"its {name} ended")
        self._ask(now_s)

    def _check_process(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            raise RuntimeError(_fatal_line(self._folder) or last_line(self._log_path) or "its process ended")


def _fatal_line(folder: Path) -> str:
    """Why a server of Ray ended, which `ray start` does not tell; empty if none says."""
    for log in sorted(folder.glob("r/session_2*/logs/*.err")):
        if fatal := _FATAL.search(log.read_text(errors="replace")):
            return f"its {fatal[1]} ended: {fatal[2]}"
    return ""


def _find_servers(process_id: int) -> dict[str, psutil.Process]:
    """Servers among the children of ``ray start``, by name.

    Raises:
        RuntimeError: one has ended.
    """
    children = {}
    for child in psutil.Process(process_id).children():
        with contextlib.suppress(psutil.Error):  # ended by now
            children[child.name()] = child
    for name in _SERVERS:
        if name not in children:
            raise RuntimeError(f"its {name} ended")
    return {name: children[name] for name in _SERVERS}


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[IPv6]:port``.

    Raises:
        ValueError: it is neither.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not an address of Ray; write HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def current_ray_address() -> str:
    """Address of the Ray cluster that `ray start` on this host has started or joined; empty if there is none."""
    try:  # Ray's own reader would import Ray before its settings are known
        folder = os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp"))
        return (Path(folder) / _CURRENT_CLUSTER).read_text().strip()
    except OSError:
        return ""


def _live_nodes() -> list[RayNode]:
    """Nodes of the cluster. Not by ``ray.nodes``, which ends this process if the control store has lost its data."""
    from ray._private.worker import global_worker
    from ray.core.generated.gcs_pb2 import GcsNodeInfo

    found = global_worker.gcs_client.get_all_node_info(timeout=_CALL_S).values()
    return [
        RayNode(
            node_id=node.node_id.hex(),
            address=node.node_manager_address,
            hostname=node.node_manager_hostname,
            resources=dict(node.resources_total),
        )
        for node in found
        if node.state == GcsNodeInfo.ALIVE
    ]


def _own_node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def _own_raylet() -> psutil.Process | None:
    """The process of this host's node; None if it cannot be seen."""
    from ray._private.worker import global_worker

    option = f"--raylet_socket_name={global_worker.node.raylet_socket_name}"
    for process in psutil.process_iter(["name"]):
        with contextlib.suppress(psutil.Error):
            if process.info["name"] == "raylet" and option in process.cmdline():
                return process
    return None


def _join(address: str) -> dict[str, float]:
    """Make this process a driver of the cluster; returns the cluster's resources.

    Raises:
        DeployError: the cluster cannot be reached.
    """
    import ray

    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="critical")
    except (ConnectionError, RuntimeError, ValueError) as error:
        _leave()
        cause = str(error).splitlines()[0]
        raise DeployError(f"cannot connect to Ray at {address}: {cause}; check --ray-address and its token") from error
    return dict(ray.cluster_resources())


def _request_hosts(bundles: Sequence[Mapping[str, float]]) -> None:
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=[dict(bundle) for bundle in bundles])


def _leave() -> None:
    if "ray" in sys.modules:
        import ray

        if ray.is_initialized():
            ray.shutdown()


def _wait_for_answer(has_ended: threading.Event) -> None:
    """Ask with a time limit again and again: other calls of Ray could not be cut short once the cluster has ended."""
    from ray._private.worker import global_worker

    while not has_ended.is_set():
        with contextlib.suppress(Exception):
            global_worker.gcs_client.internal_kv_exists(b"pdserve", None, timeout=_CALL_S)
            return
        has_ended.wait(0.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
