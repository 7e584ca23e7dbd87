"""The scheduler of a prefill worker, built from the worker's configuration. Never starts anything."""

from __future__ import annotations

import secrets

from pdserve.contracts.placement import WorkerConfig, WorkerRole
from pdserve.contracts.request import HANDLE_BYTES
from pdserve.engine.backend import Backend
from pdserve.kv_transfer.block_pool import BlockPool
from pdserve.prefill_worker.scheduler import PrefillScheduler


def build_scheduler(*, pool: BlockPool, backend: Backend, config: WorkerConfig) -> PrefillScheduler:
    """Raises ValueError for a role that another worker serves."""
    if config.role is not WorkerRole.PREFILL:
        raise ValueError(f"a prefill worker cannot serve role {config.role.value!r}: start pdserve.decode_worker")
    return PrefillScheduler(
        pool,
        backend.limits,
        mint_handle=lambda: secrets.token_bytes(HANDLE_BYTES),
        max_batch_tokens=config.max_batch_tokens,
        max_batch_size=config.max_batch_size,
        park_timeout_s=config.park_timeout_s,
    )
