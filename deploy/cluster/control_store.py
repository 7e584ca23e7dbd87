"""Watches the control store of an existing Ray cluster, if it runs on this machine, and keeps it running.

`ray start` does not restart its ``gcs_server``. One that keeps its data (RocksDB or Redis) knows hosts and actors
again, so that nothing is lost if it comes back in time. One that does not would only refuse them, and is left alone.
"""

from __future__ import annotations

import contextlib
import os

import psutil

from pdserve.contracts.errors import DeployError
from pdserve.deploy.cluster.processes import is_alive

RESTART_S = 5.0
"""Time after its end in which `ray stop` ends the rest of Ray."""


class ControlStore:
    def __init__(self, port: int) -> None:
        self._port_option = f"--gcs_server_port={port}"
        self._process: psutil.Process | None = None
        """None if it runs elsewhere, or has ended for good."""
        self._command: list[str] = []
        self._environment: dict[str, str] = {}
        """Empty if it belongs to another user."""
        self._ended_s = 0.0
        self._is_known = False

    def check(self, now_s: float) -> None:
        """Remember the process; start it again, as it was, if it alone has ended and kept its data.

        Raises:
            DeployError: Ray was stopped on this machine.
        """
        if not self._is_known:
            self._is_known = True
            self._find()
        if self._process is None:
            return
        if is_alive(self._process):
            self._ended_s = 0.0
        elif not self._ended_s:
            self._ended_s = now_s
        elif now_s - self._ended_s > RESTART_S:
            self._ended_s = 0.0
            self._process = None
            if not self._has_raylet():
                raise DeployError("it was stopped on this host")
            if self._environment.get("RAY_gcs_storage") == "rocksdb" or "RAY_REDIS_ADDRESS" in self._environment:
                self._restart()

    def _find(self) -> None:
        for process in psutil.process_iter(["name"]):
            with contextlib.suppress(psutil.Error):
                if process.info["name"] == "gcs_server" and self._port_option in (command := process.cmdline()):
                    self._process, self._command = process, command
                    self._environment = process.environ()

    def _restart(self) -> None:
        silent = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
        process_id = os.posix_spawn(
            self._command[0], self._command, self._environment, file_actions=silent, setsid=True
        )
        self._process = psutil.Process(process_id)

    def _has_raylet(self) -> bool:
        """Whether the node of this machine is still there."""
        session = next(each for each in self._command if each.startswith("--session-name=")).split("=")[1]
        for process in psutil.process_iter(["name"]):
            with contextlib.suppress(psutil.Error):
                if process.info["name"] == "raylet" and any(session in each for each in process.cmdline()):
                    return True
        return False
