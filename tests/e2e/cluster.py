"""Starts a whole cluster as a user would, with `pdserve up FILE`, and checks what it leaves behind."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from pdserve.deploy.cluster.folder import admin_headers
from pdserve.deploy.cluster.processes import is_alive
from pdserve.engine.worker.scheduler import DEFAULT_PARK_TIMEOUT_S
from tests.patience import HANG_S


@dataclass
class Cluster:
    process: subprocess.Popen[bytes]
    url: str
    admin_url: str
    banner: str

    def status(self) -> dict[str, Any]:
        """Status of the workers in the router's view."""
        status: dict[str, Any] = _get(f"{self.admin_url}/status", admin_headers(self.admin_url)).json()
        return status

    def num_guesses(self) -> int:
        """Tokens that the workers guessed since each started."""
        return sum(worker["load"]["num_guesses"] for worker in self.status()["workers"])

    def processes(self) -> list[psutil.Process]:
        """All live processes of the cluster."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def worker_pid(self, worker_id: str) -> int:
        """Process id of a worker, by its Ray process title."""
        for process in self.processes():
            if any(worker_id in word for word in _cmdline(process)[:1]):
                return process.pid
        raise LookupError(f"no {worker_id} among {[_cmdline(p)[:1] for p in self.processes()]}")

    def wait_until_idle(self) -> None:
        """Wait until no request is in flight and no worker references a KV block.

        Raises:
            TimeoutError: it takes so long that parked KV may have expired; the message is the last status.
        """
        start = time.monotonic()
        while True:
            status = self.status()
            if status["in_flight"] == 0 and all(w["load"]["num_blocks_referenced"] == 0 for w in status["workers"]):
                return
            if time.monotonic() - start > DEFAULT_PARK_TIMEOUT_S / 2:
                raise TimeoutError(json.dumps(status))
            time.sleep(0.05)

    def wait_until_healthy(self, timeout_s: float = HANG_S) -> None:
        """Wait for ``/health`` to answer 200."""
        deadline = time.monotonic() + timeout_s
        while _get(f"{self.url}/health").status_code != 200:
            if time.monotonic() > deadline:
                raise TimeoutError("the cluster did not become healthy again")
            time.sleep(0.1)


def _get(url: str, headers: dict[str, str] | None = None) -> httpx.Response:
    """GET without loading HTTPS certificates, which takes longer than an answer."""
    return httpx.get(url, headers=headers, timeout=HANG_S, verify=False)


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def wait_for_banner(process: subprocess.Popen[bytes], log: Path) -> str:
    """Return the output of `pdserve up` up to its banner's last line, the curl command."""
    deadline = time.monotonic() + HANG_S
    while not (lines := log.read_text().splitlines()) or not lines[-1].startswith("curl "):
        assert process.poll() is None, f"`pdserve up` ended with {process.returncode}:\n{log.read_text()}"
        assert time.monotonic() < deadline, f"`pdserve up` is not ready:\n{log.read_text()}"
        time.sleep(0.05)
    return "\n".join(lines)


@contextmanager
def running_cluster(folder: Path, deployment: dict[str, Any]) -> Iterator[Cluster]:
    """Run `pdserve up` on free ports and stop it with SIGINT; its exit code must be 0 and nothing may be left."""
    deployment = {**deployment, "router": {"port": 0, "admin_port": 0, **deployment.get("router", {})}}
    file = folder / "deployment.yaml"
    file.write_text(json.dumps(deployment))
    log = folder / "up.log"
    command = [str(Path(sys.executable).with_name("pdserve")), "up", str(file)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        banner = wait_for_banner(process, log)
        urls = re.findall(r"http://[\w.\-]+:\d+", banner)
        public = next(url for url in urls if _get(f"{url}/live").status_code == 200)
        admin = next(url for url in urls if url != public)
        yield Cluster(process, public, admin, banner)
    except BaseException:
        process.terminate()
        process.wait(HANG_S)
        raise
    stop_and_check(process, log)


def stop_and_check(process: subprocess.Popen[bytes], log: Path) -> None:
    """Send SIGINT; then the exit code is 0, and no process of the cluster is alive from then on."""
    members = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    assert process.wait(HANG_S) == 0, log.read_text()
    left_behind = [_cmdline(member) for member in members if is_alive(member)]
    assert not left_behind, left_behind
