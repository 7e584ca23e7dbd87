"""Two engines' halves of a link in one process, over Gloo."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue
from threading import Event

import pytest
import torch

from pdserve.kv_transfer import group_copies
from pdserve.kv_transfer.group_copies import GroupCopies
from pdserve.proto.v1 import transfer_pb2

NUM_BLOCKS, BLOCK_BYTES, BATCH_SIZE = 12, 1 << 16, 2
SCATTER_S = 0.05
"""Time for which the thread that scatters is busy with something else."""


def test_a_buffer_takes_the_next_batch_only_once_its_blocks_are_in_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(group_copies, "BUFFER_BYTES", BATCH_SIZE * BLOCK_BYTES)
    generations = range(100, 100 + NUM_BLOCKS)
    pools = [torch.randint(256, (NUM_BLOCKS, BLOCK_BYTES), dtype=torch.uint8) for _ in range(2)]
    source, target = (GroupCopies(pool, generations) for pool in pools)
    fetched: SimpleQueue[transfer_pb2.LinkEvent] = SimpleQueue()
    are_open = Event()
    with ExitStack() as stack:
        for side, peer, delay_s in ((source, target, 0.0), (target, source, SCATTER_S)):
            thread = stack.enter_context(ThreadPoolExecutor(1))

            def in_order(
                call: Callable[[], None], thread: ThreadPoolExecutor = thread, delay_s: float = delay_s
            ) -> Future[None]:
                thread.submit(time.sleep, delay_s)
                return thread.submit(call)

            def send(message: transfer_pb2.EngineToTransfer, peer: GroupCopies = peer) -> None:
                event = message.link_event
                if event.HasField("key"):
                    assert are_open.wait(timeout=30)
                    peer.handle(transfer_pb2.LinkOrder(key=event.key))
                else:
                    fetched.put(event)

            side.start(in_order, send)
            stack.callback(side.close)
        for rank, side in enumerate((source, target)):
            side.handle(transfer_pb2.LinkOrder(open_rank=rank))
        are_open.set()
        source.handle(transfer_pb2.LinkOrder(send=transfer_pb2.GroupSend(block_ids=range(NUM_BLOCKS))))
        order = transfer_pb2.GroupFetch(block_ids=reversed(range(NUM_BLOCKS)), generations=generations)
        target.handle(transfer_pb2.LinkOrder(fetch=order))
        event = fetched.get(timeout=30)
        assert list(event.fetched.generations) == list(generations), event
        assert torch.equal(pools[1], pools[0].flip(0))
