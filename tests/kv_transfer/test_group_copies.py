"""Two engines' halves of a link in one process, over Gloo."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from pdserve.kv_transfer import group_copies
from pdserve.kv_transfer.group_copies import GroupCopies
from pdserve.proto.v1 import transfer_pb2
from tests.kv_transfer.peer import EVENT_GRACE_S

NUM_BLOCKS, BLOCK_BYTES, BATCH_SIZE = 12, 1 << 16, 2
GENERATIONS = range(100, 100 + NUM_BLOCKS)
TIMEOUT_S = 30.0


@contextmanager
def linked(source: GroupCopies, target: GroupCopies) -> Iterator[SimpleQueue[transfer_pb2.LinkEvent]]:
    """Open both halves of a link; yields their events other than keys."""
    events: SimpleQueue[transfer_pb2.LinkEvent] = SimpleQueue()
    are_open = threading.Event()
    with ExitStack() as stack:
        for side, peer in ((source, target), (target, source)):

            def send(message: transfer_pb2.EngineToTransfer, peer: GroupCopies = peer) -> None:
                event = message.link_event
                if event.HasField("key"):
                    assert are_open.wait(TIMEOUT_S)
                    peer.handle(transfer_pb2.LinkOrder(key=event.key))
                else:
                    events.put(event)

            side.send = send
            stack.callback(side.close)
        for rank, side in enumerate((source, target)):
            side.handle(transfer_pb2.LinkOrder(open_rank=rank))
        are_open.set()
        yield events


def pools() -> list[torch.Tensor]:
    return [torch.randint(256, (NUM_BLOCKS, BLOCK_BYTES), dtype=torch.uint8) for _ in range(2)]


def copy_all(source: GroupCopies, target: GroupCopies) -> None:
    """Order a copy of every block, the last to the first block."""
    source.handle(transfer_pb2.LinkOrder(send=transfer_pb2.GroupSend(block_ids=range(NUM_BLOCKS))))
    order = transfer_pb2.GroupFetch(block_ids=reversed(range(NUM_BLOCKS)), generations=GENERATIONS)
    target.handle(transfer_pb2.LinkOrder(fetch=order))


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(group_copies, "BUFFER_BYTES", BATCH_SIZE * BLOCK_BYTES)


def test_batches_take_turns_in_two_buffers() -> None:
    from_pool, to_pool = pools()
    source, target = (GroupCopies(pool, GENERATIONS) for pool in (from_pool, to_pool))
    with linked(source, target) as events:
        copy_all(source, target)
        event = events.get(timeout=TIMEOUT_S)
        assert list(event.fetched.generations) == list(GENERATIONS), event
        assert torch.equal(to_pool, from_pool.flip(0))


class GatedPool:
    """A pool whose last block is written only once the gate opens."""

    def __init__(self, pool: torch.Tensor) -> None:
        self._pool = pool
        self.is_reached, self.gate = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def __getitem__(self, block_id: int) -> torch.Tensor:
        if block_id == NUM_BLOCKS - 1:
            self.is_reached.set()
            assert self.gate.wait(TIMEOUT_S)
        return self._pool[block_id]


def test_a_link_is_closed_once_the_batch_that_is_being_written_has_been() -> None:
    from_pool, to_pool = pools()
    before = to_pool.clone()
    gated: Any = GatedPool(to_pool)
    source, target = GroupCopies(from_pool, GENERATIONS), GroupCopies(to_pool, GENERATIONS)
    target.pool = gated
    with linked(source, target):
        copy_all(source, target)
        assert gated.is_reached.wait(TIMEOUT_S)
        closing = threading.Thread(target=target.close)
        closing.start()
        closing.join(EVENT_GRACE_S)
        assert closing.is_alive()
        gated.gate.set()
        closing.join(TIMEOUT_S)
        time.sleep(EVENT_GRACE_S)
        assert torch.equal(to_pool[-BATCH_SIZE:], from_pool[:BATCH_SIZE].flip(0))
        assert torch.equal(to_pool[:-BATCH_SIZE], before[:-BATCH_SIZE])
