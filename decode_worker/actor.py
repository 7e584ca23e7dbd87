"""The Ray actor of a decode or a mixed worker."""

from __future__ import annotations

from pdserve.engine.actor import WorkerActor
from pdserve.decode_worker.worker import build_scheduler


class DecodeWorker(WorkerActor):
    def __init__(self, config_json: str) -> None:
        super().__init__(config_json, build_scheduler)
