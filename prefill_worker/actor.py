"""The Ray actor of a prefill worker."""

from __future__ import annotations

from pdserve.engine.actor import WorkerActor
from pdserve.prefill_worker.worker import build_scheduler


class PrefillWorker(WorkerActor):
    def __init__(self, config_json: str) -> None:
        super().__init__(config_json, build_scheduler)
