"""Copies of KV blocks between pools on devices, in process groups of two workers' engines.

The transfer processes decide (`pdserve.kv_transfer.links`): they find the peer, carry the rendezvous of its group, own
lease and deadline, and order sends and fetches. This half of them, in the engine, moves bytes: NCCL between GPUs, Gloo
between CPUs in tests. Groups are objects; torch's global one is never touched, and no store listens on a port. NCCL has
not run yet.

A link has a group for each two ranks, one of the source and one of the target, that have a part of every block in
common. On either rank a group has a thread, a CUDA stream and two staging buffers on the device, so that one batch of
blocks is gathered or scattered while the other is on its way; groups never wait for each other. A batch carries the
generations of its blocks, read at the source after they were gathered: an owner raises a block's generation before it
writes anything new. Blocks are scattered after this check, and never once the link is closed, which waits for a batch
that is being scattered. So nothing is written after the end of a pull has been delivered, and what still arrives of an
abandoned batch stays in the buffers, which end with the group.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import distributed

from pdserve.contracts.kv_layout import KvLayout
from pdserve.kv_transfer.handshake import shard_from
from pdserve.kv_transfer.resharding import KvShard
from pdserve.proto.v1 import kv_pb2
from pdserve.proto.v1.transfer_pb2 import EngineToTransfer, Fetched, GroupFetch, LinkEvent, LinkOrder, OpenLink

BUFFER_BYTES = 8 << 20
"""Bytes in one of two buffers of a rank for a link, shared by its groups; at least one block."""
MAX_HALVES = 40
"""Links of a rank, with those whose peer has not let go yet; each holds two buffers."""
BATCH_TIMEOUT_S = 5.0
"""A peer that takes longer for one batch is lost."""
_POLL_S = 50e-6
_GENERATION_BYTES = 8
_log = logging.getLogger(__name__)


def device_id(devices: Sequence[torch.device]) -> str:
    """Backend of the groups that reach the devices of a worker's ranks, and ids of the devices. Ids of two differ."""
    if devices[0].type == "cuda":
        return " ".join(("nccl", *(str(torch.cuda.get_device_properties(device).uuid) for device in devices)))
    return f"gloo {os.getpid()}"


class GroupCopies:
    """Links of a worker on one of its ranks. `handle` and `close` are called on one thread."""

    def __init__(
        self,
        pool_blocks: torch.Tensor,
        generations: Sequence[int],
        layout: KvLayout,
        *,
        shards: Sequence[KvShard] = (),
        rank: int = 0,
        device: str = "",
    ) -> None:
        """
        Args:
            pool_blocks: uint8 ``[num_blocks, bytes of the rank's shard in a block]``.
            generations: of each block, as its owner raises them.
            layout: of all ranks' pool.
            shards: of each rank; by default there is one.
            device: `device_id` of all ranks; by default of one.
        """
        assert pool_blocks.dtype == torch.uint8
        self.shards = tuple(shards) or (KvShard(range(layout.num_kv_heads), range(layout.num_layers)),)
        self.generations = generations
        self.device = device or device_id([pool_blocks.device])
        self._send: Callable[[EngineToTransfer], None]
        self._rank = rank
        self._shard = self.shards[rank]
        self._layout = replace(layout, num_kv_heads=len(self._shard.heads), num_layers=len(self._shard.layers))
        self._pool = pool_blocks.view(-1, self._layout.num_kv_heads, self._layout.head_bytes)
        self._links: dict[int, _Link] = {}

    def start(self, send: Callable[[EngineToTransfer], None]) -> None:
        """Send events with ``send``, on any thread. Comes before the first order."""
        self._send = send

    def part(self, shard: KvShard) -> list[torch.Tensor]:
        """Views of a part of every block, ``[num_blocks, heads, words]``: one, or its values and its scales. Words have
        8 bytes, because a GPU copies strided memory by the element."""
        heads, layers = (
            range(part.start - own.start, part.stop - own.start) for part, own in zip(shard, self._shard, strict=True)
        )
        runs = self._layout.layer_runs(layers)
        return [self._pool[:, heads.start : heads.stop, run.start : run.stop].view(torch.int64) for run in runs]

    def tell(self, number: int, **body: Any) -> None:
        """Send an event of a link."""
        self._send(EngineToTransfer(link_event=LinkEvent(link_id=number, **body)))

    def handle(self, order: LinkOrder) -> None:
        """Carry out an order, or queue it. Once a link is closed, no block is written through it."""
        kind = order.WhichOneof("body")
        if kind == "open":
            self._links[order.link_id] = self._open(order.link_id, order.open)
            return
        link = self._links.get(order.link_id)
        if link is None:  # lost meanwhile
            return
        if kind == "key":
            link.store.local.set(order.key.key, order.key.value)
            return
        for group in link.groups:
            match kind:
                case "send":
                    group.jobs.put(partial(group.send_blocks, order.send.block_ids))
                case "fetch":
                    group.jobs.put(partial(group.fetch, order.fetch))
                case "close":
                    group.close()

    def _open(self, number: int, order: OpenLink) -> _Link:
        self._links = {each: link for each, link in self._links.items() if link.is_alive()}
        store = _RelayStore(lambda key, value: self.tell(number, key=kv_pb2.StoreKey(key=key, value=value)))
        if len(self._links) >= MAX_HALVES:
            self.tell(number, lost=f"{MAX_HALVES} links exist")
            return _Link(store, [])
        pairs = [(group.source_rank, group.target_rank) for group in order.groups]
        side = 0 if order.is_source else 1
        # Both ends of a group take equal batches: those of the rank with the most groups fit its buffers.
        most_groups = max((ranks.count(rank) for ranks in zip(*pairs, strict=True) for rank in ranks), default=1)
        groups = [
            _Group(
                self,
                number,
                store,
                self.part(shard_from(group.shard)),
                name=f"{pair[0]}-{pair[1]}",
                rank=side,
                buffer_bytes=BUFFER_BYTES // most_groups,
            )
            for group, pair in zip(order.groups, pairs, strict=True)
            if pair[side] == self._rank
        ]
        return _Link(store, groups)

    def close(self) -> None:
        """Close all links."""
        for link in self._links.values():
            for group in link.groups:
                group.close()


