"""The life cycle of a worker as Ray sees it; the phases' actors derive from it.

Ray starts, asks after and ends a worker through these methods, and carries no token and no KV. The class is plain:
whoever deploys it decorates it with ``ray.remote``, gives it ``num_cpus=0``, and a ``max_concurrency`` of 2 at least,
so that `ping` answers while `drain` waits.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pdserve.contracts.codec import from_plain, to_plain
from pdserve.contracts.placement import WorkerConfig
from pdserve.engine.worker import EngineWorker, SchedulerFactory


class WorkerActor:
    """One worker in an actor's process. A step loop that dies ends the process, and so the actor."""

    def __init__(self, config: Mapping[str, Any], scheduler_factory: SchedulerFactory) -> None:
        """
        Args:
            config: a `WorkerConfig` as JSON values.

        Raises:
            ValueError: it is not one.
        """
        self._worker = EngineWorker(from_plain(WorkerConfig, config, "the worker's configuration"), scheduler_factory)

    def process_id(self) -> int:
        return os.getpid()

    def start(self) -> dict[str, Any]:
        """Serve; returns the fields of the `WorkerEndpoint`.

        Raises:
            ValueError: the configuration cannot be served; the text names the remedy.
        """
        endpoint: dict[str, Any] = to_plain(self._worker.start())
        return endpoint

    def ping(self) -> int:
        """The worker's epoch.

        Raises:
            RuntimeError: the step loop does not turn.
        """
        if not self._worker.is_healthy():
            raise RuntimeError("the step loop does not turn")
        return self._worker.epoch

    def drain(self, timeout_s: float) -> bool:
        """Take nothing new and wait for what runs; returns whether it finished in time."""
        return self._worker.drain(timeout_s)

    def stop(self) -> None:
        """End the worker; what still runs is dropped."""
        self._worker.stop()
