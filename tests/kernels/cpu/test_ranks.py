"""What ranks exchange: complete, in order, and in pieces where it is large."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest
import torch

from pdserve.kernels.cpu import ranks
from pdserve.kernels.cpu.ranks import Group, RankMemory


def on_every_rank(num_ranks: int, call: Callable[[Group, int], torch.Tensor]) -> list[torch.Tensor]:
    """What ``call`` returns on each rank; each runs in a thread."""
    memory = RankMemory(num_ranks)
    fd = memory.create()
    results: dict[int, torch.Tensor] = {}

    def run(rank: int) -> None:
        results[rank] = call(memory.group(fd, 0, rank), rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(fd)
    return [results[rank] for rank in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 1000, ranks._SLOT_BYTES // 2 + 3])
def test_sums_have_the_same_bits_everywhere(num_ranks: int, count: int) -> None:
    torch.manual_seed(1)
    inputs = torch.randn(5, num_ranks, count)

    def call(group: Group, rank: int) -> torch.Tensor:
        sums = inputs[:, rank].clone()
        for x in sums:
            group.sum_(x)
        return sums

    expected = inputs[:, 0].clone()
    for rank in range(1, num_ranks):
        expected += inputs[:, rank]
    for sums in on_every_rank(num_ranks, call):
        assert torch.equal(sums, expected)


@pytest.mark.parametrize("shape", [(3,), (7, ranks._SLOT_BYTES // 16)])
def test_every_rank_gets_every_part(shape: tuple[int, ...]) -> None:
    parts = torch.arange(2 * torch.Size(shape).numel()).view(2, *shape)
    for gathered in on_every_rank(2, lambda group, rank: group.gather(parts[rank])):
        assert torch.equal(gathered, parts)


@pytest.mark.parametrize("message_bytes", [0, 4 * ranks._SLOT_BYTES], ids=["one slot", "slots for most messages"])
def test_messages_arrive_in_order_whatever_their_size(message_bytes: int) -> None:
    memory = RankMemory(1, 2, message_bytes)
    fd = memory.create()
    near, other = memory.channels(fd, 1)
    far, _ = memory.channels(fd, 1)
    os.close(fd)
    counts = [1, ranks._SLOT_BYTES // 4, 5 * ranks._SLOT_BYTES // 4 + 1, 3, 2 * ranks._SLOT_BYTES] * 3
    messages = [torch.arange(index, index + count, dtype=torch.int32) for index, count in enumerate(counts)]

    def send() -> None:
        for message in messages:
            near.send(message)

    thread = threading.Thread(target=send)
    thread.start()
    for message in messages:
        received = torch.empty_like(message)
        far.receive(received)
        assert torch.equal(received, message)
    thread.join()
    other.send(torch.ones(1))  # at once: the channel of another micro-batch is empty
