from __future__ import annotations

import pytest

from pdserve.planner.workload.conversations import Conversations, SystemPrompts, Turns
from pdserve.planner.workload.lengths import FixedLengths
from pdserve.planner.workload.requests import Segment, SimulatedRequest
from pdserve.planner.workload.workload import Workload
from pdserve.planner.workload.workload_statistics import measure


def asking(*segments: tuple[int, int], follow_up: SimulatedRequest | None = None) -> SimulatedRequest:
    return SimulatedRequest(
        0.0, sum(length for _, length in segments), 10, tuple(Segment(*each) for each in segments), follow_up
    )


def test_lengths_of_every_turn_count() -> None:
    conversation = asking((1, 100), follow_up=SimulatedRequest(1.0, 150, 30))
    statistics = measure([conversation, SimulatedRequest(0.0, 50, 2)])
    assert statistics.num_prompt_tokens.tolist() == [100, 150, 50]
    assert statistics.num_output_tokens.tolist() == [10, 30, 2]
    assert statistics.num_cacheable_tokens.tolist() == [0, 110, 0]
    assert statistics.num_requests == 3
    assert statistics.mean_prompt_tokens == 100
    assert statistics.mean_output_tokens == 14
    assert statistics.cacheable_share == pytest.approx(110 / 300)


def test_a_prefix_is_cacheable_as_far_as_it_was_seen_from_the_start() -> None:
    prompts = [
        asking((1, 512), (2, 512), (3, 100)),
        asking((1, 512), (2, 300)),  # a partly filled block
        asking((1, 512), (2, 512), (3, 200)),
        asking((1, 512), (3, 200)),  # the block was seen, but never here
        asking((2, 512)),
        asking((2, 512), (2, 512), (3, 100)),  # and these only after another
        asking((1, 512), (2, 300), (5, 10)),  # after the partly filled one
        asking((1, 512), (2, 300), (5, 10)),
    ]
    statistics = measure(prompts)
    assert statistics.num_cacheable_tokens.tolist() == [0, 812, 1124, 512, 0, 512, 812, 822]


def test_system_prompts_and_turns_are_cacheable() -> None:
    contents = Conversations(lengths=FixedLengths(100, 100), system_prompts=SystemPrompts(2, 1000), turns=Turns(1.0))
    statistics = Workload(name="w", contents=contents).draw(2000).statistics()
    assert statistics.cacheable_share == pytest.approx(1000 / 1100 * 1998 / 2000)
