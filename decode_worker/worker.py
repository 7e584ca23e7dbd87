"""Scheduler of a decode or mixed worker, built from its configuration, its Ray actor, and its process entry."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping
from typing import Any

from pdserve.contracts.placement import WorkerConfig, WorkerRole
from pdserve.contracts.request import HANDLE_BYTES
from pdserve.decode_worker.scheduler import DecodeScheduler
from pdserve.decode_worker.swapping import swap_space
from pdserve.engine.worker.backend import Backend
from pdserve.engine.worker.loop import StepTimes
from pdserve.engine.worker.process import WorkerActor, main
from pdserve.kv_transfer.block_pool import BlockPool


def build_scheduler(pool: BlockPool, backend: Backend, config: WorkerConfig, times: StepTimes) -> DecodeScheduler:
    """Build the scheduler. Raises ValueError if the configured role is prefill."""
    if config.role is WorkerRole.PREFILL:
        raise ValueError("a decode worker cannot serve role 'prefill': start pdserve.prefill_worker.worker")
    return DecodeScheduler(
        pool,
        backend.limits,
        mint_handle=lambda: secrets.token_bytes(HANDLE_BYTES),
        max_batch_tokens=config.max_batch_tokens,
        max_batch_size=config.max_batch_size,
        park_timeout_s=config.park_timeout_s,
        swap_space=swap_space(backend.cost, backend.num_swap_slots),
        mixed_s=times.mixed_s,
    )


class DecodeWorker(WorkerActor):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config, build_scheduler)


if __name__ == "__main__":
    sys.exit(main(build_scheduler, "python -m pdserve.decode_worker.worker"))
