"""Which channels a rank opens, and where it receives."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from pdserve.model.config.sharding import Place
from pdserve.model.decoder.ranks import Ranks


class FakeChannel:
    def send(self, x: torch.Tensor) -> None: ...

    def receive(self, x: torch.Tensor) -> None: ...

    def limit_waits(self, seconds: float) -> None: ...


@pytest.mark.parametrize(("tensor_parallel", "pipeline_parallel"), [(1, 2), (2, 2), (2, 3), (3, 4)])
def test_a_channel_has_two_ends_and_ranks_open_them_in_one_order(tensor_parallel: int, pipeline_parallel: int) -> None:
    num_ends: Counter[int] = Counter()
    for rank in range(tensor_parallel * pipeline_parallel):
        receivers: list[int] = []

        def channels(receiver: int, receivers: list[int] = receivers) -> list[FakeChannel]:
            receivers.append(receiver)
            return [FakeChannel()] * pipeline_parallel

        ranks = Ranks(Place.of(rank, tensor_parallel, pipeline_parallel), None, channels)
        ranks.send(torch.zeros(1), pipeline_parallel - 1)
        assert receivers == sorted(receivers)
        num_ends.update(receivers)
    in_later_stages = range(tensor_parallel, tensor_parallel * pipeline_parallel)
    assert num_ends == dict.fromkeys([0, *in_later_stages], 2)


def test_what_is_received_is_on_the_rank_s_device() -> None:
    ranks = Ranks(Place(0, 1, 1, 2), None, lambda rank: [FakeChannel()] * 2, device=torch.device("meta"))
    x = ranks.receive((3, 4), torch.bfloat16, 1)
    assert (x.shape, x.dtype, x.device.type) == ((3, 4), torch.bfloat16, "meta")
