"""Sampling: greedy, truncation sets against a sort, draws against the softmax, and independence of the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.contracts.request import SamplingParams
from pdserve.contracts.step import SampledToken
from pdserve.model.sampling import SamplingRow, sample
from pdserve.model.truncation import kept_tokens

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


def kept_by_sort(logits: Sequence[float], params: SamplingParams) -> set[int]:
    """The definition, literally: order by (logit descending, id ascending), cut."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    best = logits[order[0]]
    order = [token for token in order if math.exp((logits[token] - best) / params.temperature) >= params.min_p]
    if params.top_k:
        threshold = logits[order[min(params.top_k, len(order)) - 1]]
        order = [token for token in order if logits[token] >= threshold]
    weights = [math.exp((logits[token] - logits[order[0]]) / params.temperature) for token in order]
    mass, kept = 0.0, set()
    for token, weight in zip(order, weights, strict=True):
        kept.add(token)
        mass += weight
        if mass >= params.top_p * sum(weights):
            break
    return kept


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits_BV = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0], [-1.0, -torch.inf, 0.0, 0.0]])
    assert [t.token for t in sample_each(logits_BV, [GREEDY] * 3, [0] * 3, [0] * 3)] == [1, 0, 2]


@settings(max_examples=60, deadline=None)
@given(
    # Few distinct values, so that ties straddle the cuts; powers of two, so that sums are exact.
    logits=st.lists(st.sampled_from([-3.0, -1.5, 0.0, 0.5, 2.0]), min_size=2, max_size=40),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.01, 0.25, 0.5, 0.8, 0.95, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-4, 0.1, 0.55, 1.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
)
def test_truncation_keeps_what_a_sort_keeps(
    logits: list[float], top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    kept_V = kept_tokens(torch.tensor([logits]), [params])[0]
    assert set(kept_V.nonzero().flatten().tolist()) == kept_by_sort(logits, params)


def test_truncation_of_a_large_vocabulary_keeps_what_a_sort_keeps() -> None:
    logits_BV = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)) * 3
    params = [
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=50, top_p=0.7, temperature=0.8),
        SamplingParams(top_k=50),
    ]
    kept_BV = kept_tokens(logits_BV, params)
    for row in range(3):
        assert set(kept_BV[row].nonzero().flatten().tolist()) == kept_by_sort(logits_BV[row].tolist(), params[row])


@pytest.mark.parametrize("top_p", [5e-324, math.nextafter(1.0, 0.0)])
def test_a_share_next_to_none_or_all_keeps_something(top_p: float) -> None:
    logits_BV = torch.randn(20, 1003, generator=torch.Generator().manual_seed(0))
    kept_B = kept_tokens(logits_BV, [SamplingParams(top_p=top_p)] * 20).sum(dim=-1)
    assert (kept_B == 1).all() if top_p < 0.5 else (kept_B >= 1000).all()


def test_only_kept_tokens_are_drawn() -> None:
    logits_1V = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(top_k=7, top_p=0.8, seed=5)
    assert set(draw(logits_1V, params, range(500))) == kept_by_sort(logits_1V[0].tolist(), params)


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_draws_follow_the_softmax(temperature: float) -> None:
    num_draws = 20_000
    logits_1V = torch.randn(1, 13, generator=torch.Generator().manual_seed(2))
    drawn = draw(logits_1V, SamplingParams(temperature=temperature, seed=11), range(num_draws))
    expected_V = num_draws * torch.softmax(logits_1V[0] / temperature, dim=-1)
    chi_square = ((torch.bincount(torch.tensor(drawn), minlength=13) - expected_V) ** 2 / expected_V).sum()
    # 99.99 % point of the chi-square distribution with 12 degrees of freedom.
    assert chi_square < 39.1


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
