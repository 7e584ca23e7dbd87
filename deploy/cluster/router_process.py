"""The router's process: starts it, sends it the list of workers, and restarts it on the same ports.

The supervisor calls it from its loop. Talks to the router through the admin port only.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from pdserve.contracts.codec import to_json, to_plain
from pdserve.contracts.placement import WorkerEndpoint
from pdserve.deploy.cluster.processes import end_session, last_error, start_tied
from pdserve.router.process_config import RouterProcessConfig

_ADMIN_TIMEOUT_S = 2.0


class RouterProcess:
    """One router, which may run several processes."""

    def __init__(self, config: RouterProcessConfig, log_path: Path) -> None:
        """Start the router without waiting for it."""
        self.config = config
        self.is_listening = False
        """True once the addresses are known; `url` and `admin_url` are valid from then on."""
        self._log_path = log_path
        self._http = httpx.Client(timeout=_ADMIN_TIMEOUT_S, trust_env=False)
        self._start()

    @property
    def url(self) -> str:
        """Address of the API for this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.config.host, self.config.host)
        return f"http://{host}:{self.config.port}"

    @property
    def admin_url(self) -> str:
        return f"http://{self.config.admin_host}:{self.config.admin_port}"

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code; ``None`` while the router runs."""
        return self._process.poll()

    @property
    def failure(self) -> str:
        """Reason why the router ended, in one line."""
        if self.exit_code is not None and self.exit_code < 0:
            return f"killed by {signal.Signals(-self.exit_code).name}"
        reason = last_error(self._log_path).removeprefix("python -m pdserve.router: ")
        return reason or f"ended with exit code {self.exit_code}"

    def check_listening(self) -> bool:
        """Return True once the router listens. Records its addresses and keeps the ports for restarts."""
        assert self._process.stdout is not None
        if not self.is_listening and (line := self._process.stdout.readline()):
            addresses: dict[str, Any] = json.loads(line)
            self.config = dataclasses.replace(self.config, port=addresses["port"], admin_port=addresses["admin_port"])
            self.is_listening = True
        return self.is_listening

    def put_targets(self, endpoints: Sequence[WorkerEndpoint]) -> None:
        """Replace the router's list of workers.

        Raises:
            httpx.HTTPError: the router does not answer, or refuses.
        """
        fields = to_plain(list(endpoints))
        self._http.put(f"{self.admin_url}/targets", json=fields).raise_for_status()

    def status(self) -> dict[str, Any]:
        """Report requests and workers, from the admin port.

        Raises:
            httpx.HTTPError: the router does not answer.
        """
        answer: dict[str, Any] = self._http.get(f"{self.admin_url}/status").raise_for_status().json()
        return answer

    def is_ready(self) -> bool:
        """True if both phases have answered a real request."""
        try:
            return self._http.get(f"{self.url}/health").status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def is_alive(self) -> bool:
        """True if the router answers at all."""
        try:
            return self._http.get(f"{self.url}/live").status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def terminate(self) -> None:
        """Ask the router to drain and exit; a second call makes it exit at once."""
        if self.exit_code is None:
            self._process.terminate()

    def restart(self) -> None:
        """End the rest of the router and start it again at the same addresses."""
        self._end()
        self.is_listening = False
        self._start()

    def kill(self) -> None:
        """Kill a router that hangs."""
        self._process.kill()

    def close(self) -> None:
        """End the router if it still runs."""
        self._end()
        self._http.close()

    def _end(self) -> None:
        end_session(self._process, 0)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _start(self) -> None:
        command = [sys.executable, "-m", "pdserve.router", "--config", "-"]
        self._process: subprocess.Popen[bytes] = start_tied(
            command, env=os.environ, log_path=self._log_path, with_pipes=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # By stdin: every user of the machine can read a command line, and the configuration holds the cluster's token.
        self._process.stdin.write(to_json(self.config).encode() + b"\n")
        self._process.stdin.close()
        os.set_blocking(self._process.stdout.fileno(), False)
