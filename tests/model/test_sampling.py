"""Sampling: greedy, truncation sets against a sort, draws against the softmax, and independence of the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from pdserve.contracts.request import SamplingParams
from pdserve.contracts.step import SampledToken
from pdserve.model.sampling import SamplingRow, sample
from tests.model.test_truncation import kept_by_sort

GREEDY = SamplingParams(temperature=0)


def sample_each(
    logits_BV: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int], choices: Sequence[int]
) -> list[SampledToken]:
    rows = [SamplingRow(*row) for row in zip(params, positions, choices, strict=True)]
    return [tokens[0] for tokens in sample(logits_BV.clone(), rows)]


def draw(logits_BV: torch.Tensor, params: SamplingParams, positions: Sequence[int], choice: int = 0) -> list[int]:
    num_rows = len(positions)
    sampled = sample_each(logits_BV.expand(num_rows, -1), [params] * num_rows, positions, [choice] * num_rows)
    return [token.token for token in sampled]


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits_BV = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0], [-1.0, -torch.inf, 0.0, 0.0]])
    assert [t.token for t in sample_each(logits_BV, [GREEDY] * 3, [0] * 3, [0] * 3)] == [1, 0, 2]


def test_only_kept_tokens_are_drawn() -> None:
    logits_1V = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(top_k=7, top_p=0.8, seed=5)
    assert set(draw(logits_1V, params, range(500))) == kept_by_sort(logits_1V[0].tolist(), params)


CHI_SQUARE_POINTS = (15.1, 18.4, 21.1, 23.5, 25.7, 27.9, 29.9, 31.8, 33.7, 35.6, 37.4, 39.1)
"""99.99 % points of the chi-square distribution, for 1 degree of freedom, 2, and so on."""


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7, seed=11),
        SamplingParams(temperature=1.5, seed=12),
        SamplingParams(top_k=5, seed=13),
        SamplingParams(top_p=0.8, temperature=1.2, seed=14),
        SamplingParams(min_p=0.1, seed=15),
        SamplingParams(top_k=9, top_p=0.95, min_p=0.02, temperature=0.9, seed=2**64 - 1),
    ],
)
def test_draws_follow_the_softmax_of_what_is_kept(params: SamplingParams) -> None:
    num_draws = 20_000
    logits_1V = torch.randn(1, 13, generator=torch.Generator().manual_seed(2))
    drawn_V = torch.bincount(torch.tensor(draw(logits_1V, params, range(num_draws))), minlength=13)
    kept = sorted(kept_by_sort(logits_1V[0].tolist(), params))
    expected = num_draws * torch.softmax(logits_1V[0, kept] / params.temperature, dim=-1)
    assert drawn_V[kept].sum() == num_draws
    chi_square = ((drawn_V[kept] - expected) ** 2 / expected).sum()
    assert chi_square < CHI_SQUARE_POINTS[len(kept) - 2]


def test_choices_of_a_row_are_drawn_independently() -> None:
    num_choices, logits_1V = 8000, torch.tensor([[0.0, 1.0, 2.0]])
    [tokens] = sample(logits_1V, [SamplingRow(SamplingParams(seed=3), 5, 0, num_choices)])
    drawn = torch.tensor([sampled.token for sampled in tokens])
    expected_V = num_choices * torch.softmax(logits_1V[0], dim=-1)
    assert ((torch.bincount(drawn) - expected_V) ** 2 / expected_V).sum() < CHI_SQUARE_POINTS[1]
    [last] = sample(logits_1V, [SamplingRow(SamplingParams(seed=3), 5, num_choices - 1)])
    assert last == tokens[-1:]


def test_greedy_choices_are_the_same() -> None:
    params = SamplingParams(temperature=0, num_logprobs=0)
    [tokens] = sample(torch.tensor([[0.0, 2.0, 1.0]]), [SamplingRow(params, 0, 2, 3)])
    assert [sampled.token for sampled in tokens] == [1, 1, 1]
    assert len({sampled.logprobs for sampled in tokens}) == 1


def test_a_row_does_not_depend_on_the_others() -> None:
    logits_BV = torch.randn(6, 301, generator=torch.Generator().manual_seed(3)) * 4
    params = [
        SamplingParams(seed=1, num_logprobs=2),
        GREEDY,
        SamplingParams(top_k=5, seed=2, min_p=0.3, logit_bias=((7, 2.0),)),
        SamplingParams(top_p=0.6, temperature=1.7, seed=3),
        SamplingParams(top_k=100, top_p=0.95, seed=2**64 - 1),
        SamplingParams(temperature=0, num_logprobs=5),
    ]
    positions, choices = [9, 8, 7, 6, 5, 4], [0, 1, 2, 0, 1, 2]
    together = sample_each(logits_BV, params, positions, choices)
    alone = [
        sample_each(logits_BV[i : i + 1], params[i : i + 1], positions[i : i + 1], choices[i : i + 1]) for i in range(6)
    ]
    assert together == [row[0] for row in alone]
    backwards = sample_each(logits_BV.flip(0), params[::-1], positions[::-1], choices[::-1])
    assert together == backwards[::-1]


def test_noise_depends_on_seed_position_choice_and_token() -> None:
    flat_1V = torch.zeros(1, 1000)
    first = draw(flat_1V, SamplingParams(seed=7), range(50))
    assert first == draw(flat_1V, SamplingParams(seed=7), range(50))
    others = [
        draw(flat_1V, SamplingParams(seed=8), range(50)),
        draw(flat_1V, SamplingParams(seed=7 + 2**32), range(50)),
        draw(flat_1V, SamplingParams(seed=7), range(50, 100)),
        draw(flat_1V, SamplingParams(seed=7), range(50), choice=1),
    ]
    for other in others:
        assert sum(a == b for a, b in zip(first, other, strict=True)) <= 2
    assert len({token % 4 for token in first}) == 4


def test_noise_is_the_documented_function_of_philox() -> None:
    # Word 0 of the all-zero known answer is 0x6627e8d5: token 0 at position 0, seed 0, choice 0.
    noise = -math.log(-math.log((0x6627E8D5 + 0.5) / 2**32))
    others = [-math.log(-math.log((word + 0.5) / 2**32)) for word in (0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)]
    for gap, expected in [(max(others) - noise + 1e-4, 0), (max(others) - noise - 1e-4, 1 + others.index(max(others)))]:
        assert draw(torch.tensor([[gap, 0.0, 0.0, 0.0]]), SamplingParams(seed=0), [0]) == [expected]


def test_masked_tokens_are_never_drawn() -> None:
    logits_1V = torch.full((1, 10), -torch.inf)
    logits_1V[0, [3, 8]] = torch.tensor([0.0, 1.0])
    assert set(draw(logits_1V, SamplingParams(top_p=0.99), range(100))) == {3, 8}


def test_a_tiny_temperature_is_greedy() -> None:
    logits_1V = torch.randn(1, 100, generator=torch.Generator().manual_seed(4)) * 1e6
    assert draw(logits_1V, SamplingParams(temperature=1e-30, top_p=0.5), [3]) == [int(logits_1V.argmax())]


def test_logprobs_are_those_of_the_model() -> None:
    logits_BV = torch.randn(2, 200, generator=torch.Generator().manual_seed(5)) * 3
    params = [SamplingParams(temperature=0.5, top_k=3, num_logprobs=4), SamplingParams(temperature=0, num_logprobs=0)]
    sampled = sample_each(logits_BV, params, [0, 0], [0, 0])
    reference_BV = torch.log_softmax(logits_BV, dim=-1)
    for row, token in enumerate(sampled):
        assert token.logprobs is not None
        assert token.logprobs.logprob == pytest.approx(reference_BV[row, token.token].item(), abs=1e-6)
    top_4 = reference_BV[0].topk(4)
    assert sampled[0].logprobs is not None
    assert [token for token, _ in sampled[0].logprobs.top] == top_4.indices.tolist()
    assert [value for _, value in sampled[0].logprobs.top] == pytest.approx(top_4.values.tolist(), abs=1e-6)
    assert sampled[1].logprobs is not None
    assert sampled[1].logprobs.top == ()


def test_logprobs_of_equals_come_lowest_id_first_and_end_with_the_vocabulary() -> None:
    logits_1V = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0]])
    for num_logprobs, expected in [(3, [1, 3, 0]), (9, [1, 3, 0, 2, 4])]:
        sampled = sample_each(logits_1V, [SamplingParams(temperature=0, num_logprobs=num_logprobs)], [0], [0])
        assert sampled[0].logprobs is not None
        assert [token for token, _ in sampled[0].logprobs.top] == expected


def test_half_precision_logits_are_taken() -> None:
    logits_1V = torch.tensor([[0.0, 3.0, 1.0]], dtype=torch.bfloat16)
    assert sample_each(logits_1V, [SamplingParams(temperature=0, num_logprobs=1)], [0], [0])[0].token == 1


@pytest.mark.parametrize(("value", "name"), [(torch.nan, "nan"), (torch.inf, "inf"), (-torch.inf, "-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_logits_are_refused_by_row_and_value(value: float, name: str, temperature: float) -> None:
    logits_BV = torch.zeros(3, 8)
    logits_BV[1, : 8 if value == -torch.inf else 1] = value
    with pytest.raises(RuntimeError, match=rf"row 1: {name}"):
        sample_each(logits_BV, [SamplingParams(temperature=temperature)] * 3, [0] * 3, [0] * 3)
