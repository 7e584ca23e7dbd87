"""Copies of KV blocks out of the pools of other workers of this host, which CUDA IPC opens.

The transfer processes decide (`pdserve.kv_transfer.ipc_pulls`): they carry the handles of pools, own lease and
deadline, order copies and check the generations of blocks after them. This half of them, in every rank of an engine,
copies: a rank takes its part of each block from those ranks of the source that hold it
(`pdserve.kv_transfer.resharding`), while the thread that delivers the order waits.

CUDA IPC has not run yet. In tests pools are in memory of the host that the other process maps.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pdserve.contracts.kv_layout import DTYPE_BYTES, KvLayout
from pdserve.kv_transfer.handshake import shard_from
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.kv_transfer.resharding import KvShard, reshard
from pdserve.proto.v1.kv_pb2 import RankPool
from pdserve.proto.v1.transfer_pb2 import CopyOrder


def export_pool(pool_blocks: torch.Tensor) -> RankPool:
    """Let other processes open a pool. Raises RuntimeError if its device cannot."""
    storage = pool_blocks.untyped_storage()
    if pool_blocks.is_cuda:
        # The event that is left out would order what the source writes before what is read, as grants do.
        shared = storage._share_cuda_()  # type: ignore[no-untyped-call]
        _, handle, num_bytes, offset, ref_counter, ref_counter_offset, _, _ = shared
        return RankPool(
            handle=handle,
            num_bytes=num_bytes,
            offset=offset,
            ref_counter=ref_counter,
            ref_counter_offset=ref_counter_offset,
        )
    fd, num_bytes = storage._share_fd_cpu_()
    return RankPool(handle=f"/proc/{os.getpid()}/fd/{fd}".encode(), num_bytes=num_bytes)


def open_pool(pool: RankPool, device: torch.device) -> torch.Tensor:
    """Open a pool of another process: uint8 ``[num_bytes]``, for copies to ``device``, which may be another than the
    pool's. Closed with the last view of it.

    Raises:
        RuntimeError: ``device`` does not reach it, or it is gone.
    """
    storage: Any
    if device.type == "cuda":
        counter = pool.ref_counter, pool.ref_counter_offset
        storage = torch.UntypedStorage._new_shared_cuda(
            device.index, pool.handle, pool.num_bytes, pool.offset, *counter, b"", False
        )
    else:
        storage = torch.UntypedStorage.from_file(pool.handle.decode(), shared=True, nbytes=pool.num_bytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


class IpcCopies:
    """Copies of one rank into its pool. One thread carries out orders."""

    def __init__(self, pool_blocks: torch.Tensor, memory: PoolMemory, shards: Sequence[KvShard], rank: int = 0) -> None:
        """
        Args:
            pool_blocks: uint8 ``[num_blocks, bytes of the rank's shard]``.
            memory: the worker's staging file.
            shards: of all ranks.

        Raises:
            RuntimeError: no other process can open the pool.
        """
        self.pool = export_pool(pool_blocks)
        self.pool.file_path = memory.path
        self.generations = memory.generations
        self.shards = shards
        self._layout = memory.layout
        self._rank = rank
        self._own = pool_blocks
        self._views: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        """By the epoch of each source, views of the own pool with those of the source's to copy there:
        ``[num_blocks, heads, layers, words]``."""
        self._stream = torch.cuda.Stream(pool_blocks.device) if pool_blocks.is_cuda else None  # type: ignore[no-untyped-call]

    def carry_out(self, order: CopyOrder) -> str:
        """Copy blocks, or close the pools of a source; returns why that failed, or nothing."""
        if not order.rank_pools:
            self._views.pop(order.worker_epoch, None)
            return ""
        try:
            with self._on_stream():
                if order.worker_epoch not in self._views:
                    self._views[order.worker_epoch] = self._open(order)
                for own, others in self._views[order.worker_epoch]:
                    for target_id, source_id in zip(order.target_ids, order.source_ids, strict=True):
                        own[target_id].copy_(others[source_id], non_blocking=True)
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:1000]
        return ""

    def close(self) -> None:
        """Close all pools of other workers."""
        self._views.clear()

    def _open(self, order: CopyOrder) -> list[tuple[torch.Tensor, torch.Tensor]]:
        shards, pools = [shard_from(shard) for shard in order.shards], order.rank_pools
        return [
            views
            for source_rank, part in reshard(shards, self.shards)[self._rank]
            for views in zip(
                _views(self._own, self._layout, self.shards[self._rank], part),
                _views(open_pool(pools[source_rank], self._own.device), self._layout, shards[source_rank], part),
                strict=True,
            )
        ]

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Wait for all copies at the end."""
        if self._stream is None:
            yield
            return
        torch.cuda.set_device(self._stream.device)  # a new thread is on the first GPU
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._stream.synchronize()


def _views(pool: torch.Tensor, layout: KvLayout, shard: KvShard, part: KvShard) -> Iterator[torch.Tensor]:
    """Views of a part of a rank's pool: its values and, if they are quantised, its scales, each
    ``[num_blocks, heads, layers, words]``. Words have 8 bytes, because a GPU copies strided memory by the element."""
    num_layers = len(shard.layers)
    head_words = num_layers * (layout.head_bytes // layout.num_layers) // 8
    value_words = num_layers * 2 * layout.block_size * layout.head_dim * DTYPE_BYTES[layout.dtype] // 8
    heads = slice(part.heads.start - shard.heads.start, part.heads.stop - shard.heads.start)
    layers = slice(part.layers.start - shard.layers.start, part.layers.stop - shard.layers.start)
    words = pool.view(torch.int64).view(-1, len(shard.heads), head_words)
    for section in words.tensor_split([value_words], dim=2):
        if section.numel():
            by_layer = section.view(*section.shape[:2], num_layers, -1)
            yield by_layer[:, heads, layers]
