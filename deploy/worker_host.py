"""The Ray actor around a worker: imports the worker's class in the actor's process and passes calls on.

The supervisor creates one per seat and names the class by its path, so that its own process never imports an engine.
"""

from __future__ import annotations

import importlib
import os
from typing import Any


class WorkerHost:
    """Runs one worker in this process. Ray calls its methods, from several threads."""

    def __init__(self, class_path: str, config: dict[str, Any]) -> None:
        """Create the worker.

        Args:
            class_path: ``package.module:Class``, which takes ``config``.
            config: a `pdserve.contracts.placement.WorkerConfig` as JSON values.
        """
        module, _, name = class_path.partition(":")
        self._worker = getattr(importlib.import_module(module), name)(config)

    def process_id(self) -> int:
        return os.getpid()

    def start(self) -> dict[str, Any]:
        """Load the model and listen; returns the fields of the `WorkerEndpoint`. May take minutes."""
        endpoint: dict[str, Any] = self._worker.start()
        return endpoint

    def ping(self) -> int:
        """The worker's epoch, as a sign of life; raises if it does not work any more."""
        epoch: int = self._worker.ping()
        return epoch

    def drain(self, timeout_s: float) -> bool:
        """Take nothing new and let what runs finish; returns whether it has within ``timeout_s``."""
        is_drained: bool = self._worker.drain(timeout_s)
        return is_drained

    def stop(self) -> None:
        """Release everything; the process ends next."""
        self._worker.stop()
