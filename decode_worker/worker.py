"""The scheduler of a decode or a mixed worker, built from the worker's configuration. Never starts anything."""

from __future__ import annotations

import secrets

from pdserve.contracts.placement import WorkerConfig, WorkerRole
from pdserve.contracts.request import HANDLE_BYTES
from pdserve.decode_worker.scheduler import DecodeScheduler
from pdserve.decode_worker.swapping import swap_space
from pdserve.engine.backend import Backend
from pdserve.kv_transfer.block_pool import BlockPool


def build_scheduler(*, pool: BlockPool, backend: Backend, config: WorkerConfig) -> DecodeScheduler:
    """Raises ValueError for a role that another worker serves."""
    if config.role is WorkerRole.PREFILL:
        raise ValueError("a decode worker cannot serve role 'prefill': start pdserve.prefill_worker")
    return DecodeScheduler(
        pool,
        backend.limits,
        mint_handle=lambda: secrets.token_bytes(HANDLE_BYTES),
        max_batch_tokens=config.max_batch_tokens,
        max_batch_size=config.max_batch_size,
        park_timeout_s=config.park_timeout_s,
        swap_space=swap_space(backend.cost, backend.num_swap_slots),
    )