class _RelayStore(distributed.Store):  # type: ignore[misc,name-defined]
    """Store of a link's groups: the peer's transfer process sets here what that side sets, and the reverse."""

    def __init__(self, relay: Callable[[str, bytes], None]) -> None:
        super().__init__()
        self.local: Any = distributed.HashStore()  # type: ignore[attr-defined]  # its stubs know no bytes
        self._relay = relay

    def set(self, key: str, value: bytes) -> None:
        self.local.set(key, value)
        self._relay(key, bytes(value))

    def get(self, key: str) -> bytes:
        return bytes(self.local.get(key))

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=BATCH_TIMEOUT_S)) -> None:
        self.local.wait(keys, timeout)


class _Link(NamedTuple):
    store: _RelayStore
    groups: list[_Group]

    def is_alive(self) -> bool:
        return any(group.thread.is_alive() for group in self.groups)


class _Group:
    """A group with a rank of the peer, and its thread."""

    def __init__(
        self,
        copies: GroupCopies,
        number: int,
        store: _RelayStore,
        pool: Sequence[torch.Tensor],
        *,
        name: str,
        rank: int,
        buffer_bytes: int,
    ) -> None:
        """
        Args:
            pool: views of the part of every block that the group copies, as of `GroupCopies.part`.
            name: of the group, alike at both ends.
            rank: 0 at the source, 1 at the target.
            buffer_bytes: of blocks in a batch; at least one block.
        """
        self._copies = copies
        self._number = number
        self._store = store  # kept here: torch's own reference to it does not keep its methods
        self._name = name
        self._pool = pool
        self._device = pool[0].device
        self._rank = rank
        self._block_bytes = sum(view[0].nbytes for view in pool)
        self._batch_size = min(len(pool[0]), max(1, buffer_bytes // self._block_bytes))
        self._buffers: list[torch.Tensor] = []
        self._group: Any = None  # torch's stubs know neither `send` nor `recv`
        self._is_closed = False
        self._scattering = threading.Lock()
        """Held while blocks are written; `close` waits for it."""
        self.jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"kv-link-{number}", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Write no block any more, and end the group as soon as its thread gets to it."""
        self._is_closed = True
        with self._scattering:  # the batch that is being written is the last
            pass
        self.jobs.put(None)

    def _run(self) -> None:
        try:
            with self._on_stream():
                self._open()
                while (job := self.jobs.get()) is not None:
                    job()
        except Exception as error:
            if not self._is_closed:
                _log.warning("a process group for KV is lost: %s", error)
                self._copies.tell(self._number, lost=f"{type(error).__name__}: {error}"[:1000])
        finally:
            if self._device.type == "cuda" and self._group is not None:
                self._group.abort()  # ends what is in flight; only then may the buffers go
            self._group = None
            self._buffers = []

    def _open(self) -> None:
        num_bytes = self._batch_size * (_GENERATION_BYTES + self._block_bytes)
        self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, device=self._device) for _ in range(2)]
        store = distributed.PrefixStore(self._name, self._store)  # type: ignore[attr-defined]
        timeout = timedelta(seconds=BATCH_TIMEOUT_S)
        if self._device.type == "cuda":
            # By default torch ends the process when a group fails, as that of a lost peer does.
            os.environ.update(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_ENABLE_MONITORING="0")
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = distributed.ProcessGroupNCCL(store, self._rank, 2, options)
        else:
            self._group = distributed.ProcessGroupGloo(store, self._rank, 2, timeout)

    def send_blocks(self, block_ids: Sequence[int]) -> None:
        """Send blocks, each batch with its generations."""
        works: list[Any] = []
        for index, batch in enumerate(self._batches(block_ids)):
            if index >= 2:
                self._wait(works[index - 2])
            message, blocks = self._message(index, len(batch))
            for slot, block_id in enumerate(batch):
                for part, view in zip(blocks, self._pool, strict=True):
                    part[slot].copy_(view[block_id], non_blocking=True)
            self._synchronize()
            generations = array("Q", [self._copies.generations[block_id] for block_id in batch])
            message[: len(generations) * _GENERATION_BYTES].copy_(torch.frombuffer(generations, dtype=torch.uint8))
            works.append(self._group.send([message], 1 - self._rank, 0))
        for work in works[-2:]:
            self._wait(work)
        self._synchronize()

    def fetch(self, order: GroupFetch) -> None:
        """Receive blocks of the peer, and scatter each batch whose generations are as granted."""
        batches = list(self._batches(range(len(order.block_ids))))
        generations: list[int] = []
        works = [self._receive(0, len(batches[0]))]
        for index, batch in enumerate(batches):
            if index + 1 < len(batches):  # while the one before is on its way: a peer sends to a receiver that waits
                works.append(self._receive(index + 1, len(batches[index + 1])))
            self._wait(works[index])
            message, blocks = self._message(index, len(batch))
            header = message[: len(batch) * _GENERATION_BYTES].cpu()
            received = array("Q", header.numpy().tobytes()).tolist()
            generations += received
            is_granted = received == [order.generations[position] for position in batch]
            if is_granted:
                self._scatter(blocks, [order.block_ids[position] for position in batch])
        self._copies.tell(self._number, fetched=Fetched(generations=generations))

    def _receive(self, index: int, num_blocks: int) -> Any:
        return self._group.recv([self._message(index, num_blocks)[0]], 1 - self._rank, 0)

    def _scatter(self, blocks: Sequence[torch.Tensor], targets: Sequence[int]) -> None:
        with self._scattering:
            if self._is_closed:
                raise RuntimeError("the link is closed")
            for slot, block_id in enumerate(targets):
                for part, view in zip(blocks, self._pool, strict=True):
                    view[block_id].copy_(part[slot], non_blocking=True)
            self._synchronize()

    def _batches(self, block_ids: Sequence[int]) -> Iterator[Sequence[int]]:
        for start in range(0, len(block_ids), self._batch_size):
            yield block_ids[start : start + self._batch_size]

    def _message(self, index: int, num_blocks: int) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Message of a batch, in one of the buffers, and views of the blocks in it like those of the pool."""
        message = self._buffers[index % 2][: num_blocks * (_GENERATION_BYTES + self._block_bytes)]
        words = message[num_blocks * _GENERATION_BYTES :].view(torch.int64)
        heads = words.view(num_blocks, self._pool[0].shape[1], -1)
        return message, torch.split(heads, [view.shape[2] for view in self._pool], dim=2)

    def _wait(self, work: Any) -> None:
        if self._device.type == "cuda":  # where `wait` only orders the stream
            deadline_s = time.monotonic() + BATCH_TIMEOUT_S
            while not work.is_completed():
                if self._is_closed or time.monotonic() > deadline_s:
                    raise TimeoutError(f"the peer took more than {BATCH_TIMEOUT_S} s for a batch")
                time.sleep(_POLL_S)
        work.wait(timedelta(seconds=BATCH_TIMEOUT_S))

    def _on_stream(self) -> AbstractContextManager[object]:
        stack = ExitStack()
        if self._device.type == "cuda":
            stack.enter_context(torch.cuda.device(self._device))
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream()))  # type: ignore[no-untyped-call]
        return stack

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
