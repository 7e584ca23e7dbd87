"""The most likely tokens against a sort, and prompts in pieces against the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.model.sampling.logprobs import logprobs_in_pieces, most_likely, raw_logprobs


@settings(max_examples=60)
@given(
    rows=st.lists(st.lists(st.sampled_from([-1.0, 0.0, 2.0]), min_size=9, max_size=9), min_size=1, max_size=4),
    num_tokens=st.integers(0, 9),
)
def test_the_most_likely_come_highest_first_and_equals_by_id(rows: list[list[float]], num_tokens: int) -> None:
    expected = [sorted(range(9), key=lambda token: (-row[token], token))[:num_tokens] for row in rows]
    assert most_likely(torch.tensor(rows), num_tokens).tolist() == expected


def test_rows_may_ask_for_different_numbers() -> None:
    logits_RV = torch.tensor([[0.0, 1.0, 2.0]]).expand(3, -1)
    raw = raw_logprobs(logits_RV, [0, 2, 7])
    assert [[token for token, _ in top] for top in raw.top] == [[], [2, 1], [2, 1, 0]]
    first, second, third = raw.of([1, 0, 2])
    assert (first.top, second.top) == ((), third.top[:2])
    assert (first.logprob, second.logprob, third.logprob) == (third.top[1][1], third.top[2][1], third.top[0][1])


def test_many_tokens_are_computed_in_pieces_and_give_what_the_whole_gives() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden_TE = torch.randn(300, 8, generator=generator)
    head_EV = torch.randn(8, 50, generator=generator)
    num_rows = []

    def logits_of(hidden_RE: torch.Tensor) -> torch.Tensor:
        num_rows.append(len(hidden_RE))
        return hidden_RE @ head_EV

    tokens = [token % 50 for token in range(300)]
    entries = logprobs_in_pieces(logits_of, hidden_TE, tokens, 2)
    assert (max(num_rows) <= 128, sum(num_rows), len(entries)) == (True, 300, 300)
    expected_TV = (hidden_TE @ head_EV).log_softmax(dim=-1)
    for token, expected_V, entry in zip(tokens, expected_TV, entries, strict=True):
        assert entry.logprob == pytest.approx(expected_V[token].item(), abs=1e-5)
        assert [id_ for id_, _ in entry.top] == expected_V.topk(2).indices.tolist()
