"""Scheduler of a prefill worker, built from its configuration, its Ray actor, and its process entry."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping
from typing import Any

from pdserve.contracts.placement import WorkerConfig, WorkerRole
from pdserve.contracts.request import HANDLE_BYTES
from pdserve.engine.worker.backend import Backend
from pdserve.engine.worker.loop import StepTimes
from pdserve.engine.worker.process import WorkerActor, main
from pdserve.kv_transfer.block_pool import BlockPool
from pdserve.prefill_worker.scheduler import PrefillScheduler


def build_scheduler(pool: BlockPool, backend: Backend, config: WorkerConfig, times: StepTimes) -> PrefillScheduler:
    """Build the scheduler. Raises ValueError if the configured role is not prefill."""
    if config.role is not WorkerRole.PREFILL:
        role = config.role.value
        raise ValueError(f"a prefill worker cannot serve role {role!r}: start pdserve.decode_worker.worker")
    return PrefillScheduler(
        pool,
        backend.limits,
        mint_handle=lambda: secrets.token_bytes(HANDLE_BYTES),
        max_batch_tokens=config.max_batch_tokens,
        max_batch_size=config.max_batch_size,
        park_timeout_s=config.park_timeout_s,
    )


class PrefillWorker(WorkerActor):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config, build_scheduler)


if __name__ == "__main__":
    sys.exit(main(build_scheduler, "python -m pdserve.prefill_worker.worker"))
