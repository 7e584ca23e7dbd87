"""Cases of `pdserve.bench.transfer` between devices: a pull through a process group, and the group alone.

On this machine the devices are CPUs and the groups Gloo's, where GPUs have NCCL's: the same code, another backend.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed

from pdserve.contracts.kv_layout import KvLayout
from pdserve.engine.worker.staged_transfer import StagedTransfer
from pdserve.kv_transfer.group_copies import BUFFER_BYTES, GroupCopies
from pdserve.kv_transfer.host_staging import HostStaging
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.kv_transfer.transfer_client import TransferProcess
from pdserve.proto.v1 import transfer_pb2

_TIMEOUT = timedelta(seconds=60)


def device_transfer(
    layout: KvLayout, epoch: int, token: str, on_message: Callable[[transfer_pb2.TransferToEngine], None]
) -> tuple[PoolMemory, StagedTransfer]:
    """An engine's side of KV transfer, whose pool its transfer process does not map."""
    torch.set_num_threads(1)  # as in workers
    memory = PoolMemory.create(layout)
    pool = torch.randint(256, (layout.num_blocks, layout.block_bytes), dtype=torch.uint8)
    copies = GroupCopies(pool, memory.generations, layout)
    start = partial(
        TransferProcess.start, memory=memory, worker_epoch=epoch, host="127.0.0.1", cluster_token=token,
        transport="nccl", cpu_cores=(), on_death=lambda: None, device=copies.device,
        shards=copies.shards,
    )  # fmt: skip
    return memory, StagedTransfer(HostStaging(pool, memory), start, on_message, lambda: None, copies)


def _raw_group(folder: str, rank: int) -> Any:
    store = distributed.FileStore(f"{folder}/store", 2)  # type: ignore[attr-defined]
    return distributed.ProcessGroupGloo(store, rank, 2, _TIMEOUT)


def _serve(pipe: Any, folder: str, layout: KvLayout, epoch: int, token: str) -> None:
    """Child process: a source engine that passes orders on, and rank 0 of a raw group, which sends on request."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    memory, transfer = device_transfer(layout, epoch, token, lambda message: None)
    pipe.send(transfer.address)
    group = _raw_group(folder, 0)
    buffer = torch.ones(max(layout.block_bytes, BUFFER_BYTES), dtype=torch.uint8)
    while (request := pipe.recv()) is not None:
        if isinstance(request, bytes):
            transfer.send(transfer_pb2.EngineToTransfer.FromString(request))
        else:
            for num_bytes in messages(request, len(buffer)):
                group.send([buffer[:num_bytes]], 1, 0).wait()
    transfer.close()
    memory.close()


def messages(num_bytes: int, max_bytes: int) -> Iterator[int]:
    """Sizes of the messages that carry ``num_bytes``."""
    for start in range(0, num_bytes, max_bytes):
        yield min(max_bytes, num_bytes - start)


class DeviceEngine:
    """The pulling engine, and the source in a process of its own."""

    def __init__(self, layout: KvLayout, epoch: int, token: str, stack: ExitStack) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self.messages: queue.SimpleQueue[transfer_pb2.TransferToEngine] = queue.SimpleQueue()
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        child = spawn.Process(target=_serve, args=(theirs, folder, layout, epoch, token))
        child.start()
        stack.callback(child.join)
        stack.callback(self._pipe.send, None)
        memory, self.transfer = device_transfer(layout, epoch, token, self.messages.put)
        stack.callback(memory.close)
        stack.callback(self.transfer.close)
        self.source_address: str = self._pipe.recv()
        self._group = _raw_group(folder, 1)
        self._buffer = torch.ones(max(layout.block_bytes, BUFFER_BYTES), dtype=torch.uint8)
        self._block_bytes = layout.block_bytes

    def send_to_source(self, order: transfer_pb2.EngineToTransfer) -> None:
        self._pipe.send(order.SerializeToString())

    def receive_raw(self, num_blocks: int) -> float:
        """Seconds to receive blocks through the raw group."""
        num_bytes = num_blocks * self._block_bytes
        started_s = time.perf_counter()
        self._pipe.send(num_bytes)
        for size in messages(num_bytes, len(self._buffer)):
            self._group.recv([self._buffer[:size]], 0, 0).wait()
        return time.perf_counter() - started_s
