"""Tokens that are drawn where the logits are, are those that the host draws."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.contracts.request import SamplingParams
from pdserve.contracts.step import StepRow
from pdserve.kernels.selection import TORCH_DEVICE_SAMPLING
from pdserve.model.device_sampling import is_plain, plan_draws, sample_on_device
from pdserve.model.sampling import SamplingRow, sample

VOCAB_SIZE = 97


def sampling_row(params: SamplingParams, position: int, choice: int = 0) -> StepRow:
    return StepRow(
        sequence_id=0,
        tokens=[1],
        cached_length=0,
        block_table=[0],
        sample=params,
        sample_position=position,
        choice=choice,
    )


def on_device(logits_BV: torch.Tensor, rows: list[StepRow]) -> list[int]:
    plan = plan_draws(rows, logits_BV.shape[1])
    best_B, token_B = logits_BV.max(dim=-1)
    words = torch.from_numpy(plan.words)
    sample_on_device(logits_BV, best_B, token_B, plan, words, TORCH_DEVICE_SAMPLING)
    tokens: list[int] = token_B.tolist()
    return tokens


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-9, 0.5, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 5, VOCAB_SIZE, 10**9]),
    top_p=st.sampled_from([1.0, 0.999, 0.8, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


@given(
    st.lists(st.tuples(params, st.integers(0, 2**31 - 1), st.integers(0, 127)), min_size=1, max_size=12),
    st.sampled_from([0.3, 3.0, 30.0]),
    st.integers(0, 1000),
)
@settings(max_examples=150)
def test_tokens_are_those_of_the_host(
    given_rows: list[tuple[SamplingParams, int, int]], scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits_BV = (torch.randn(len(given_rows), VOCAB_SIZE, generator=generator) * scale).round(decimals=1)
    logits_BV[:, ::5] = -torch.inf
    rows = [sampling_row(*row) for row in given_rows]
    expected = sample(logits_BV.clone(), [SamplingRow(*row) for row in given_rows])
    assert on_device(logits_BV, rows) == [tokens[0].token for tokens in expected]


def test_rows_of_all_kinds_are_drawn_together() -> None:
    """Of hundreds of rows many would differ if one parameter of any went to another."""
    logits_BV = torch.randn(400, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    drawn = []
    for index in range(400):
        options = {"top_k": (0, 3, 20)[index % 3], "top_p": (1.0, 0.7)[index % 2], "min_p": (0.0, 0.1)[index // 3 % 2]}
        temperature = (0.0, 0.7, 1.5)[index // 2 % 3]
        drawn.append((SamplingParams(temperature=temperature, seed=index * 2**55, **options), index))  # type: ignore[arg-type]
    expected = sample(logits_BV.clone(), [SamplingRow(*row) for row in drawn])
    assert on_device(logits_BV, [sampling_row(*row) for row in drawn]) == [tokens[0].token for tokens in expected]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_of_logits_that_are_not_finite_some_token_comes(value: float) -> None:
    logits_BV = torch.full((2, VOCAB_SIZE), value)
    rows = [sampling_row(SamplingParams(), 3), sampling_row(SamplingParams(top_p=0.5, top_k=3), 3)]
    assert all(0 <= token < VOCAB_SIZE for token in on_device(logits_BV, rows))


def test_rows_that_need_more_are_left_to_the_host() -> None:
    assert is_plain(sampling_row(SamplingParams(top_k=3, top_p=0.5, min_p=0.1, temperature=2.0), 0))
    edited: list[SamplingParams] = [
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(presence_penalty=0.1),
        SamplingParams(frequency_penalty=0.1),
        SamplingParams(logit_bias=((1, 2.0),)),
        SamplingParams(num_logprobs=0),
    ]
    for changed in edited:
        assert not is_plain(sampling_row(changed, 0))
    for name, value in (("banned_tokens", [1]), ("num_choices", 2)):
        row = sampling_row(SamplingParams(), 0)
        setattr(row, name, value)
        assert not is_plain(row)
