"""A worker process as where the pool lies on a GPU: ``python -m tests.staged_worker --config JSON``.

Its executor computes in memory of its own, for a real model with two steps in flight and captured decode steps; the
transfer process maps a staging file. Ranks other than the leader are processes of `tests.staged_follower`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from pdserve.contracts.worker_config import WorkerConfig
from pdserve.engine.worker.backend import Backend, BuiltExecutors, choose_backend
from pdserve.engine.worker.followers import RanksIpcCopies
from pdserve.engine.worker.model_device import build_copies
from pdserve.engine.worker.process import main
from pdserve.kernels.kv_pool import KvPool
from pdserve.kv_transfer.host_staging import HostStaging
from pdserve.kv_transfer.ipc_copies import IpcCopies
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.kv_transfer.resharding import KvShard
from pdserve.model.executors.device_queue import DeviceQueue

COPY_S = 0.02
"""Longer than an order takes to the other worker and back: one that leaves before its copy is found out."""


class PipelinedQueue(DeviceQueue):
    pipeline_depth = 2


class LateStaging(HostStaging):
    def copy_d2h(self, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        time.sleep(COPY_S)
        super().copy_d2h(block_ids, generations)

    def copy_h2d(self, block_ids: Sequence[int]) -> None:
        time.sleep(COPY_S)
        super().copy_h2d(block_ids)


def shared_pool(memory: torch.Tensor, *others: Any, **named: Any) -> KvPool:
    """A pool that other processes can open."""
    memory.share_memory_()  # type: ignore[no-untyped-call]
    return KvPool(memory, *others, **named)


def staged_device() -> ExitStack:
    """A device that is the CPU, with memory of its own."""
    stack = ExitStack()
    for target, replacement in (
        ("pdserve.engine.worker.model_device.is_in_host_memory", lambda device: False),
        ("pdserve.engine.worker.model_device.KvPool", shared_pool),
        ("pdserve.kv_transfer.host_staging.HostStaging", LateStaging),
        ("pdserve.model.executors.rank_model.select_queue", lambda device: PipelinedQueue()),
    ):
        stack.enter_context(patch(target, replacement))
    return stack


def staged_backend(config: WorkerConfig) -> Backend:
    """As a worker chooses it; an emulated GPU has memory of its own, too."""
    if not config.emulate:
        return choose_backend(config)
    backend = choose_backend(replace(config, transport="auto"))

    def build_executors(memory: PoolMemory) -> BuiltExecutors:
        layout = backend.layout
        device = PoolMemory.create(layout)
        blocks = torch.zeros((layout.num_blocks, layout.block_bytes), dtype=torch.uint8)
        blocks.share_memory_()  # type: ignore[no-untyped-call]  # in place, before anybody has its address
        device.blocks = blocks.numpy().data.cast("B")
        executors = backend.build_executors(device).executors
        copies = build_copies(config, blocks, memory, [KvShard(range(1), range(1))])
        direct = RanksIpcCopies(copies, None) if isinstance(copies, IpcCopies) else copies
        return BuiltExecutors(executors, LateStaging(blocks, memory), None, direct)

    return replace(backend, build_executors=build_executors)


if __name__ == "__main__":
    with (
        staged_device(),
        patch("pdserve.engine.worker.worker.choose_backend", staged_backend),
        patch("pdserve.engine.worker.followers._MODULE", "tests.staged_follower"),
        patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)),  # where followers find `tests`
    ):
        sys.exit(main())
