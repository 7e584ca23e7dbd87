"""Pulls from the pools of a worker on GPUs of this host, as the puller's transfer process sees them.

The engine copies granted blocks from pools that it opens by CUDA IPC (`pdserve.kv_transfer.ipc_copies`). This process
orders the copies, and checks every block's generation after its copy in the source's file, mapped as for ``memfd``. The
engine carries out an order before it receives what is sent after it, so that nothing is written after a `PullDone`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple

from pdserve.kv_transfer.pool_memory import PoolMemory, leads_to
from pdserve.kv_transfer.transports import GrantedBlock, TransportImpossibleError, check_generation
from pdserve.proto.v1 import kv_pb2, transfer_pb2

COPY_BYTES = 64 << 20
"""Blocks of one order. The engine receives other messages only between two orders."""


class IpcSource(NamedTuple):
    """A worker whose pools the engine opens."""

    worker_epoch: int
    inode: int
    """Of its file."""
    rank_pools: Sequence[kv_pb2.RankPool]
    shards: Sequence[kv_pb2.KvShard]
    """Of its ranks."""

    def is_up(self) -> bool:
        """Whether all its ranks run. A process that ends loses its files before its pool."""
        return all(leads_to(pool.file_path, self.inode) for pool in self.rank_pools)


class IpcCopyOrders:
    """Orders to the engine that it has not answered, and the sources whose pools it has opened."""

    def __init__(self, send: Callable[[transfer_pb2.TransferToEngine], None]) -> None:
        self._send = send
        self._copy_ids = count()
        self._answers: dict[int, asyncio.Future[str]] = {}
        self._sources: dict[int, IpcSource] = {}
        """By epoch."""

    async def copy(self, source: IpcSource, blocks: Sequence[GrantedBlock]) -> None:
        """Let the engine copy blocks. A cancelled copy is carried out all the same.

        Raises:
            TransportImpossibleError: it cannot.
        """
        copy_id = next(self._copy_ids)
        self._answers[copy_id] = asyncio.get_running_loop().create_future()
        self._sources[source.worker_epoch] = source
        self._order(
            copy_id=copy_id,
            worker_epoch=source.worker_epoch,
            rank_pools=source.rank_pools,
            shards=source.shards,
            source_ids=[block.source_id for block in blocks],
            target_ids=[block.target_id for block in blocks],
        )
        try:
            failure = await self._answers[copy_id]
        finally:
            del self._answers[copy_id]
        if failure:
            raise TransportImpossibleError("cuda_ipc", failure)

    def copied(self, answer: transfer_pb2.Copied) -> None:
        """Take an answer of the engine."""
        if answer.copy_id in self._answers and not self._answers[answer.copy_id].done():
            self._answers[answer.copy_id].set_result(answer.failure)

    def close_gone(self) -> None:
        """Let the engine close the pools of sources that are gone, whose memory it would keep."""
        for epoch in [epoch for epoch, source in self._sources.items() if not source.is_up()]:
            del self._sources[epoch]
            self._order(worker_epoch=epoch)

    def _order(self, **fields: object) -> None:
        order = transfer_pb2.CopyOrder(**fields)  # type: ignore[arg-type]
        self._send(transfer_pb2.TransferToEngine(copy_order=order))


class IpcReceiver:
    """Receives blocks by copies of the engine, straight into its pool."""

    def __init__(self, orders: IpcCopyOrders, source: IpcSource, file: PoolMemory) -> None:
        """
        Args:
            file: the source's, which has the generations.
        """
        self._orders = orders
        self._source = source
        self._file = file

    async def receive(self, blocks: Sequence[GrantedBlock]) -> None:
        num_blocks = max(1, COPY_BYTES // self._file.layout.block_bytes)
        for start in range(0, len(blocks), num_blocks):
            batch = blocks[start : start + num_blocks]
            await self._orders.copy(self._source, batch)
            if not self._source.is_up():
                raise ConnectionResetError("a process of the source has ended")
            for block in batch:
                check_generation(block, self._file.generations[block.source_id])
