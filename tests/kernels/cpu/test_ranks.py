"""Sums and gathers of ranks: complete, in the order of the ranks, and in pieces where they are large."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest
import torch

from pdserve.kernels.cpu import ranks
from pdserve.kernels.cpu.ranks import SharedMemory, create_memory


def on_every_rank(num_ranks: int, call: Callable[[SharedMemory, int], torch.Tensor]) -> list[torch.Tensor]:
    """What ``call`` returns on each rank; each runs in a thread."""
    fd = create_memory(num_ranks)
    results: dict[int, torch.Tensor] = {}

    def run(rank: int) -> None:
        results[rank] = call(SharedMemory(fd, rank, num_ranks), rank)

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

    def call(memory: SharedMemory, rank: int) -> torch.Tensor:
        sums = inputs[:, rank].clone()
        for x in sums:
            memory.sum_(x)
        return sums

    expected = inputs[:, 0].clone()
    for rank in range(1, num_ranks):
        expected += inputs[:, rank]
    for sums in on_every_rank(num_ranks, call):
        assert torch.equal(sums, expected)


@pytest.mark.parametrize("shape", [(3,), (7, ranks._SLOT_BYTES // 16)])
def test_every_rank_gets_every_part(shape: tuple[int, ...]) -> None:
    parts = torch.arange(2 * torch.Size(shape).numel()).view(2, *shape)
    for gathered in on_every_rank(2, lambda memory, rank: memory.gather(parts[rank])):
        assert torch.equal(gathered, parts)
