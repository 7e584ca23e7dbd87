from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pdserve.contracts.block_hash import block_hash, block_hashes
from pdserve.planner.workload.prompts import Prompt, PromptTable
from pdserve.planner.workload.requests import Segment, SimulatedRequest

BLOCK_SIZE = 16


def a_request(*segments: Segment, num_before: int = 0) -> SimulatedRequest:
    num_tokens = num_before + sum(segment.num_tokens for segment in segments)
    return SimulatedRequest(0.0, num_tokens, 20, segments)


def assert_hashed(prompt: Prompt) -> None:
    assert list(prompt.block_hashes) == block_hashes(prompt.tokens, BLOCK_SIZE)


SEGMENTS = st.lists(st.builds(Segment, st.integers(0, 9), st.integers(1, 70)), min_size=1, max_size=5)


@given(st.lists(SEGMENTS, min_size=1, max_size=6), st.lists(SEGMENTS, max_size=2))
def test_blocks_are_named_alike_exactly_where_tokens_are(
    turns: list[list[Segment]], later: list[list[Segment]]
) -> None:
    """Those of a second turn, too, whose prompt is the first prompt, an answer, and a message."""
    requests = [a_request(*segments) for segments in turns]
    for index, segments in enumerate(later[: len(turns)]):
        num_before = requests[index].num_prompt_tokens + requests[index].num_output_tokens
        requests[index] = replace(requests[index], follow_up=a_request(*segments, num_before=num_before))
    table = PromptTable(requests, BLOCK_SIZE)
    prompts = []
    for request in requests:
        prompts.append(table.write(request))
        if request.follow_up is not None:
            prompts.append(table.write(request.follow_up, table.answered(prompts[-1], request.num_output_tokens)))
    names = [name for prompt in prompts for name in prompt.block_hashes]
    hashes = [each for prompt in prompts for each in block_hashes(prompt.tokens, BLOCK_SIZE)]
    assert len(names) == len(hashes)
    assert len(set(names)) == len(set(hashes)) == len(set(zip(names, hashes, strict=True)))


@given(st.lists(SEGMENTS, min_size=1, max_size=6))
def test_blocks_of_shared_contents_have_the_hashes_of_their_tokens(prompts: list[list[Segment]]) -> None:
    requests = [a_request(*segments) for segments in prompts]
    table = PromptTable([*requests, *requests], BLOCK_SIZE)
    for request in requests:
        assert_hashed(table.write(request))


def test_equal_segments_are_equal_tokens() -> None:
    requests = [a_request(Segment(content, 100), Segment(50 + n, 30)) for n, content in enumerate((7, 7, 8))]
    table = PromptTable(requests, BLOCK_SIZE)
    first, second, other = map(table.write, requests)
    assert first.tokens[:100] == second.tokens[:100]
    assert set(first.tokens[100:]).isdisjoint(second.tokens[100:])
    assert set(first.tokens).isdisjoint(other.tokens)


def test_a_prompt_without_segments_shares_nothing() -> None:
    request = SimulatedRequest(0.0, 70, 5)
    table = PromptTable([request, request, a_request(Segment(1, 5))], BLOCK_SIZE)
    first, second = (table.write(request) for _ in range(2))
    assert set(first.tokens).isdisjoint(second.tokens)
    assert len({*first.block_hashes, *second.block_hashes}) == 2 * 4


def test_blocks_after_a_private_segment_are_chained_to_it() -> None:
    """A worker goes on hashing where the prompt ends, and comes to the next turn's hashes."""
    request = SimulatedRequest(0.0, 70, 5, (), SimulatedRequest(0.0, 120, 5))
    table = PromptTable([request], BLOCK_SIZE)
    first = table.write(request)
    answered = table.answered(first, 30)
    assert answered.block_hashes[:4] == first.block_hashes
    fifth = block_hash(first.block_hashes[-1], [*first.tokens[64:], *[0] * 10])
    assert answered.block_hashes[4:] == (fifth, block_hash(fifth, [0] * BLOCK_SIZE))


def test_the_next_turn_begins_with_the_last_one_and_its_answer() -> None:
    follow_up = a_request(Segment(2, 30), num_before=70)
    request = replace(a_request(Segment(1, 50)), follow_up=follow_up)
    table = PromptTable([request, request], BLOCK_SIZE)
    first = table.write(request)
    answered = table.answered(first, 20)
    second = table.write(follow_up, answered)
    assert second.tokens[:70] == (*first.tokens, *[0] * 20)
    assert len(second.tokens) == 100
    assert_hashed(answered)
    assert_hashed(second)


def test_a_workload_that_shares_nothing_needs_no_hashes() -> None:
    request = SimulatedRequest(0.0, 64, 5)
    table = PromptTable([request], BLOCK_SIZE)
    assert not table.is_sharing
    assert table.write(request).block_hashes == ()
    assert PromptTable([request, a_request(Segment(1, 5))], BLOCK_SIZE).is_sharing
    assert PromptTable([SimulatedRequest(0.0, 64, 5, (), request)], BLOCK_SIZE).is_sharing
