"""The Ray actor around a worker: prepares its process, then imports and runs the worker class in it.

The supervisor creates one per seat. It names the worker's class by its path, so that the supervisor's process never
imports an engine, and so that cores and thread settings are in place before torch is loaded.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Sequence
from typing import Any


class WorkerHost:
    """Runs one worker in this process. Ray calls its methods, from several threads."""

    def __init__(self, class_path: str, config: dict[str, Any], *, wait_passively: bool) -> None:
        """Pin this process, then create the worker.

        Args:
            class_path: ``package.module:Class``, which takes ``config``.
            config: a `pdserve.contracts.placement.WorkerConfig` as JSON values.
            wait_passively: OpenMP threads sleep rather than spin, because other workers share the cores.
        """
        _pin_every_thread(config["cpu_cores"])
        if config["cpu_cores"]:
            os.environ["OMP_NUM_THREADS"] = str(len(config["cpu_cores"]))
        if wait_passively:
            os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        module, _, name = class_path.partition(":")
        self._worker = getattr(importlib.import_module(module), name)(config)

    def process_id(self) -> int:
        return os.getpid()

    def start(self) -> dict[str, Any]:
        """Load the model and listen; returns the `WorkerEndpoint` as JSON values. May take minutes."""
        endpoint: dict[str, Any] = self._worker.start()
        return endpoint

    def ping(self) -> int:
        """The worker's epoch, as a sign of life."""
        epoch: int = self._worker.ping()
        return epoch

    def drain(self, timeout_s: float) -> None:
        """Take nothing new and let what runs finish, for ``timeout_s`` at most."""
        self._worker.drain(timeout_s)

    def stop(self) -> None:
        """Release everything; the process ends next."""
        self._worker.stop()


def _pin_every_thread(cores: Sequence[int]) -> None:
    """Pin the process: an affinity belongs to a thread, and any of Ray's threads may be the one that runs us."""
    if not cores:
        return
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)
