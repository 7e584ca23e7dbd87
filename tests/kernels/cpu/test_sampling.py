"""What the C++ kernels draw and keep is what torch operations do, and both are what is documented."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kernels import selection
from pdserve.kernels.cpu import sampling as cpu_sampling
from pdserve.kernels.operations import DrawTokens, FindTopP
from pdserve.kernels.selection import CPU_SAMPLING, TORCH_SAMPLING, select_sampling_kernels
from pdserve.kernels.torch import sampling as torch_sampling
from tests.kernels.sampling_tensors import ALL_KEPT, Draw, Kept, TopP, a_draw, draw, find

BOTH_FIND_TOP_P: tuple[FindTopP, ...] = (cpu_sampling.find_top_p, torch_sampling.find_top_p)
EITHER = pytest.mark.parametrize("draw_tokens", [cpu_sampling.draw_tokens, torch_sampling.draw_tokens])


@settings(max_examples=60)
@given(
    vocab_size=st.integers(1, 700),
    scale=st.sampled_from([0.0, 0.3, 3.0, 30.0]),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**32 - 1),
    choice=st.integers(0, 2**32 - 1),
    temperature=st.sampled_from([1e-6, 0.5, 1.0, 7.0]),
    num_kept=st.integers(1, 700),
)
def test_the_kernel_draws_what_torch_draws(
    vocab_size: int, scale: float, seed: int, position: int, choice: int, temperature: float, num_kept: int
) -> None:
    logits_BV = (torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(seed % 2**32)) * scale).round(
        decimals=1
    )
    logits_BV[1, vocab_size // 2 + 1 :] = -torch.inf
    draws: list[Draw] = []
    for row in (2, 0, 1, 0):
        lowest = logits_BV[row].sort(descending=True).values[min(num_kept, vocab_size) - 1].item()
        equals = (logits_BV[row] == lowest).nonzero().flatten().tolist()
        drawn = a_draw(logits_BV, row, seed=seed, position=position, choice=(choice + len(draws)) % 2**32)
        draws.append(drawn._replace(temperature=temperature, kept=Kept(lowest, equals[len(equals) // 2])))
    tokens = draw(cpu_sampling.draw_tokens, logits_BV, draws)
    assert tokens == draw(torch_sampling.draw_tokens, logits_BV, draws)
    for drawn, token in zip(draws, tokens, strict=True):
        logit = logits_BV[drawn.row, token].item()
        assert (-logit, token) <= (-drawn.kept.lowest, drawn.kept.last_equal)


def test_the_kernel_draws_what_torch_draws_from_a_large_vocabulary() -> None:
    logits_BV = torch.randn(2, 20_001, generator=torch.Generator().manual_seed(0)) * 2
    draws = [a_draw(logits_BV, position % 2, seed=9, position=position) for position in range(300)]
    tokens = draw(cpu_sampling.draw_tokens, logits_BV, draws)
    assert tokens == draw(torch_sampling.draw_tokens, logits_BV, draws)
    assert len(set(tokens)) > 200


@EITHER
def test_noise_is_the_documented_function_of_philox(draw_tokens: DrawTokens) -> None:
    # The words of the all-zero known answer, for tokens 0 to 3 at position 0 with seed 0.
    words = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    first, *others = (-math.log(-math.log((word + 0.5) / 2**32)) for word in words)
    for gap, expected in [(max(others) - first + 1e-4, 0), (max(others) - first - 1e-4, 1 + others.index(max(others)))]:
        logits_BV = torch.tensor([[gap, 0.0, 0.0, 0.0]])
        assert draw(draw_tokens, logits_BV, [a_draw(logits_BV)]) == [expected]


@EITHER
def test_a_token_of_the_least_noise_is_drawn_where_it_is_the_only_one(draw_tokens: DrawTokens) -> None:
    logits_BV = torch.full((1, 130), -torch.inf)
    logits_BV[0, 129] = 5.0
    assert set(draw(draw_tokens, logits_BV, [a_draw(logits_BV, position=position) for position in range(200)])) == {129}


@EITHER
def test_every_word_of_the_seed_the_position_and_the_choice_counts(draw_tokens: DrawTokens) -> None:
    logits_BV = torch.zeros(1, 1000)
    draws = [
        a_draw(logits_BV),
        a_draw(logits_BV, seed=1),
        a_draw(logits_BV, seed=2**32),
        a_draw(logits_BV, position=1),
        a_draw(logits_BV, choice=1),
    ]
    tokens = draw(draw_tokens, logits_BV, draws)
    assert len(set(tokens)) == 5
    assert [draw(draw_tokens, logits_BV, [drawn])[0] for drawn in draws] == tokens


@settings(max_examples=100)
@given(
    vocab_size=st.integers(1, 700),
    scale=st.sampled_from([0.0, 0.3, 3.0, 30.0, 1e6]),
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([1e-6, 0.5, 1.0, 7.0]),
    top_p=st.sampled_from([5e-324, 0.01, 0.3, 0.8, 0.95, 0.9999, math.nextafter(1.0, 0.0)]),
    num_left=st.integers(1, 700),
)
def test_top_p_keeps_the_smallest_prefix_with_the_share(
    vocab_size: int, scale: float, seed: int, temperature: float, top_p: float, num_left: int
) -> None:
    logits_BV = torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale
    logits_BV[1] = logits_BV[1].round(decimals=1)  # ties
    logits_BV[1, vocab_size // 2 + 1 :] = -torch.inf
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    lowest = sorted_BV[:, min(num_left, vocab_size) - 1].tolist()
    best = sorted_BV[:, 0].tolist()
    rows = [TopP(row, top_p, best[row], temperature, lowest[row]) for row in (1, 0)]
    for find_top_p in BOTH_FIND_TOP_P:
        for top_p_row, kept in zip(rows, find(find_top_p, logits_BV, rows), strict=True):
            logit_V = sorted_BV[top_p_row.row].double()
            weight_V = ((logit_V - top_p_row.best) / temperature).exp().where(logit_V >= top_p_row.lowest, 0)
            sums_V = weight_V.cumsum(dim=-1) / weight_V.sum()
            keys = zip((-sorted_BV[top_p_row.row]).tolist(), order_BV[top_p_row.row].tolist(), strict=True)
            num_kept = sum(key <= (-kept.lowest, kept.last_equal) for key in keys)
            assert num_kept >= 1
            assert sums_V[num_kept - 1] >= top_p - 1e-5
            assert num_kept == 1 or sums_V[num_kept - 2] < top_p + 1e-5


def test_thresholds_of_a_large_vocabulary_are_those_of_torch() -> None:
    """Fewer tokens than are sorted at first, and more; the very same, as no sum comes near the share here."""
    logits_BV = torch.randn(3, 20_001, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0], [3.0], [9.0]])
    best = logits_BV.amax(dim=-1).tolist()
    rows = [TopP(row, 0.9, best[row], 1.0, -math.inf) for row in (0, 1, 2)]
    kept = find(cpu_sampling.find_top_p, logits_BV, rows)
    for find_top_p in BOTH_FIND_TOP_P:
        assert [limits.lowest for limits in kept] == [limits.lowest for limits in find(find_top_p, logits_BV, rows)]
    sizes = [int((logits_BV[row] >= limits.lowest).sum()) for row, limits in enumerate(kept)]
    assert sizes[0] > 10_000 > 1024 > sizes[1] > 64 > sizes[2]


def test_top_p_of_equals_ends_at_an_id() -> None:
    top_p_row = TopP(0, 0.5, 2.0, 1.0, -math.inf)
    for find_top_p in BOTH_FIND_TOP_P:
        [kept] = find(find_top_p, torch.full((1, 1000), 2.0), [top_p_row])
        assert kept == Kept(2.0, 499)


def test_logits_that_are_not_finite_are_survived() -> None:
    """The caller learns of them later."""
    for value in (math.nan, math.inf, -math.inf):
        logits_BV = torch.full((1, 300), value)
        draw(cpu_sampling.draw_tokens, logits_BV, [a_draw(logits_BV)])
        [kept] = find(cpu_sampling.find_top_p, logits_BV, [TopP(0, 0.5, value, 1.0, -math.inf)])
        assert kept == ALL_KEPT


def test_logits_on_a_cpu_are_sampled_by_the_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_sampling_kernels(torch.device("cpu")) is CPU_SAMPLING
    monkeypatch.setattr(selection, "load_library", lambda: None)
    assert select_sampling_kernels(torch.device("cpu")) is TORCH_SAMPLING


def test_what_would_be_misread_is_refused() -> None:
    logits_BV = torch.zeros(2, 8)
    for logits, row in ((logits_BV, 2), (logits_BV, -1), (logits_BV.double(), 0), (torch.zeros(8, 2).T, 0)):
        with pytest.raises(AssertionError):
            draw(cpu_sampling.draw_tokens, logits, [a_draw(logits_BV)._replace(row=row)])
