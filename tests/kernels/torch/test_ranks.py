"""What ranks exchange through a process group: complete, of the same bits everywhere, with no port of a store."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import distributed

from pdserve.kernels.torch.ranks import Channel, Group, create_meeting_file
from tests.patience import HANG_S

CPU = torch.device("cpu")


def on_every_rank(num_ranks: int, call: Callable[[Group, int], torch.Tensor]) -> list[torch.Tensor]:
    """What ``call`` returns on each rank; each runs in a thread."""
    fd = create_meeting_file()

    def run(rank: int) -> torch.Tensor:
        return call(Group(fd, "ranks", rank, num_ranks, CPU), rank)

    with ThreadPoolExecutor(num_ranks) as threads:
        results = list(threads.map(run, range(num_ranks)))
    os.close(fd)
    return results


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sums_have_the_same_bits_everywhere(num_ranks: int) -> None:
    torch.manual_seed(1)
    inputs = torch.randn(num_ranks, 7, 1001)

    def call(group: Group, rank: int) -> torch.Tensor:
        x = inputs[rank].clone()
        group.sum_(x)
        return x

    sums = on_every_rank(num_ranks, call)
    torch.testing.assert_close(sums[0], inputs.sum(0))
    assert all(torch.equal(x, sums[0]) for x in sums)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16])
def test_every_rank_gets_every_part(dtype: torch.dtype) -> None:
    parts = torch.arange(42).view(2, 7, 3).to(dtype)
    for gathered in on_every_rank(2, lambda group, rank: group.gather(parts[rank])):
        assert torch.equal(gathered, parts)


def test_a_limited_wait_ends() -> None:
    has_ended = threading.Event()

    def call(group: Group, rank: int) -> torch.Tensor:
        group.limit_waits(0.1)
        if rank == 0:
            with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
                group.sum_(torch.ones(1))
            has_ended.set()
        has_ended.wait(HANG_S)
        return torch.zeros(0)

    on_every_rank(2, call)


def test_messages_arrive_in_order() -> None:
    """Groups that meet through the same file do not mix."""
    messages = [torch.arange(count, dtype=torch.int32) for count in (5, 1, 100_000)]

    def call(group: Group, rank: int) -> torch.Tensor:
        channel = Channel(fd, 7, is_receiver=rank == 1, device=CPU)
        for message in messages:
            if rank == 0:
                channel.send(message)
            else:
                received = torch.empty_like(message)
                channel.receive(received)
                assert torch.equal(received, message)
        return group.gather(torch.tensor(rank))

    fd = create_meeting_file()
    assert on_every_rank(2, call)[0].tolist() == [0, 1]
    os.close(fd)


def test_torch_s_global_group_stays_untouched() -> None:
    on_every_rank(2, lambda group, rank: group.gather(torch.zeros(1)))
    assert not distributed.is_initialized()
