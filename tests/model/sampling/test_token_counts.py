"""Counts kept from step to step are those of the whole history, whatever happens to a sequence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.model.sampling.token_counts import TokenCountCache, TokenCounts


def as_dict(counts: TokenCounts) -> dict[int, int]:
    return dict(zip(counts.tokens.tolist(), counts.in_answer.tolist(), strict=True))


def expected(tokens: Sequence[int], num_prompt: int) -> dict[int, int]:
    return {**dict.fromkeys(tokens[:num_prompt], 0), **dict.fromkeys(tokens, 0), **Counter(tokens[num_prompt:])}


steps = st.lists(st.tuples(st.integers(1, 20), st.booleans()), min_size=1, max_size=12)


@settings(max_examples=60)
@given(
    prompt=st.lists(st.integers(0, 6), min_size=1, max_size=40),
    answer=st.lists(st.integers(0, 9), min_size=60, max_size=60),
    steps=steps,
)
def test_counts_that_grow_are_those_of_the_whole(
    prompt: list[int], answer: list[int], steps: list[tuple[int, bool]]
) -> None:
    cache, tokens = TokenCountCache(), [*prompt, *answer]
    end = len(prompt)
    for num_new, is_ahead in steps:
        newest = tokens[end] if is_ahead and end < len(tokens) else None
        counts = cache.counts(7, tokens[:end], len(prompt), newest)
        assert as_dict(counts) == expected(tokens[: end + (newest is not None)], len(prompt))
        end = min(end + num_new, len(tokens))


def test_a_long_history_is_read_once() -> None:
    cache, history = TokenCountCache(), list(range(50))
    counts = cache.counts(0, history, 50, 7)
    for newest in 8, 9, 10:
        history.append(newest - 1)
        assert cache.counts(0, history, 50, newest) is counts
    assert cache.num_tokens == 50


def test_another_sequence_under_the_same_number_is_counted_afresh() -> None:
    cache = TokenCountCache()
    first = [1, 2, 3, 4, 5, 6]
    cache.counts(0, first, 3)
    for other, num_prompt in ([9, 8, 7], 2), ([1, 2, 3, 4, 5, 7, 8], 3), ([1, 2, 3, 4, 5, 7, 8], 4), ([1, 2], 1):
        assert as_dict(cache.counts(0, other, num_prompt)) == expected(other, num_prompt)


def test_a_sequence_that_went_back_is_counted_afresh() -> None:
    cache = TokenCountCache()
    cache.counts(0, [1, 2, 3], 1, 4)
    assert as_dict(cache.counts(0, [1, 2], 1, 5)) == expected([1, 2, 5], 1)


def test_sequences_are_forgotten_oldest_first_and_the_sum_stays_bounded() -> None:
    cache = TokenCountCache(max_tokens=10)
    for sequence_id in range(4):
        cache.counts(sequence_id, [1, 2, 3, 4], 4)
        assert cache.num_tokens <= 10
    assert as_dict(cache.counts(5, range(30), 30)) == expected(range(30), 30)
    assert cache.num_tokens == 30
    cache.counts(6, [1], 1)
    assert cache.num_tokens == 1


def test_of_many_short_sequences_the_latest_are_kept() -> None:
    cache = TokenCountCache(max_sequences=3)
    for sequence_id in range(20):
        cache.counts(sequence_id, [7], 1)
    assert cache.num_tokens == 3
