from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.contracts.block_hash import block_hashes
from pdserve.contracts.events import RequestKey
from pdserve.contracts.request import FinishReason, GenerationRequest, SamplingParams
from pdserve.engine.scheduling.sequence import LOOKAHEAD_TOKENS, Sequence, sum_blocks_missing


def a_sequence(
    prompt: tuple[int, ...] = (1, 2, 3),
    emitted: tuple[int, ...] = (),
    *,
    max_tokens: int = 8,
    block_size: int = 4,
    cache_salt: bytes = b"",
    sampling: SamplingParams | None = None,
) -> Sequence:
    request = GenerationRequest(
        request_id=0,
        prompt_tokens=prompt,
        emitted_tokens=emitted,
        sampling=sampling or SamplingParams(max_tokens=max_tokens),
        cache_salt=cache_salt,
    )
    return Sequence(
        sequence_id=0,
        key=RequestKey(0, 0, 0),
        request=request,
        arrived_s=0.0,
        block_size=block_size,
        is_handoff=False,
        max_length=len(prompt) + max_tokens,
        stop_token_ids=frozenset((99,)),
        early_end_ids=(99,),
    )


def test_a_replay_goes_on_after_the_emitted_tokens() -> None:
    sequence = a_sequence((1, 2, 3), (4, 5))
    assert sequence.tokens == [1, 2, 3, 4, 5]
    assert sequence.num_answered == 2


def test_prompt_logprobs_are_wanted_until_a_token_is_answered() -> None:
    sampling = SamplingParams(max_tokens=8, num_prompt_logprobs=0)
    fresh, answering = a_sequence(sampling=sampling), a_sequence(sampling=sampling)
    answering.append(5)
    others = [fresh, answering, a_sequence(emitted=(4,), sampling=sampling), a_sequence()]
    assert [sequence.wants_prompt_logprobs for sequence in others] == [True, False, False, False]


def test_the_limit_counts_all_attempts() -> None:
    sequence = a_sequence((1, 2, 3), (4, 5), max_tokens=4)
    assert sequence.append(6) is FinishReason.NONE
    assert sequence.append(7) is FinishReason.LENGTH


def test_a_stop_token_at_the_limit_is_a_stop() -> None:
    assert a_sequence(max_tokens=1).append(99) is FinishReason.STOP


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 5), st.binary(max_size=3))
def test_hashes_grow_with_the_tokens_as_if_computed_at_once(tokens: list[int], block_size: int, salt: bytes) -> None:
    sequence = a_sequence((7,), max_tokens=100, block_size=block_size, cache_salt=salt)
    for token in tokens:
        sequence.append(token)
        num_full = len(sequence.tokens) // block_size
        assert sequence.block_hashes(num_full) == block_hashes(sequence.tokens, block_size, salt)
        assert sequence.block_hashes(num_full, 2) == sequence.block_hashes(num_full)[2:]
    assert sequence.block_hashes(0) == []


def test_blocks_to_start_with_leave_room_for_one_more_as_far_as_it_can_need() -> None:
    assert a_sequence(tuple(range(8)), max_tokens=100).num_blocks_with_headroom() == 3
    assert a_sequence(tuple(range(8)), max_tokens=1).num_blocks_with_headroom() == 2


def test_expected_blocks_follow_the_answer_so_far_within_its_limit() -> None:
    start, block_size = 8, 4
    fresh = a_sequence(tuple(range(start)), max_tokens=1000)
    assert fresh.num_blocks_expected() == (start + LOOKAHEAD_TOKENS) // block_size
    long = a_sequence(tuple(range(start)), tuple(range(200)), max_tokens=1000)
    assert long.num_blocks_expected() == (start + 2 * 200) // block_size
    ending = a_sequence(tuple(range(start)), tuple(range(200)), max_tokens=205)
    assert ending.num_blocks_expected() == (start + 204) // block_size


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 150), st.integers(1, 150), st.integers(0, 60))))
def test_missing_blocks_are_those_expected_and_not_held(cases: list[tuple[int, int, int, int]]) -> None:
    sequences, num_missing = [], 0
    for num_prompt, num_emitted, num_more, num_held in cases:
        sequence = a_sequence((1,) * num_prompt, (2,) * num_emitted, max_tokens=num_emitted + num_more)
        sequence.start_at([], range(num_held))
        sequences.append(sequence)
        num_missing += max(0, sequence.num_blocks_expected() - num_held)
    assert sum_blocks_missing(sequences) == num_missing


def test_blocks_found_in_the_cache_count_as_written() -> None:
    sequence = a_sequence(tuple(range(10)))
    sequence.start_at([5, 6], [7])
    assert [*sequence.block_table] == [5, 6, 7]
    assert (sequence.num_computed, sequence.num_written, sequence.num_uncomputed) == (8, 8, 2)
    assert [*sequence.lose_blocks()] == [5, 6, 7]
    assert (sequence.num_computed, sequence.num_written, [*sequence.block_table]) == (0, 0, [])
