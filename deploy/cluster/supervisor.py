"""Runs a cluster from the first process to the last: starts it, announces it, keeps it serving, ends it.

One loop, `Supervisor.run`, reconciles Ray, the router and the workers in turn. No step of it waits long, so signals
take effect at once. A failure before the cluster serves ends it with a one-line reason; a process that fails later is
restarted after a growing delay. The first SIGINT or SIGTERM drains, a second one cuts the drain short.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from pdserve.contracts.errors import DeployError
from pdserve.contracts.worker_config import WorkerRole
from pdserve.deploy.checks import preflight
from pdserve.deploy.checks.model import NO_CHAT_TEMPLATE, check_model
from pdserve.deploy.cluster.autoscaling import Autoscaling
from pdserve.deploy.cluster.banner import banner_rows
from pdserve.deploy.cluster.changes import Changes
from pdserve.deploy.cluster.control import ControlPort
from pdserve.deploy.cluster.fleet import Fleet
from pdserve.deploy.cluster.folder import ClusterNote, cluster_folder, make_admin_token, write_note
from pdserve.deploy.cluster.hosts import Host
from pdserve.deploy.cluster.processes import end_session, last_line, pin_process, start_tied
from pdserve.deploy.cluster.ray_cluster import ExistingRay, PrivateRay, RayCluster
from pdserve.deploy.cluster.ray_desk import SILENT_S, RayDesk
from pdserve.deploy.cluster.router_process import RouterProcess
from pdserve.deploy.cluster.supervised_process import ProcessState, SupervisedProcess
from pdserve.deploy.cluster.worker_process import MIN_START_TIMEOUT_S, WorkerProcess
from pdserve.deploy.commands.progress import Progress
from pdserve.deploy.commands.status import fetch_status
from pdserve.deploy.launch import Launch, router_configs
from pdserve.kernels.cpu.build import is_built
from pdserve.model.weights.demo_model import DEMO_MODEL

START_TIMEOUT_S = 600.0
"""Time after which a cluster that does not serve is given up; loading weights may take minutes."""
_READ_BYTES_PER_S = 100e6
"""Slowest disk on which a worker that reads its weights does not count as hung."""
_TICK_S = 0.05
_STOP_WORKERS_S, _CLEAR_HOSTS_S = 3.0, 1.0
_CLOSE_STREAMS_S = 8.0
_LOST = (
    "ray: it has lost this cluster: its control store came back without data, or the node of this host has ended; "
    "start Ray on every host, then this cluster"
)
_QUESTION = "What is 17 + 25?"  # the demo model answers 42


class Supervisor:
    """Runs one cluster. Use it once, from the main thread."""

    def __init__(self, launch: Launch, progress: Progress) -> None:
        self._launch = launch
        self._progress = progress
        self._cluster_token = secrets.token_hex(32)
        self._num_signals = 0
        self._signals = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # it is under nohup
            self._signals.append(signal.SIGHUP)
        self._is_ready = False
        self._is_note_due = False
        """True while the cluster's note could not be written."""
        self._has_chat = True
        self._folder: Path
        self._desk = RayDesk()
        self._ray: RayCluster
        self._is_silent = False
        """True while Ray does not answer."""
        self._routers: list[RouterProcess]
        self._fleet: Fleet
        self._waits_for = ""
        """What the placement of the workers waits for."""
        self._compiler: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Serve until a signal; returns the exit status: 0, or 1 if the drain was cut short.

        Raises:
            DeployError: the cluster did not start to serve, or was lost by Ray. All its processes have ended.
        """
        launch = self._launch
        preflight.check_launch(launch)
        model_warning = check_model(launch)
        self._has_chat = NO_CHAT_TEMPLATE not in model_warning
        with cluster_folder(elsewhere=launch.tier_paths) as self._folder:
            self._take_signals()
            write_note(self._folder, ClusterNote(pid=os.getpid(), folder=str(self._folder)))
            token_file = launch.config.router.admin_token_file or self._folder / "admin_token"
            self._admin_token_file = Path(token_file).absolute()
            self._admin_token = make_admin_token(self._admin_token_file)
            configs = router_configs(launch, self._cluster_token, self._admin_token)
            self._routers = [RouterProcess(config, self._folder) for config in configs]
            if launch.ray_address:
                self._ray = ExistingRay(self._desk, launch.ray_address)
            else:
                ray_token = secrets.token_hex(32)
                self._ray = PrivateRay(self._desk, self._folder / "ray", len(launch.roles), ray_token)
            self._fleet = Fleet(self._ray, launch, self._cluster_token, self._folder)
            self._control = ControlPort(self._folder)
            self._changes = Changes(self._fleet, launch.drain_timeout_s, self._tell_of_workers)
            self._autoscaling = Autoscaling(launch, self._fleet, self._changes)
            try:
                self._begin(model_warning)
                while not self._num_signals and not self._ray.is_lost:
                    self._tick()
                    time.sleep(_TICK_S)
                is_lost = not self._num_signals
                self._num_signals += is_lost  # it ends as by a signal
                status = self._drain()
                if is_lost:
                    raise DeployError(_LOST)
                return status
            finally:
                self._end()

    def _take_signals(self) -> None:
        """Install signal handlers at the start, and again after Ray is joined or left, each of which changes them."""
        for number in self._signals:
            signal.signal(number, self._count_signal)

    def _count_signal(self, number: int, frame: FrameType | None) -> None:
        self._num_signals += 1

    def _begin(self, model_warning: str) -> None:
        """Show warnings, and start every process that does not wait for another."""
        launch = self._launch
        files = Path(launch.config.model.path).glob("*.safetensors")
        self._read_s = sum(file.stat().st_size for file in files) / _READ_BYTES_PER_S
        self._start_timeout_s = START_TIMEOUT_S + self._read_s
        self._start_deadline_s = time.monotonic() + self._start_timeout_s
        cores, kernels = preflight.core_warning(launch), preflight.kernel_warning(launch)
        for name, warning in (("cores", cores), ("kernels", kernels), ("model", model_warning)):
            if warning:
                self._progress.warn(name, warning)
        if Path(launch.config.model.path) == DEMO_MODEL:
            self._progress.note("model", "serving the demo model; --model FOLDER serves another")
        self._reconcile_processes()
        if not (launch.emulate or kernels or is_built()):  # workers wait for them
            self._progress.note("kernels", "compiling CPU kernels (once for this machine)")
            command = [sys.executable, "-P", "-m", "pdserve.kernels.cpu.build"]
            self._compiler = start_tied(command, env=os.environ, log_path=self._folder / "kernels.log")

    def _tick(self) -> None:
        self._reconcile_processes()
        if self._compiler is not None:
            self._reconcile_compiler(self._compiler)
        if self._is_ready and (said := self._control.turn(self._begin_change)):
            self._progress.note("change", said)
        up = [router for router in self._routers if router.state is ProcessState.UP]
        self._follow_load(up)
        if self._is_note_due:
            self._write_note()
        for router in up:
            if router.are_lists_due:
                endpoints = [endpoint for worker in self._workers for endpoint in worker.endpoints]
                router.put_lists(endpoints, [each.config.router.admin_port for each in up])
        has_worker = any(worker.state is ProcessState.UP for worker in self._workers)  # without one no router is ready
        if not self._is_ready and has_worker and up == self._routers and all(router.is_ready() for router in up):
            with contextlib.suppress(DeployError):  # retried at the next tick
                self._announce()
        if not self._is_ready and time.monotonic() > self._start_deadline_s:
            reason = f"hosts: {self._waits_for}" if self._waits_for else "try a smaller model"
            raise DeployError(f"the cluster does not serve after {self._start_timeout_s:.0f} s; {reason}")

    def _follow_load(self, routers: list[RouterProcess]) -> None:
        """Begin the change that the load asks for, if any."""
        may_change = self._is_ready and not self._num_signals and not self._is_silent and routers == self._routers
        if may_change and self._ray.state is ProcessState.UP:
            change = self._autoscaling.turn(time.monotonic(), routers, is_busy=self._control.is_busy)
            if change is not None:
                self._control.begin(change)

    def _reconcile_processes(self) -> None:
        """Check every process once."""
        if self._workers or not self._launch.ray_address:  # routers predict with the devices of the hosts
            self._reconcile_routers()
        self._reconcile(self._ray)
        if self._workers and self._desk.is_silent is not self._is_silent:
            self._report_silence()
        if self._ray.state is not ProcessState.UP or self._ray.is_lost:
            return
        for host in self._fleet.find_hosts():
            self._progress.warn(host.name, "it has left Ray")
        for host in self._fleet.hosts:
            self._reconcile(host)
        if not self._workers:
            self._place_workers()
        for worker in self._workers:
            if worker.state is not ProcessState.STOPPED or self._fleet.has_host(worker):
                self._reconcile(worker)

    def _reconcile_routers(self) -> None:
        first = self._routers[0]
        for router in self._routers:
            if router.exit_code is not None and self._num_signals:
                continue  # it was asked to end
            if not router.config.router.port:
                router.take_ports(first.config.router.port, router.config.router.admin_port)
            if router is first or router.config.router.port:  # 0: the first one picks the port of all
                self._reconcile(router)

    def _reconcile(self, process: SupervisedProcess) -> None:
        """Check a process, and report it if it came up or failed."""
        before = process.state, process.num_failures
        process.check(time.monotonic())
        if process.state is ProcessState.STARTING or (process.state, process.num_failures) == before:
            return
        self._take_signals()
        self._tell_of_workers()
        if process.state is ProcessState.UP:
            self._progress.note(process.name, f"up at {process.address}")
            if isinstance(process, Host) and process.warning and not self._launch.emulate:
                self._progress.warn(process.name, process.warning)
            return
        if not self._is_ready:
            raise DeployError(f"{process.name} did not start: {process.failure}")
        if process is self._ray and (self._launch.ray_address or self._desk.is_silent):
            call = " while a call to it hung" if self._desk.is_silent else ""
            raise DeployError(f"{process.name}: {process.failure}{call}; start the cluster again")
        self._warn_of_failure(process)
        if isinstance(process, Host):
            for worker in self._fleet.abandon_starts(process):
                self._warn_of_failure(worker)
        if process is self._ray:
            self._fleet.clear()

    def _warn_of_failure(self, process: SupervisedProcess) -> None:
        self._progress.warn(process.name, f"{process.failure}; starting it again")

    def _begin_change(self, command: dict[str, Any]) -> Iterator[str]:
        """Begin what a command of `pdserve.deploy.commands.change` asks for."""
        if self._ray.state is not ProcessState.UP or self._is_silent or self._ray.is_lost:
            raise DeployError("Ray does not answer; try again when pdserve status shows that it does")
        match command:
            case {"scale": dict(replicas)}:
                return self._changes.scale({WorkerRole(role): count for role, count in replicas.items()})
            case {"preview": dict(replicas)}:
                return self._changes.preview({WorkerRole(role): count for role, count in replicas.items()})
            case {"drain": list(names)}:
                return self._changes.drain(names)
            case {"restart": list(names)}:
                return self._changes.restart(names)
        raise DeployError("the cluster is of another version, which does not know this command")

    def _tell_of_workers(self) -> None:
        """Have routers and the note of the cluster know the workers as they are now."""
        for router in self._routers:
            router.are_lists_due = True
        if self._is_ready:
            self._write_note()

    def _report_silence(self) -> None:
        self._is_silent = self._desk.is_silent
        if self._is_silent:
            self._progress.warn("ray", f"no answer for {SILENT_S:.0f} s; requests are served, nothing is restarted")
        else:
            self._progress.note("ray", "answers again")
        if self._is_ready:
            self._write_note()

    def _write_note(self) -> None:
        first, *others = self._routers
        note = ClusterNote(
            pid=os.getpid(),
            url=first.address,
            admin_url=first.admin_url,
            other_admin_urls=tuple(router.admin_url for router in others),
            folder=str(self._folder),
            admin_token_file=str(self._admin_token_file),
            follows_load=self._autoscaling.is_on,
            is_ray_silent=self._is_silent,
            down_since_s={
                worker.name: worker.failed_s
                for worker in self._workers
                if worker.num_failures and worker.state is not ProcessState.UP
            },
        )
        try:
            write_note(self._folder, note)
        except DeployError as error:  # the disk may be full for a while
            if not self._is_note_due:
                self._progress.warn("folder", f"{error}; until then pdserve status may be out of date")
            self._is_note_due = True
        else:
            self._is_note_due = False

    @property
    def _workers(self) -> list[WorkerProcess]:
        """Empty until Ray and enough hosts are up."""
        return self._fleet.workers

    def _place_workers(self) -> None:
        waits_for = self._fleet.place_workers(MIN_START_TIMEOUT_S + self._read_s)
        is_settled = not any(host.state is ProcessState.STARTING for host in self._fleet.hosts)
        if waits_for != self._waits_for and (is_settled or not waits_for):
            self._waits_for = waits_for
            if waits_for:
                self._progress.note("hosts", waits_for)
        if self._workers and self._launch.ray_address:
            configs = router_configs(self._launch, self._cluster_token, self._admin_token, self._fleet.launches)
            for router, config in zip(self._routers, configs, strict=True):
                router.config = config

    def _reconcile_compiler(self, compiler: subprocess.Popen[bytes]) -> None:
        if compiler.poll() is None:
            return
        if compiler.returncode == 0:
            self._progress.note("kernels", "compiled")
        else:
            self._progress.warn("kernels", last_line(self._folder / "kernels.log"))
        self._compiler = None

    def _announce(self) -> None:
        """Show the banner and publish the addresses.

        Raises:
            DeployError: the router does not answer.
        """
        config, router = self._launch.config, self._routers[0]
        self._write_note()  # has the token that `fetch_status` sends
        workers = fetch_status(router.admin_url)["workers"]
        self._is_ready = True
        self._leave_cores_to_workers()
        name = router.config.deployment.model.served_name
        rows = banner_rows(self._fleet.launches[0], name, workers)
        rows.append(("API", f"{router.address}/v1"))
        if config.router.page:
            rows.append(("page", f"{router.address}/"))
        rows.append(("admin", ", ".join(router.admin_url for router in self._routers)))
        needs_key = bool(config.router.keys_file)
        command = curl_command(router.address, name, needs_key, has_chat=self._has_chat)
        self._progress.banner(rows, command)

    def _leave_cores_to_workers(self) -> None:
        """Move the router and Ray's daemons, which started on every core, to the spare cores."""
        launch = self._fleet.launches[0]
        if self._launch.ray_address or not (spare_cores := launch.split.spare_cores):
            return
        workers: set[int] = set()
        for worker in self._workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(worker.process_id)
                workers |= {process.pid, *(child.pid for child in process.children(recursive=True))}
        daemons = self._ray.process_ids if isinstance(self._ray, PrivateRay) else []
        for process_id in {*(router.process_id for router in self._routers), *daemons} - workers:
            pin_process(process_id, spare_cores)

    def _drain(self) -> int:
        """Let the router finish its requests within the drain timeout and exit; returns the exit status."""
        if not self._is_ready:
            return 0
        self._progress.note("stopping", "finishing running requests; Ctrl-C again ends them")
        deadline_s = time.monotonic() + self._launch.drain_timeout_s + _CLOSE_STREAMS_S
        drained = [router for router in self._routers if router.state is ProcessState.UP]
        for router in self._routers:
            router.terminate()
        while self._num_signals < 2 and time.monotonic() < deadline_s:  # both may have come before
            if all(router.exit_code is not None for router in self._routers):
                break
            self._tick()
            time.sleep(_TICK_S)
        return 0 if all(router.exit_code == 0 for router in drained) else 1

    def _end(self) -> None:
        """End every process, in any state."""
        self._control.close()
        for router in self._routers:
            router.end()
        if self._compiler is not None:
            end_session(self._compiler, 0)
        can_stop = not (self._desk.is_stuck or self._ray.is_lost)
        if can_stop:
            futures.wait([ending for each in self._workers if (ending := each.stop()) is not None], _STOP_WORKERS_S)
            futures.wait([ending for each in self._fleet.hosts if (ending := each.clear()) is not None], _CLEAR_HOSTS_S)
        if not can_stop:
            for worker in self._workers:
                worker.kill()
        self._ray.end()
        self._take_signals()


def curl_command(url: str, model: str, needs_key: bool, *, has_chat: bool = True) -> str:
    """Example request, as a shell command."""
    prompt = f'"messages": [{{"role": "user", "content": "{_QUESTION}"}}]' if has_chat else f'"prompt": "{_QUESTION}"'
    body = f'{{"model": "{model}", {prompt}, "max_tokens": 32}}'
    options = " -k" if url.startswith("https") else ""
    options += ' -H "Authorization: Bearer $PDSERVE_API_KEY"' if needs_key else ""
    path = "/v1/chat/completions" if has_chat else "/v1/completions"
    return f"curl{options} {url}{path} -H 'Content-Type: application/json' -d '{body}'"
