"""Sampling: greedy, truncation sets against a sort, edits against their formulas, draws against the softmax, and
independence of the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.contracts.request import SamplingParams
from pdserve.contracts.step import SampledToken
from pdserve.kernels.operations import SamplingKernels
from pdserve.kernels.selection import CPU_SAMPLING, TORCH_SAMPLING
from pdserve.model.sampling.sampling import Sampler, likeliest, plan_draws
from tests.model.sampling_rows import drawn_sets, sample, sampling_row

GREEDY = SamplingParams(temperature=0)
VOCAB_SIZE = 97
EDITED_SIZE = 12
EITHER = pytest.mark.parametrize("kernels", [CPU_SAMPLING, TORCH_SAMPLING], ids=["cpu", "torch"])


def sample_each(
    logits_BV: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int], choices: Sequence[int]
) -> list[SampledToken]:
    return sample(logits_BV.clone(), [sampling_row(*row) for row in zip(params, positions, choices, strict=True)])


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


def test_choices_are_drawn_independently() -> None:
    num_choices, logits_1V = 8000, torch.tensor([[0.0, 1.0, 2.0]])
    rows = [sampling_row(SamplingParams(seed=3), 5, choice) for choice in range(num_choices)]
    drawn = torch.tensor([sampled.token for sampled in sample(logits_1V.repeat(num_choices, 1), rows)])
    expected_V = num_choices * torch.softmax(logits_1V[0], dim=-1)
    assert ((torch.bincount(drawn) - expected_V) ** 2 / expected_V).sum() < CHI_SQUARE_POINTS[1]


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


@EITHER
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_of_logits_that_are_not_finite_some_token_comes_and_the_rows_are_named(
    kernels: SamplingKernels, value: float
) -> None:
    logits_BV = torch.full((4, VOCAB_SIZE), value)
    logits_BV[3] = 0
    edited = SamplingParams(logit_bias=((2, 1.0),))
    rows = [
        *(sampling_row(params) for params in (SamplingParams(), SamplingParams(top_p=0.5, top_k=3), edited)),
        sampling_row(GREEDY),
    ]
    draws = plan_draws(rows, VOCAB_SIZE)
    best_B, token_B = likeliest(logits_BV)
    words = torch.from_numpy(draws.words)
    best_B, _ = Sampler(kernels).sample(logits_BV, best_B, token_B, rows, draws, words, lambda row: 0)
    assert best_B.isfinite().tolist() == [False, False, False, True]
    assert ((token_B >= 0) & (token_B < VOCAB_SIZE)).all()


def test_a_banned_token_does_not_hide_a_logit_that_is_not_finite() -> None:
    logits_BV = torch.zeros(1, 8)
    logits_BV[0, 3] = math.nan
    with pytest.raises(AssertionError):
        sample(logits_BV, [sampling_row(GREEDY, banned=[3])])


def test_a_penalty_does_not_hide_a_logit_that_is_not_finite() -> None:
    logits_BV = torch.zeros(1, 8)
    logits_BV[0, 3] = math.inf
    with pytest.raises(AssertionError):
        sample(logits_BV, [sampling_row(SamplingParams(temperature=0, presence_penalty=1), answer=[3])])


def test_rows_of_all_kinds_are_drawn_together() -> None:
    """Of hundreds of rows many would differ if one parameter of any went to another."""
    logits_BV = torch.randn(400, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    rows = []
    for index in range(400):
        options = {"top_k": (0, 3, 20)[index % 3], "top_p": (1.0, 0.7)[index % 2], "min_p": (0.0, 0.1)[index // 3 % 2]}
        temperature = (0.0, 0.7, 1.5)[index // 2 % 3]
        params = SamplingParams(temperature=temperature, seed=index * 2**55, **options)  # type: ignore[arg-type]
        rows.append(sampling_row(params, index))
    alone = [sample(logits_BV[index : index + 1], [row])[0] for index, row in enumerate(rows)]
    assert sample(logits_BV, rows) == alone
    assert sample(logits_BV, rows, TORCH_SAMPLING) == alone


kinds = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-9, 0.5, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 5, VOCAB_SIZE, 10**9]),
    top_p=st.sampled_from([1.0, 0.999, 0.8, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


@given(
    st.lists(st.tuples(kinds, st.integers(0, 2**31 - 1), st.integers(0, 127)), min_size=1, max_size=12),
    st.sampled_from([0.3, 3.0, 30.0]),
    st.integers(0, 1000),
)
@settings(max_examples=100)
def test_compiled_kernels_and_torch_sample_the_same(
    drawn: list[tuple[SamplingParams, int, int]], scale: float, seed: int
) -> None:
    logits_BV = torch.randn(len(drawn), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    logits_BV = (logits_BV * scale).round(decimals=1)
    logits_BV[:, ::5] = -torch.inf
    rows = [sampling_row(*row) for row in drawn]
    assert sample(logits_BV, rows) == sample(logits_BV, rows, TORCH_SAMPLING)


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


@settings(max_examples=60)
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
    assert drawn_sets(torch.tensor([logits]), [params]) == [kept_by_sort(logits, params)]


def test_truncation_of_a_large_vocabulary_keeps_what_a_sort_keeps() -> None:
    """Prefixes shorter and longer than what is sorted at first, beside rows that are cut in other ways."""
    logits_BV = torch.randn(6, 5000, generator=torch.Generator().manual_seed(0)) * 3
    logits_BV[5] = logits_BV[5].round()  # ties everywhere
    params = [
        SamplingParams(top_p=0.9, temperature=4.0),
        SamplingParams(top_k=50, top_p=0.7, temperature=0.8),
        SamplingParams(top_k=50),
        SamplingParams(min_p=0.01, top_p=0.99),
        SamplingParams(top_p=0.9, temperature=0.1),
        SamplingParams(top_p=0.9),
    ]
    answer = drawn_sets(logits_BV, params)
    for row, tokens in enumerate(answer):
        assert tokens == kept_by_sort(logits_BV[row].tolist(), params[row])
    assert len(answer[4]) < 64 < 1024 < len(answer[0])


@pytest.mark.parametrize("top_p", [5e-324, math.nextafter(1.0, 0.0)])
def test_a_share_next_to_none_or_all_keeps_something(top_p: float) -> None:
    logits_BV = torch.randn(20, 1003, generator=torch.Generator().manual_seed(0))
    sizes = {len(tokens) for tokens in drawn_sets(logits_BV, [SamplingParams(top_p=top_p)] * 20)}
    assert sizes == {1} if top_p < 0.5 else min(sizes) >= 1000


tokens = st.lists(st.integers(0, EDITED_SIZE - 1), max_size=8)


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
    logits=st.lists(st.integers(-16, 16).map(lambda n: n / 4), min_size=EDITED_SIZE, max_size=EDITED_SIZE),
    prompt=tokens,
    answer=tokens,
    banned=tokens,
    bias=st.dictionaries(st.integers(0, EDITED_SIZE - 1), st.sampled_from([-100.0, -1.5, 0.25, 3.0]), max_size=4),
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
        num_logprobs=EDITED_SIZE,
    )
    logits_BV = torch.tensor([logits, logits])
    plain = sampling_row(SamplingParams(temperature=0, num_logprobs=EDITED_SIZE))
    row = sampling_row(params, banned=banned, prompt=prompt, answer=answer)
    best_B, token_B = likeliest(logits_BV)
    best_B, logprobs = Sampler(CPU_SAMPLING).sample(
        logits_BV, best_B, token_B, [row, plain], plan_draws([], 1), torch.zeros(0), lambda row: 0
    )
    expected = edited_by_hand(logits, params, prompt, answer, banned)
    assert logits_BV[0].tolist() == expected
    assert best_B[0] == max(expected)
    assert token_B[0] == expected.index(max(expected))
    # Log probabilities are those of the logits as they came.
    assert logprobs[0].top == logprobs[1].top
    assert logprobs[0].logprob == dict(logprobs[1].top)[int(token_B[0])]


def test_extreme_penalties_leave_logits_that_can_be_sampled() -> None:
    logits_BV = torch.tensor([[3e38, -3e38, 0.0, -torch.inf]])
    params = SamplingParams(repetition_penalty=0.01, presence_penalty=-2, frequency_penalty=-2, seed=1)
    [sampled] = sample(logits_BV, [sampling_row(params, prompt=[0, 1], answer=[2, 3])])
    assert sampled.token == 0
    assert not logits_BV.isnan().any()


def test_a_row_in_which_everything_is_banned_has_no_finite_logit() -> None:
    with pytest.raises(AssertionError):
        sample(torch.zeros(1, 3), [sampling_row(SamplingParams(), banned=[0, 1, 2])])
