"""Copies of KV blocks between pools on devices, in process groups of two workers' engines.

The transfer processes decide (`pdserve.kv_transfer.links`): they find the peer, carry the rendezvous of its group, own
lease and deadline, and order sends and fetches. This half of them, in the engine, moves bytes: NCCL between GPUs, Gloo
between CPUs in tests. Groups are objects; torch's global one is never touched, and no store listens on a port. NCCL has
not run yet.

Each link has a thread, a CUDA stream and two staging buffers on the device, so that one batch of blocks is gathered or
scattered while the other is on its way. A batch carries the generations of its blocks, read at the source after they
were gathered: an owner raises a block's generation before it writes anything new. Blocks are scattered after this
check, and never once the link is closed, which waits for a batch that is being scattered. So nothing is written after
the end of a pull has been delivered, and what still arrives of an abandoned batch stays in the buffers, which end with
the group.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import distributed

from pdserve.proto.v1 import kv_pb2
from pdserve.proto.v1.transfer_pb2 import EngineToTransfer, Fetched, GroupFetch, LinkEvent, LinkOrder

BUFFER_BYTES = 8 << 20
"""Blocks in one of a link's two buffers; at least one block."""
MAX_GROUPS = 40
"""Groups of an engine, with those whose peer has not let go yet; each holds two buffers."""
BATCH_TIMEOUT_S = 5.0
"""A peer that takes longer for one batch is lost."""
_POLL_S = 50e-6
_GENERATION_BYTES = 8
_log = logging.getLogger(__name__)


def device_id(pool_blocks: torch.Tensor) -> str:
    """Backend of the groups that reach a pool, and id of its device. Ids of two devices differ."""
    if pool_blocks.is_cuda:
        return f"nccl {torch.cuda.get_device_properties(pool_blocks.device).uuid}"
    return f"gloo {os.getpid()}"


class GroupCopies:
    """Links of one engine. `handle` and `close` are called on one thread."""

    def __init__(self, pool_blocks: torch.Tensor, generations: Sequence[int]) -> None:
        """
        Args:
            pool_blocks: uint8 ``[num_blocks, block_bytes]``.
            generations: of each block, as its owner raises them.
        """
        assert pool_blocks.dtype == torch.uint8
        self.pool = pool_blocks
        self.generations = generations
        self.device = device_id(pool_blocks)
        self.send: Callable[[EngineToTransfer], None]
        """Sends to the transfer process; set before the first order."""
        self._links: dict[int, _Link] = {}

    def handle(self, order: LinkOrder) -> None:
        """Carry out an order, or queue it. Once a link is closed, no block is written through it."""
        kind = order.WhichOneof("body")
        if kind == "open_rank":
            self._links = {number: link for number, link in self._links.items() if link.is_alive()}
            self._links[order.link_id] = _Link(self, order.link_id, order.open_rank, len(self._links) < MAX_GROUPS)
            return
        link = self._links.get(order.link_id)
        if link is None:  # lost meanwhile
            return
        match kind:
            case "key":
                link.store.local.set(order.key.key, order.key.value)
            case "send":
                link.put(partial(link.send_blocks, order.send.block_ids))
            case "fetch":
                link.put(partial(link.fetch, order.fetch))
            case "close":
                link.close()

    def close(self) -> None:
        """Close all links."""
        for link in self._links.values():
            link.close()


class _RelayStore(distributed.Store):  # type: ignore[misc,name-defined]
    """Store of a group of two: the peer's transfer process sets here what this side sets, and the reverse."""

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


