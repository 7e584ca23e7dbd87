"""Bans, bias and penalties against their formulas, written out token by token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.contracts.request import SamplingParams
from pdserve.model.sampling import SamplingRow, sample
from pdserve.model.token_counts import TokenCounts

VOCAB_SIZE = 12
tokens = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=8)


def edited_by_hand(
    logits: Sequence[float], params: SamplingParams, prompt: list[int], answer: list[int], banned: list[int]
) -> list[float]:
    edited = []
    for token, logit in enumerate(logits):
        logit = -torch.inf if token in banned else logit + dict(params.logit_bias).get(token, 0)
        if token in prompt or token in answer:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * answer.count(token)
        logit -= params.presence_penalty * (token in answer)
        edited.append(logit)
    return edited


@settings(max_examples=80)
@given(
    # Multiples of powers of two, so that every operation is exact and ties are real.
    logits=st.lists(st.integers(-16, 16).map(lambda n: n / 4), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE),
    prompt=tokens,
    answer=tokens,
    banned=tokens,
    bias=st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.sampled_from([-100.0, -1.5, 0.25, 3.0]), max_size=4),
    repetition=st.sampled_from([0.5, 1.0, 2.0]),
    presence=st.sampled_from([-2.0, 0.0, 0.5]),
    frequency=st.sampled_from([-0.25, 0.0, 1.0]),
)
def test_the_best_token_is_that_of_the_formulas(
    logits: list[float],
    prompt: list[int],
    answer: list[int],
    banned: list[int],
    bias: dict[int, float],
    repetition: float,
    presence: float,
    frequency: float,
) -> None:
    params = SamplingParams(
        temperature=0,
        logit_bias=tuple(bias.items()),
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        num_logprobs=VOCAB_SIZE,
    )
    counts = TokenCounts.of([*prompt, *answer], len(prompt)) if params.has_penalties else None
    logits_BV = torch.tensor([logits, logits])
    plain = SamplingRow(SamplingParams(temperature=0, num_logprobs=VOCAB_SIZE), 0)
    [[token], [untouched]] = sample(logits_BV, [SamplingRow(params, 0, 0, 1, banned, counts), plain])
    expected = edited_by_hand(logits, params, prompt, answer, banned)
    assert logits_BV[0].tolist() == expected
    assert token.token == expected.index(max(expected))
    # Log probabilities are those of the logits as they came.
    assert token.logprobs is not None
    assert untouched.logprobs is not None
    assert token.logprobs.top == untouched.logprobs.top
    assert token.logprobs.logprob == dict(untouched.logprobs.top)[token.token]


def test_extreme_penalties_leave_logits_that_can_be_sampled() -> None:
    logits_BV = torch.tensor([[3e38, -3e38, 0.0, -torch.inf]])
    params = SamplingParams(repetition_penalty=0.01, presence_penalty=-2, frequency_penalty=-2, seed=1)
    [[sampled]] = sample(logits_BV, [SamplingRow(params, 0, counts=TokenCounts.of([0, 1, 2, 3], 2))])
    assert sampled.token == 0
    assert not logits_BV.isnan().any()


def test_a_row_in_which_everything_is_banned_is_refused() -> None:
    with pytest.raises(RuntimeError, match="row 0: -inf"):
        sample(torch.zeros(1, 3), [SamplingRow(SamplingParams(), 0, banned_tokens=[0, 1, 2])])
