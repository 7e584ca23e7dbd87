"""Runs a cluster from the first process to the last: starts it, announces it, keeps it serving, ends it.

One loop, `Supervisor.run`, reconciles Ray, the router and the workers in turn. No step of it waits long, so signals
take effect at once. A failure before the cluster serves ends it with a one-line reason; a process that fails later is
restarted after a growing delay. The first SIGINT or SIGTERM drains, a second one cuts the drain short.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import psutil

from pdserve.contracts.errors import DeployError
from pdserve.deploy.checks import preflight
from pdserve.deploy.checks.model import check_model
from pdserve.deploy.cluster.folder import ClusterFolder, ClusterNote
from pdserve.deploy.cluster.processes import end_session, last_line, pin_process, start_tied
from pdserve.deploy.cluster.ray_cluster import PrivateRay, connect_existing, disconnect, num_gpus, worker_resources
from pdserve.deploy.cluster.resources import gpu_shares, gpu_warning, split_cores
from pdserve.deploy.cluster.router_process import RouterProcess
from pdserve.deploy.cluster.worker_process import WorkerProcess, WorkerState, restart_delay_s
from pdserve.deploy.commands.progress import Progress
from pdserve.deploy.launch import WORKER_CLASSES, Launch, router_config, worker_configs
from pdserve.kernels.cpu.build import is_built

START_TIMEOUT_S = 600.0
"""Time after which a cluster that does not serve is given up; loading weights may take minutes."""
RAY_START_TIMEOUT_S = 60.0
ROUTER_CHECK_INTERVAL_S = 2.0
ROUTER_HANG_S = 10.0
"""Time without an answer after which the router is killed and restarted."""
_TICK_S = 0.05
_STOP_WORKERS_S = 3.0
_CLOSE_STREAMS_S = 8.0
_QUESTION = "What is 17 + 25?"  # the demo model answers 42


class Supervisor:
    """Runs one cluster. Use it once, from the main thread."""

    def __init__(self, launch: Launch, progress: Progress) -> None:
        self._launch = launch
        self._progress = progress
        self._cores = sorted(os.sched_getaffinity(0))
        self._split = split_cores(self._cores, launch.roles)
        self._cluster_token = secrets.token_hex(32)
        self._ray_token = secrets.token_hex(32)
        self._num_signals = 0
        self._is_ready = False
        self._folder: ClusterFolder
        self._model_path = Path(launch.config.model.path)
        self._ray: PrivateRay | None = None
        self._ray_deadline_s = 0.0
        self._is_connected = False
        self._router: RouterProcess | None = None
        self._num_router_failures = 0
        self._router_retry_at_s = 0.0
        self._router_alive_s = 0.0
        self._router_checked_s = 0.0
        self._are_targets_due = False
        self._workers: list[WorkerProcess] = []
        self._compiler: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Serve until a signal; returns the exit status: 0, or 1 if the drain was cut short.

        Raises:
            DeployError: the cluster did not start to serve. All its processes have ended.
        """
        launch = self._launch
        preflight.check_resources(launch)
        preflight.check_ray_address(launch)
        preflight.check_cores(launch, len(self._cores))
        preflight.raise_file_limit(launch)
        preflight.check_ports(launch)
        preflight.check_devices(launch, {len(cores) or len(self._cores) for cores in self._split.worker_cores})
        if not launch.config.model.path:
            self._model_path = preflight.demo_model_folder()
        notes = check_model(launch, self._model_path)
        self._folder = ClusterFolder()
        self._take_signals()
        try:
            self._begin(notes)
            while not self._num_signals:
                self._tick()
                time.sleep(_TICK_S)
            return self._drain()
        finally:
            self._end()

    def _take_signals(self) -> None:
        """Install signal handlers at the start, and again after Ray is joined or left, each of which changes them."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._count_signal)

    def _count_signal(self, number: int, frame: FrameType | None) -> None:
        self._num_signals += 1

    def _begin(self, notes: Sequence[str]) -> None:
        """Start every process that does not wait for another.

        Args:
            notes: warnings about the model.
        """
        self._start_deadline_s = time.monotonic() + START_TIMEOUT_S
        if len(self._cores) < len(self._launch.roles):
            self._progress.warn("cores", f"fewer than workers: {len(self._launch.roles)} workers on {len(self._cores)}")
        if warning := preflight.kernel_warning(self._launch):
            self._progress.warn("kernels", warning)
        for note in notes:
            self._progress.warn("model", note)
        if not self._launch.config.model.path:
            self._progress.note("model", "none named: serving the demo model")
        if not self._launch.ray_address:
            self._start_ray()
        self._start_router()
        self._start_compiler()

    def _tick(self) -> None:
        """Reconcile every process once."""
        now_s = time.monotonic()
        self._reconcile_ray(now_s)
        if self._is_connected:
            if not self._workers:
                self._make_workers()
            for worker in self._workers:
                self._reconcile_worker(worker, now_s)
        if self._router is not None:
            self._reconcile_router(self._router, now_s)
            if not self._is_ready and self._router.is_listening and self._router.is_ready():
                with contextlib.suppress(httpx.HTTPError):  # retried at the next tick
                    self._announce(self._router)
        if self._compiler is not None:
            self._reconcile_compiler(self._compiler)
        if not self._is_ready and now_s > self._start_deadline_s:
            raise DeployError(f"the cluster does not serve after {START_TIMEOUT_S:.0f} s; try a smaller model")

    # Ray

    def _start_ray(self) -> None:
        self._ray = PrivateRay(self._folder.path / "ray", len(self._launch.roles), self._ray_token)
        self._ray_deadline_s = time.monotonic() + RAY_START_TIMEOUT_S

    def _reconcile_ray(self, now_s: float) -> None:
        if self._ray is None:
            if not self._is_connected:
                connect_existing(self._launch.ray_address)
                self._join(f"joined {self._launch.ray_address}")
        elif not self._ray.is_running or (not self._is_connected and now_s > self._ray_deadline_s):
            self._replace_ray(self._ray)
        elif not self._is_connected and self._ray.is_started:
            self._ray.connect()
            self._join("private cluster, loopback only")

    def _replace_ray(self, ray: PrivateRay) -> None:
        """Start a new cluster, and all workers in it, after the old one ended."""
        if not self._is_ready:
            raise DeployError(f"Ray did not start: {ray.failure or 'no reason given'}")
        self._progress.warn("ray", "ended; starting it and every worker again")
        ray.stop()
        self._take_signals()
        self._is_connected = False
        for worker in self._workers:
            worker.clear()
        self._are_targets_due = True
        self._start_ray()

    def _join(self, how: str) -> None:
        self._is_connected = True
        self._take_signals()
        self._progress.note("ray", how)

    # Workers

    def _make_workers(self) -> None:
        counted = worker_resources()
        board = str(self._folder.path / "cores")
        configs = worker_configs(self._launch, self._model_path, self._split, self._cores, self._cluster_token, board)
        shares = gpu_shares(configs, num_gpus())
        if text := gpu_warning(configs, shares, num_gpus()):
            self._progress.warn("gpus", text)
        for config, share in zip(configs, shares, strict=True):
            resources = counted | self._launch.phase(config.role).resources
            config = config if share else dataclasses.replace(config, device="cpu")
            self._workers.append(WorkerProcess(config, WORKER_CLASSES[config.role], resources, share))

    def _reconcile_worker(self, worker: WorkerProcess, now_s: float) -> None:
        num_restarts, state = worker.num_restarts, worker.state
        if worker.check(now_s):
            self._are_targets_due = True
        if worker.num_restarts > num_restarts:
            if not self._is_ready:
                raise DeployError(f"{worker.worker_id} did not start: {worker.failure}")
            self._progress.warn(worker.worker_id, f"{worker.failure}; starting it again")
        elif worker.state is WorkerState.UP and state is not WorkerState.UP:
            assert worker.endpoint is not None
            self._progress.note(worker.worker_id, f"up at {worker.endpoint.address}")

    def _start_compiler(self) -> None:
        """Compile the CPU kernels while other processes start; workers wait for them."""
        if self._launch.emulate or preflight.kernel_warning(self._launch) or is_built():
            return
        self._progress.note("kernels", "compiling CPU kernels (once for this machine)")
        command = [sys.executable, "-m", "pdserve.kernels.cpu.build"]
        self._compiler = start_tied(command, env=os.environ, log_path=self._folder.path / "kernels.log")

    def _reconcile_compiler(self, compiler: subprocess.Popen[bytes]) -> None:
        if compiler.poll() is None:
            return
        if compiler.returncode == 0:
            self._progress.note("kernels", "compiled")
        else:
            self._progress.warn("kernels", last_line(self._folder.path / "kernels.log"))
        self._compiler = None

    # The router

    def _start_router(self) -> None:
        config = router_config(self._launch, self._model_path, self._split, len(self._cores), self._cluster_token)
        self._router = RouterProcess(config, self._folder.path / "router.log")

    def _reconcile_router(self, router: RouterProcess, now_s: float) -> None:
        if router.exit_code is not None:
            self._replace_router(router, now_s)
            return
        if not router.is_listening:
            if router.check_listening():
                self._progress.note("router", f"listening at {router.url}")
                self._are_targets_due = True
                self._router_alive_s = now_s
            return
        if self._are_targets_due and now_s - self._router_checked_s >= _TICK_S:
            self._router_checked_s = now_s
            with contextlib.suppress(httpx.HTTPError):  # retried, or the router is found dead
                router.put_targets([worker.endpoint for worker in self._workers if worker.endpoint is not None])
                self._are_targets_due = False
        elif now_s - self._router_checked_s >= ROUTER_CHECK_INTERVAL_S:
            self._router_checked_s = now_s
            if router.is_alive():
                self._router_alive_s = now_s
            elif now_s - self._router_alive_s > ROUTER_HANG_S:
                router.kill()

    def _replace_router(self, router: RouterProcess, now_s: float) -> None:
        """Restart the router after it ended: at once the first time, after a growing delay from then on."""
        if not self._is_ready:
            raise DeployError(f"the router did not start: {router.failure}")
        if self._num_signals:
            return
        if not self._router_retry_at_s:
            self._num_router_failures += 1
            self._router_retry_at_s = now_s + restart_delay_s(self._num_router_failures, 0.5)
            self._progress.warn("router", f"{router.failure}; starting it again")
        if now_s >= self._router_retry_at_s:
            self._router_retry_at_s = 0.0
            router.restart()

    # Ready

    def _announce(self, router: RouterProcess) -> None:
        rows = self._banner_rows(router)
        self._is_ready = True
        self._leave_cores_to_workers(router)
        note = ClusterNote(pid=os.getpid(), url=router.url, admin_url=router.admin_url, model=router.config.served_name)
        self._folder.write_note(note)
        self._progress.banner(rows, curl_command(note))

    def _leave_cores_to_workers(self, router: RouterProcess) -> None:
        """Move the router and Ray's daemons, which started on every core, to the spare cores."""
        if not self._split.spare_cores:
            return
        workers: set[int] = set()
        for worker in self._workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(worker.process_id)
                workers |= {process.pid, *(child.pid for child in process.children(recursive=True))}
        daemons = self._ray.process_ids() if self._ray else []
        for process_id in {router.process_id, *daemons} - workers:
            pin_process(process_id, self._split.spare_cores)

    def _banner_rows(self, router: RouterProcess) -> list[tuple[str, str]]:
        config = self._launch.config
        rows = [("model", f"{router.config.served_name} ({config.model.precision})")]
        if self._launch.emulate:
            rows[0] = ("model", f"{rows[0][1]}, emulated on {self._launch.emulate}")
        workers = router.status()["workers"]
        for role, count in Counter(self._launch.roles).items():
            tokens = sum(
                kv_tokens(worker, config.model.block_size) for worker in workers if worker["role"] == role.value
            )
            rows.append((role.value, f"{count} worker{'s' * (count > 1)}, {tokens:,} tokens of KV cache"))
        rows += [("transport", config.kv_transfer.transport), ("API", f"{router.url}/v1"), ("admin", router.admin_url)]
        return rows

    # The end

    def _drain(self) -> int:
        """Let the router finish its requests within the drain timeout and exit; returns the exit status."""
        router = self._router
        if router is None or not self._is_ready:
            return 0
        self._progress.note("stopping", "finishing what runs; Ctrl-C again cuts it short")
        num_signals = self._num_signals
        deadline_s = time.monotonic() + self._launch.drain_timeout_s + _CLOSE_STREAMS_S
        router.terminate()
        while router.exit_code is None and time.monotonic() < deadline_s and self._num_signals == num_signals:
            self._tick()
            time.sleep(_TICK_S)
        return 0 if router.exit_code == 0 else 1

    def _end(self) -> None:
        """End every process and remove every file, in any state."""
        if self._router is not None:
            self._router.close()
        if self._compiler is not None:
            end_session(self._compiler, 0)
        if self._is_connected:
            self._stop_workers()
        disconnect()
        self._take_signals()
        if self._ray is not None:
            self._ray.stop()
        self._folder.close()

    def _stop_workers(self) -> None:
        import ray

        stopping: list[Any] = [ending for worker in self._workers if (ending := worker.stop()) is not None]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=_STOP_WORKERS_S)


def kv_tokens(worker: dict[str, Any], block_size: int) -> int:
    """Capacity of a worker's KV pool in tokens, from its entry in the router's status."""
    load = worker["load"]
    blocks = load["num_blocks_free"] + load["num_blocks_cached"] + load["num_blocks_referenced"]
    return int(blocks * block_size)


def curl_command(note: ClusterNote) -> str:
    """Example request, as a shell command."""
    body = f'{{"model": "{note.model}", "messages": [{{"role": "user", "content": "{_QUESTION}"}}], "max_tokens": 32}}'
    return f"curl {note.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
