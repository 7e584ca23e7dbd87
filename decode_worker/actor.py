"""The Ray actor of a decode or a mixed worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdserve.decode_worker.worker import build_scheduler
from pdserve.engine.actor import WorkerActor


class DecodeWorker(WorkerActor):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config, build_scheduler)
