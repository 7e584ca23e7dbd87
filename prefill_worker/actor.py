"""The Ray actor of a prefill worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdserve.engine.actor import WorkerActor
from pdserve.prefill_worker.worker import build_scheduler


class PrefillWorker(WorkerActor):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config, build_scheduler)
