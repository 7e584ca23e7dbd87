"""Clusters started by the command line, for tests: real processes, and a list of those that remain."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

from pdserve.deploy.cluster.folder import admin_headers
from pdserve.deploy.cluster.processes import is_alive
from tests.patience import HANG_S

CLI = (sys.executable, "-m", "pdserve.deploy.cli")
Result = TypeVar("Result")


def pdserve(*arguments: str, timeout_s: float = HANG_S, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run one command of the CLI to its end."""
    command = [*CLI, *arguments]
    env = {**os.environ, "COLUMNS": "120", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=env, check=False)


def wait_for(condition: Callable[[], Result], what: str) -> Result:
    """Return the first true result of ``condition``."""
    deadline_s = time.monotonic() + HANG_S
    while not (result := condition()):
        assert time.monotonic() < deadline_s, f"still waiting for {what}"
        time.sleep(0.05)
    return result


def _get(url: str) -> httpx.Response:
    """GET without loading HTTPS certificates, which takes longer than an answer."""
    return httpx.get(url, trust_env=False, verify=False)


class UpProcess:
    """``pdserve up`` as a child process of the test."""

    def __init__(
        self,
        log_path: Path,
        *arguments: str,
        program: Sequence[str] = CLI,
        folder: Path | None = None,
        **environment: str,
    ) -> None:
        command = [*program, "up", "--port", "0", *arguments]
        self._log_path = log_path
        env = {**os.environ, **environment}
        with log_path.open("w") as log:
            self.process = psutil.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=folder, start_new_session=True
            )
        self.family: set[psutil.Process] = set()

    @property
    def lines(self) -> list[str]:
        """Lines written so far."""
        return self._log_path.read_text().splitlines()

    def wait_ready(self) -> str:
        """Wait for the banner; returns its last line, the command to try."""

        def last_line() -> str:
            assert self.process.poll() is None, self.lines
            return next((line for line in self.lines if line.startswith("curl ")), "")

        return wait_for(last_line, "the banner")

    def banner(self, name: str) -> str:
        """Value of the banner's row ``name``."""
        return next(line.split(maxsplit=1)[1] for line in self.lines if line.split()[:1] == [name])

    @property
    def admin_url(self) -> str:
        return self.banner("admin")

    def status(self) -> dict[str, Any]:
        headers = admin_headers(self.admin_url)
        answer = httpx.get(f"{self.admin_url}/status", headers=headers, trust_env=False, verify=False)
        status: dict[str, Any] = answer.raise_for_status().json()
        return status

    def is_ready(self) -> bool:
        """True if the API reports that it serves."""
        try:
            return _get(f"{self.banner('API').removesuffix('/v1')}/health").is_success
        except httpx.HTTPError:
            return False

    def members(self, text: str) -> list[psutil.Process]:
        """Processes whose name or command line contains ``text``; `leftovers` remembers every one."""
        found = self.process.children(recursive=True)
        self.family.update(found)
        return [process for process in found if text in _description(process)]

    def leftovers(self) -> list[psutil.Process]:
        """Processes returned by `members` that still run."""
        return [process for process in self.family if is_alive(process)]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, unless it has ended already, and wait for the end; returns the exit code."""
        if self.process.poll() is None:
            self.members("")
            self.process.send_signal(number)
        return int(self.process.wait(HANG_S))


@contextmanager
def running_up(folder: Path, deployment: str, *arguments: str) -> Iterator[UpProcess]:
    """``pdserve up`` of a deployment file with this text, once it is ready; it must end well and leave nothing."""
    path = folder / "deployment.yaml"
    path.write_text(deployment)
    up = UpProcess(folder / "log", str(path), *arguments)
    try:
        up.wait_ready()
        yield up
    finally:
        assert up.stop() == 0, "\n".join(up.lines)
        assert up.leftovers() == []


def _description(process: psutil.Process) -> str:
    """Name and command line; empty if the process has ended meanwhile."""
    try:
        return f"{process.name()} {' '.join(process.cmdline())}"
    except psutil.NoSuchProcess:
        return ""
