from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.planner.workload.conversations import Conversations, SystemPrompts, Turns
from pdserve.planner.workload.lengths import FixedLengths, QuantileLengths
from pdserve.planner.workload.requests import SimulatedRequest

LENGTHS = QuantileLengths(shares=(0, 1), num_prompt_tokens=(5, 50), num_output_tokens=(1, 20))


def turns_of(conversation: SimulatedRequest) -> Iterator[SimulatedRequest]:
    turn: SimulatedRequest | None = conversation
    while turn is not None:
        yield turn
        turn = turn.follow_up


@settings(max_examples=60)
@given(
    system_prompts=st.none() | st.builds(SystemPrompts, st.integers(1, 5), st.integers(1, 100), st.floats(0, 3)),
    turns=st.builds(Turns, st.floats(1, 10), st.floats(0, 5)),
    num_requests=st.integers(1, 200),
    seed=st.integers(0, 2**32),
)
def test_conversations_add_up(system_prompts: SystemPrompts | None, turns: Turns, num_requests: int, seed: int) -> None:
    contents = Conversations(lengths=LENGTHS, system_prompts=system_prompts, turns=turns)
    conversations = contents.draw(num_requests, seed)
    assert conversations == contents.draw(num_requests, seed)
    assert sum(1 for each in conversations for _ in turns_of(each)) == num_requests
    num_shared = system_prompts.num_tokens if system_prompts else 0
    for conversation in conversations:
        assert conversation.arrived_s == 0
        if system_prompts:
            assert sum(segment.num_tokens for segment in conversation.segments) == conversation.num_prompt_tokens
        num_before = num_shared
        for turn in turns_of(conversation):
            assert 5 <= turn.num_prompt_tokens - num_before <= 50
            assert turn.arrived_s >= 0
            num_before = turn.num_prompt_tokens + turn.num_output_tokens


def test_turns_and_think_times_have_their_means() -> None:
    conversations = Conversations(lengths=FixedLengths(10, 10), turns=Turns(4, 2.5)).draw(50_000, 0)
    assert 50_000 / len(conversations) == pytest.approx(4, rel=0.03)
    think_s = [turn.arrived_s for each in conversations for turn in list(turns_of(each))[1:]]
    assert np.mean(think_s) == pytest.approx(2.5, rel=0.03)


def test_system_prompts_are_as_popular_as_zipf_says() -> None:
    contents = Conversations(lengths=FixedLengths(10, 10), system_prompts=SystemPrompts(4, 100, 1.0))
    kinds = Counter(each.segments[0].content for each in contents.draw(50_000, 0))
    expected = np.array([1, 1 / 2, 1 / 3, 1 / 4]) / (25 / 12)
    np.testing.assert_allclose([kinds[kind] / 50_000 for kind in range(4)], expected, rtol=0.05)


def test_messages_of_conversations_are_their_own() -> None:
    contents = Conversations(lengths=FixedLengths(10, 10), system_prompts=SystemPrompts(3, 100))
    messages = [each.segments[1].content for each in contents.draw(500, 0)]
    assert len(set(messages)) == 500
    assert min(messages) == 3
