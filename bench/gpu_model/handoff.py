"""Time to transfer a prompt's KV between two pools on one device, as between two workers of one host.

Called by `pdserve.bench.gpu_model.run`. Each pool has a staging file and a transfer process, as in
`pdserve.engine.worker.worker`. There is no step loop, and no other load on the link.
"""

from __future__ import annotations

import queue
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch

from pdserve.bench.gpu_model.steps import noise_pool
from pdserve.contracts.kv_layout import KvLayout
from pdserve.engine.worker.staged_transfer import StagedTransfer
from pdserve.kv_transfer.host_staging import HostStaging
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.kv_transfer.transfer_client import TransferProcess
from pdserve.proto.v1 import kv_pb2, transfer_pb2, worker_pb2

_EPOCH = 1
_PULL_S = 60.0
_NUM_ROUNDS = 6
"""The first of them warms up pages and connections, and does not count."""

Messages = queue.SimpleQueue[transfer_pb2.TransferToEngine | None]
"""Messages of the puller; None when a process died."""


class HandoffSeconds(NamedTuple):
    """Medians."""

    handoff_s: float
    """From the grant until the KV is in the other pool."""
    link_s: float
    """Copies of as many bytes from the device to pinned memory, and back."""


class _Side(NamedTuple):
    """One worker's pool and transfer process."""

    pool_blocks: torch.Tensor
    memory: PoolMemory
    transfer: StagedTransfer


def measure_handoff(layout: KvLayout, device: torch.device) -> HandoffSeconds:
    """Transfer all blocks of a pool of ``layout``.

    Raises:
        RuntimeError: a pull failed, or delivered other bytes.
    """
    messages: Messages = queue.SimpleQueue()
    with _side(layout, device, messages) as source, _side(layout, device, messages) as target:
        seconds = [_hand_off(number, layout, source, target, messages) for number in range(1, _NUM_ROUNDS + 1)]
        if not torch.equal(source.pool_blocks, target.pool_blocks):
            raise RuntimeError("the pulled bytes are not what was granted")
        return HandoffSeconds(statistics.median(seconds[1:]), link_s(source.pool_blocks))


@contextmanager
def _side(layout: KvLayout, device: torch.device, messages: Messages) -> Iterator[_Side]:
    memory = PoolMemory.create(layout)
    blocks = noise_pool(layout, device).blocks
    start: Callable[..., Any] = partial(
        TransferProcess.start,
        memory=memory,
        worker_epoch=_EPOCH,
        host="127.0.0.1",
        cluster_token="bench",
        transport="auto",
        cpu_cores=(),
        on_death=lambda: messages.put(None),
    )
    transfer = StagedTransfer(
        HostStaging(blocks, memory),
        lambda on_message: start(on_message=on_message),
        messages.put,
        lambda: messages.put(None),
    )
    try:
        yield _Side(blocks, memory, transfer)
    finally:
        transfer.close()
        memory.close()


def _hand_off(number: int, layout: KvLayout, source: _Side, target: _Side, messages: Messages) -> float:
    """Seconds of one transfer; its blocks count as rewritten."""
    handle, blocks = number.to_bytes(16, "little"), list(range(layout.num_blocks))
    for block in blocks:
        source.memory.generations[block] = number
    grant = kv_pb2.Grant(
        block_ids=blocks,
        generations=[number] * len(blocks),
        final=True,
        num_tokens=len(blocks) * layout.block_size,
        first_token=kv_pb2.FirstToken(token=1),
    )
    pull = transfer_pb2.StartPull(
        pull_id=number,
        source=worker_pb2.KvSource(address=source.transfer.address, worker_epoch=_EPOCH, handle=handle),
        block_ids=blocks,
        deadline_s=_PULL_S,
    )
    source.transfer.send(transfer_pb2.EngineToTransfer(offer=transfer_pb2.Offer(handle=handle)))
    started_s = perf_counter()
    source.transfer.send(transfer_pb2.EngineToTransfer(grant=transfer_pb2.OfferedGrant(handle=handle, grant=grant)))
    target.transfer.send(transfer_pb2.EngineToTransfer(start_pull=pull))
    while (message := messages.get(timeout=2 * _PULL_S)) is not None:
        if message.HasField("pull_done"):
            break
    if message is None or message.pull_done.failure_stage:
        raise RuntimeError(f"a pull failed: {'a process died' if message is None else message.pull_done.message}")
    return perf_counter() - started_s


def link_s(on_device: torch.Tensor) -> float:
    """Median seconds of copying all of it to pinned memory and back."""
    is_cuda = on_device.device.type == "cuda"
    on_host = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=is_cuda)
    seconds = []
    for _ in range(_NUM_ROUNDS):
        started_s = perf_counter()
        on_host.copy_(on_device)
        on_device.copy_(on_host)
        if is_cuda:
            torch.cuda.synchronize()
        seconds.append(perf_counter() - started_s)
    return statistics.median(seconds[1:])
