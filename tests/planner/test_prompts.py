from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.contracts.block_hash import block_hash, block_hashes
from pdserve.planner.prompts import Prompt, PromptBook, shares_prefixes
from pdserve.planner.requests import Segment, SimulatedRequest

BLOCK_SIZE = 16


def a_request(*segments: Segment, num_before: int = 0) -> SimulatedRequest:
    num_tokens = num_before + sum(segment.num_tokens for segment in segments)
    return SimulatedRequest(0.0, num_tokens, 20, segments)


def assert_hashed(prompt: Prompt) -> None:
    assert list(prompt.block_hashes) == block_hashes(prompt.tokens, BLOCK_SIZE)


SEGMENTS = st.lists(st.builds(Segment, st.integers(0, 3), st.integers(1, 70)), min_size=1, max_size=5)


@given(st.lists(SEGMENTS, min_size=1, max_size=6))
def test_hashes_are_those_of_the_tokens(prompts: list[list[Segment]]) -> None:
    book = PromptBook(is_sharing=True, block_size=BLOCK_SIZE)
    for segments in prompts:
        assert_hashed(book.write(a_request(*segments)))


def test_equal_segments_are_equal_tokens() -> None:
    book = PromptBook(is_sharing=True, block_size=BLOCK_SIZE)
    first, second, other = (
        book.write(a_request(Segment(content, 100), Segment(50 + n, 30))) for n, content in enumerate((7, 7, 8))
    )
    assert first.tokens[:100] == second.tokens[:100]
    assert set(first.tokens[100:]).isdisjoint(second.tokens[100:])
    assert set(first.tokens).isdisjoint(other.tokens)


def test_a_prompt_without_segments_shares_nothing() -> None:
    book = PromptBook(is_sharing=True, block_size=BLOCK_SIZE)
    first, second = (book.write(SimulatedRequest(0.0, 70, 5)) for _ in range(2))
    assert set(first.tokens).isdisjoint(second.tokens)
    assert len({*first.block_hashes, *second.block_hashes}) == 2 * 4


def test_blocks_after_a_private_segment_are_chained_to_it() -> None:
    """A worker goes on hashing where the prompt ends, and comes to the next turn's hashes."""
    book = PromptBook(is_sharing=True, block_size=BLOCK_SIZE)
    first = book.write(SimulatedRequest(0.0, 70, 5))
    answered = book.answered(first, 30)
    assert answered.block_hashes[:4] == first.block_hashes
    fifth = block_hash(first.block_hashes[-1], [*first.tokens[64:], *[0] * 10])
    assert answered.block_hashes[4:] == (fifth, block_hash(fifth, [0] * BLOCK_SIZE))


def test_the_next_turn_begins_with_the_last_one_and_its_answer() -> None:
    book = PromptBook(is_sharing=True, block_size=BLOCK_SIZE)
    first = book.write(a_request(Segment(1, 50)))
    answered = book.answered(first, 20)
    second = book.write(a_request(Segment(2, 30), num_before=70), answered)
    assert second.tokens[:70] == (*first.tokens, *[0] * 20)
    assert len(second.tokens) == 100
    assert_hashed(answered)
    assert_hashed(second)


def test_a_workload_that_shares_nothing_needs_no_hashes() -> None:
    request = SimulatedRequest(0.0, 64, 5)
    assert not shares_prefixes([request])
    assert shares_prefixes([request, a_request(Segment(1, 5))])
    assert shares_prefixes([SimulatedRequest(0.0, 64, 5, (), request)])
    assert PromptBook(is_sharing=False, block_size=BLOCK_SIZE).write(request).block_hashes == ()