class _Link:
    """A group with one peer, and its thread."""

    def __init__(self, copies: GroupCopies, number: int, rank: int, has_room: bool) -> None:
        self._copies = copies
        self._number = number
        self._rank = rank
        self._is_closed = False
        self._scattering = threading.Lock()
        """Held while blocks are written; `close` waits for it."""
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.store = _RelayStore(lambda key, value: self._tell(key=kv_pb2.StoreKey(key=key, value=value)))
        self._group: Any = None  # torch's stubs know neither `send` nor `recv`
        num_blocks, block_bytes = copies.pool.shape
        self._batch_size = min(num_blocks, max(1, BUFFER_BYTES // block_bytes))
        self._buffers: list[torch.Tensor] = []
        self._thread = threading.Thread(target=self._run, args=(has_room,), name=f"kv-link-{number}", daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def put(self, job: Callable[[], None]) -> None:
        """Queue a job for the thread."""
        self._jobs.put(job)

    def close(self) -> None:
        """Write no block any more, and end the group as soon as its thread gets to it."""
        self._is_closed = True
        with self._scattering:  # the batch that is being written is the last
            pass
        self._jobs.put(None)

    def _run(self, has_room: bool) -> None:
        try:
            with self._on_stream():
                if not has_room:
                    raise RuntimeError(f"{MAX_GROUPS} groups exist")
                self._open()
                while (job := self._jobs.get()) is not None:
                    job()
        except Exception as error:
            if not self._is_closed:
                _log.warning("a process group for KV is lost: %s", error)
                self._tell(lost=f"{type(error).__name__}: {error}"[:1000])
        finally:
            if self._copies.pool.is_cuda and self._group is not None:
                self._group.abort()  # ends what is in flight; only then may the buffers go
            self._group = None
            self._buffers = []

    def _open(self) -> None:
        num_bytes = self._batch_size * (_GENERATION_BYTES + self._copies.pool.shape[1])
        device = self._copies.pool.device
        self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        timeout = timedelta(seconds=BATCH_TIMEOUT_S)
        if device.type == "cuda":
            # By default torch ends the process when a group fails, as that of a lost peer does.
            os.environ.update(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_ENABLE_MONITORING="0")
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = distributed.ProcessGroupNCCL(self.store, self._rank, 2, options)
        else:
            self._group = distributed.ProcessGroupGloo(self.store, self._rank, 2, timeout)

    def send_blocks(self, block_ids: Sequence[int]) -> None:
        """Send blocks, each batch with its generations."""
        works: list[Any] = []
        for index, batch in enumerate(self._batches(block_ids)):
            if index >= 2:
                self._wait(works[index - 2])
            message, blocks = self._message(index, len(batch))
            for slot, block_id in enumerate(batch):
                blocks[slot].copy_(self._copies.pool[block_id], non_blocking=True)
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
        self._tell(fetched=Fetched(generations=generations))

    def _receive(self, index: int, num_blocks: int) -> Any:
        return self._group.recv([self._message(index, num_blocks)[0]], 1 - self._rank, 0)

    def _scatter(self, blocks: torch.Tensor, targets: Sequence[int]) -> None:
        with self._scattering:
            if self._is_closed:
                raise RuntimeError("the link is closed")
            for slot, block_id in enumerate(targets):
                self._copies.pool[block_id].copy_(blocks[slot], non_blocking=True)
            self._synchronize()

    def _batches(self, block_ids: Sequence[int]) -> Iterator[Sequence[int]]:
        for start in range(0, len(block_ids), self._batch_size):
            yield block_ids[start : start + self._batch_size]

    def _message(self, index: int, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Message of a batch, in one of the buffers, and the blocks in it: ``[num_blocks, block_bytes]``."""
        block_bytes = self._copies.pool.shape[1]
        message = self._buffers[index % 2][: num_blocks * (_GENERATION_BYTES + block_bytes)]
        return message, message[num_blocks * _GENERATION_BYTES :].view(num_blocks, block_bytes)

    def _wait(self, work: Any) -> None:
        if self._copies.pool.is_cuda:  # where `wait` only orders the stream
            deadline_s = time.monotonic() + BATCH_TIMEOUT_S
            while not work.is_completed():
                if self._is_closed or time.monotonic() > deadline_s:
                    raise TimeoutError(f"the peer took more than {BATCH_TIMEOUT_S} s for a batch")
                time.sleep(_POLL_S)
        work.wait(timedelta(seconds=BATCH_TIMEOUT_S))

    def _on_stream(self) -> AbstractContextManager[object]:
        stack = ExitStack()
        if self._copies.pool.is_cuda:
            stack.enter_context(torch.cuda.device(self._copies.pool.device))
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream()))  # type: ignore[no-untyped-call]
        return stack

    def _synchronize(self) -> None:
        if self._copies.pool.is_cuda:
            torch.cuda.current_stream().synchronize()

    def _tell(self, **body: Any) -> None:
        self._copies.send(EngineToTransfer(link_event=LinkEvent(link_id=self._number, **body)))
