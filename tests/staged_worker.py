"""A worker process as where the pool lies on a GPU: ``python -m tests.staged_worker --config JSON``.

Its executor computes in memory of its own, for a real model with two steps in flight; the transfer process maps a
staging file."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from pdserve.contracts.placement import WorkerConfig, WorkerRole
from pdserve.decode_worker import worker as decode_worker
from pdserve.engine.scheduling.interface import Scheduler
from pdserve.engine.worker.backend import Backend, BuiltExecutors, choose_backend
from pdserve.engine.worker.process import main
from pdserve.kv_transfer.block_pool import BlockPool
from pdserve.kv_transfer.host_staging import HostStaging
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.model.executors.device_queue import DeviceQueue
from pdserve.model.executors.model import ModelExecutor
from pdserve.prefill_worker import worker as prefill_worker

COPY_S = 0.02
"""Longer than an order takes to the other worker and back: one that leaves before its copy is found out."""


class PipelinedQueue(DeviceQueue):
    pipeline_depth = 2


class CapturingExecutor(ModelExecutor):
    def __init__(self, *, max_captured_rows: int, **options: Any) -> None:
        super().__init__(max_captured_rows=8, **options)


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

    def build_executors(memory: PoolMemory) -> BuiltExecutors:
        device = PoolMemory.create(backend.layout)
        blocks = torch.frombuffer(device.blocks, dtype=torch.uint8).view(backend.layout.num_blocks, -1)
        return BuiltExecutors(backend.build_executors(device).executors, LateStaging(blocks, memory))

    return replace(backend, build_executors=build_executors)


def build_scheduler(pool: BlockPool, backend: Backend, config: WorkerConfig) -> Scheduler:
    if config.role is WorkerRole.PREFILL:
        return prefill_worker.build_scheduler(pool, backend, config)
    return decode_worker.build_scheduler(pool, backend, config)


if __name__ == "__main__":
    with (
        patch("pdserve.engine.worker.worker.choose_backend", staged_backend),
        patch("pdserve.model.executors.rank_model.select_queue", lambda device: PipelinedQueue()),
        patch("pdserve.model.executors.model.ModelExecutor", CapturingExecutor),
    ):
        sys.exit(main(build_scheduler, "staged_worker"))
