"""A worker process as where the pool lies on a GPU: ``python -m tests.staged_worker --config JSON``.

Its executor, for a real model that of a GPU, computes in memory of its own; the transfer process maps a staging file.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch

from pdserve.contracts.placement import WorkerConfig, WorkerRole
from pdserve.decode_worker import worker as decode_worker
from pdserve.engine.backend import Backend, BuiltExecutor, choose_backend
from pdserve.engine.process import main
from pdserve.engine.scheduler import Scheduler
from pdserve.kv_transfer.block_pool import BlockPool
from pdserve.kv_transfer.host_staging import HostStaging
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.model.gpu_executor import GpuExecutor
from pdserve.prefill_worker import worker as prefill_worker

COPY_S = 0.02
"""Longer than an order takes to the other worker and back: one that leaves before its copy is found out."""


class LateStaging(HostStaging):
    def copy_d2h(self, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        time.sleep(COPY_S)
        super().copy_d2h(block_ids, generations)

    def copy_h2d(self, block_ids: Sequence[int]) -> None:
        time.sleep(COPY_S)
        super().copy_h2d(block_ids)


def staged_backend(config: WorkerConfig) -> Backend:
    """As a worker chooses it, but for the memory of the pool."""
    backend = choose_backend(config)

    def build_executor(memory: PoolMemory) -> BuiltExecutor:
        device = PoolMemory.create(backend.layout)
        blocks = torch.frombuffer(device.blocks, dtype=torch.uint8).view(backend.layout.num_blocks, -1)
        return BuiltExecutor(backend.build_executor(device).executor, LateStaging(blocks, memory))

    return replace(backend, build_executor=build_executor)


def build_scheduler(*, pool: BlockPool, backend: Backend, config: WorkerConfig) -> Scheduler:
    if config.role is WorkerRole.PREFILL:
        return prefill_worker.build_scheduler(pool=pool, backend=backend, config=config)
    return decode_worker.build_scheduler(pool=pool, backend=backend, config=config)


if __name__ == "__main__":
    with (
        patch("pdserve.engine.worker.choose_backend", staged_backend),
        patch("pdserve.model.executor_choice.ModelExecutor", partial(GpuExecutor, max_captured_rows=8)),
    ):
        sys.exit(main(build_scheduler, "staged_worker"))
