"""A router's process: starts it, watches it, and sends it the lists of workers and routers.

Talks to the router through its admin port, because the port of the API may be that of several. A restarted router keeps
its ports.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx

from pdserve.contracts.codec import to_json, to_plain
from pdserve.contracts.worker_config import WorkerEndpoint
from pdserve.deploy.cluster.processes import end_session, last_error, start_tied
from pdserve.deploy.cluster.supervised_process import SupervisedProcess
from pdserve.deploy.config import override
from pdserve.router.process_config import RouterProcessConfig
from pdserve.router.requests.demand import Demand

CHECK_INTERVAL_S = 2.0
HANG_S = 10.0
"""Time without an answer after which the router is killed and restarted."""
_HTTP_TIMEOUT_S = 2.0
_NO_KEEPALIVE = httpx.Limits(max_keepalive_connections=0)


class RouterProcess(SupervisedProcess):
    def __init__(self, config: RouterProcessConfig, folder: Path) -> None:
        """``folder``: of its log."""
        super().__init__(f"router-{config.replica}" if config.router.replicas > 1 else "router")
        self.config = config
        """Its ports are those in use once the router is up."""
        self.are_lists_due = False
        """Whether `put_lists` has something new to tell the router."""
        self._log_path = folder / f"{self.name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        # The admin port has no TLS, and loading certificates takes longer than an answer.
        self._http = httpx.Client(timeout=_HTTP_TIMEOUT_S, limits=_NO_KEEPALIVE, trust_env=False, verify=False)
        self._checked_s = self._alive_s = 0.0

    @property
    def address(self) -> str:
        """URL of the API for this machine."""
        router = self.config.router
        return _url(router.host, router.port, "https" if router.tls_certificate else "http")

    @property
    def admin_url(self) -> str:
        return _url(self.config.router.admin_host, self.config.router.admin_port)

    def take_ports(self, port: int, admin_port: int) -> None:
        """Have these from now on."""
        deployment = override(self.config.deployment, "router", port=port, admin_port=admin_port)
        self.config = replace(self.config, deployment=deployment)

    @property
    def process_id(self) -> int:
        """0 unless it has been started."""
        return self._process.pid if self._process else 0

    @property
    def exit_code(self) -> int | None:
        """Exit code; ``None`` while the router runs."""
        return self._process.poll() if self._process else None

    def put_lists(self, endpoints: Sequence[WorkerEndpoint], admin_ports: Sequence[int]) -> None:
        """Replace the router's lists of workers and routers; they are due until it has accepted both."""
        lists = {"workers": to_plain(list(endpoints)), "routers": list(admin_ports)}
        with suppress(httpx.HTTPError):
            self.are_lists_due = not all(
                self._http.put(f"{self.admin_url}/{name}", json=body, headers=self._admin_headers()).is_success
                for name, body in lists.items()
            )

    def demand(self) -> Demand | None:
        """The work that its requests bring; None if it does not answer."""
        try:
            answer = self._http.get(f"{self.admin_url}/demand", headers=self._admin_headers())
            return Demand(**answer.raise_for_status().json())
        except (httpx.HTTPError, ValueError, TypeError):
            return None

    def count_change(self, reason: str) -> None:
        """Have it count a change of the numbers of workers, unless it does not answer."""
        with suppress(httpx.HTTPError):
            self._http.put(f"{self.admin_url}/scaled", params={"reason": reason}, headers=self._admin_headers())

    def is_ready(self) -> bool:
        """True if both phases have answered a real request. Asks the admin port: ``/health`` may need an API key."""
        try:
            answer = self._http.get(f"{self.admin_url}/status", headers=self._admin_headers())
            return answer.is_success and bool(answer.json()["ready"])
        except httpx.HTTPError:
            return False

    def _admin_headers(self) -> dict[str, str]:
        token = self.config.admin_token
        return {"Authorization": f"Bearer {token}"} if token else {}

    def terminate(self) -> None:
        """Ask the router to drain and exit; a second call makes it exit at once."""
        if self._process is not None:
            self._process.terminate()

    def end(self) -> None:
        if self._process is not None:
            end_session(self._process, 0)
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None  # another session may have its number later

    def _start(self) -> None:
        command = [sys.executable, "-P", "-m", "pdserve.router", "--config", "-"]
        self._process = start_tied(command, env=os.environ, log_path=self._log_path, with_pipes=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # By stdin: every user of the machine can read a command line, and the configuration holds the cluster's token.
        self._process.stdin.write(to_json(self.config).encode() + b"\n")
        self._process.stdin.close()
        os.set_blocking(self._process.stdout.fileno(), False)

    def _check_starting(self, now_s: float) -> bool:
        self._check_exit()
        assert self._process is not None
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            addresses = json.loads(line)
            self.take_ports(addresses["port"], addresses["admin_port"])
            self._checked_s = self._alive_s = now_s
        return bool(line)

    def _check_up(self, now_s: float) -> None:
        self._check_exit()
        if now_s - self._checked_s < CHECK_INTERVAL_S:
            return
        self._checked_s = now_s
        if self._answers():
            self._alive_s = now_s
        elif now_s - self._alive_s > HANG_S:
            raise TimeoutError(f"no answer for {HANG_S:.0f} s")

    def _check_exit(self) -> None:
        code = self.exit_code
        if code is None:
            return
        if code < 0:
            raise RuntimeError(f"killed by {signal.Signals(-code).name}")
        reason = last_error(self._log_path).removeprefix("python -m pdserve.router: ")
        raise RuntimeError(reason or f"ended with exit code {code}")

    def _answers(self) -> bool:
        try:
            return self._http.get(f"{self.admin_url}/workers", headers=self._admin_headers()).is_success
        except httpx.HTTPError:
            return False


def _url(host: str, port: int, scheme: str = "http") -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
