"""Draws by the C++ kernel are those by torch operations, and both are the documented function of Philox."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kernels import cpu_gumbel, torch_gumbel
from pdserve.kernels.operations import Draw
from pdserve.kernels.selection import select_draw_tokens

DrawTokens = Callable[[torch.Tensor, Sequence[Draw]], list[int]]

EITHER = pytest.mark.parametrize("draw_tokens", [cpu_gumbel.draw_tokens, torch_gumbel.draw_tokens])


def a_draw(logits_BV: torch.Tensor, row: int = 0, *, seed: int = 0, position: int = 0, choice: int = 0) -> Draw:
    return Draw(row, seed, position, choice, logits_BV[row].max().item(), 1.0, -math.inf, 2**31 - 1)


@settings(max_examples=60, deadline=None)
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
        draw = a_draw(logits_BV, row, seed=seed, position=position, choice=(choice + len(draws)) % 2**32)
        draws.append(draw._replace(temperature=temperature, lowest=lowest, last_equal=equals[len(equals) // 2]))
    tokens = cpu_gumbel.draw_tokens(logits_BV, draws)
    assert tokens == torch_gumbel.draw_tokens(logits_BV, draws)
    for draw, token in zip(draws, tokens, strict=True):
        logit = logits_BV[draw.row, token].item()
        assert logit > draw.lowest or (logit == draw.lowest and token <= draw.last_equal)


def test_the_kernel_draws_what_torch_draws_from_a_large_vocabulary() -> None:
    logits_BV = torch.randn(2, 20_001, generator=torch.Generator().manual_seed(0)) * 2
    draws = [a_draw(logits_BV, position % 2, seed=9, position=position) for position in range(300)]
    tokens = cpu_gumbel.draw_tokens(logits_BV, draws)
    assert tokens == torch_gumbel.draw_tokens(logits_BV, draws)
    assert len(set(tokens)) > 200


@EITHER
def test_noise_is_the_documented_function_of_philox(draw_tokens: DrawTokens) -> None:
    # The words of the all-zero known answer, for tokens 0 to 3 at position 0 with seed 0.
    words = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    first, *others = (-math.log(-math.log((word + 0.5) / 2**32)) for word in words)
    for gap, expected in [(max(others) - first + 1e-4, 0), (max(others) - first - 1e-4, 1 + others.index(max(others)))]:
        logits_BV = torch.tensor([[gap, 0.0, 0.0, 0.0]])
        assert draw_tokens(logits_BV, [a_draw(logits_BV)]) == [expected]


@EITHER
def test_a_token_of_the_least_noise_is_drawn_where_it_is_the_only_one(draw_tokens: DrawTokens) -> None:
    logits_BV = torch.full((1, 130), -torch.inf)
    logits_BV[0, 129] = 5.0
    assert set(draw_tokens(logits_BV, [a_draw(logits_BV, position=position) for position in range(200)])) == {129}


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
    tokens = draw_tokens(logits_BV, draws)
    assert len(set(tokens)) == 5
    assert [draw_tokens(logits_BV, [draw])[0] for draw in draws] == tokens


def test_many_draws_are_made_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_BV = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    draws = [a_draw(logits_BV, position % 4, position=position) for position in range(21)]
    whole = torch_gumbel.draw_tokens(logits_BV, draws)
    monkeypatch.setattr(torch_gumbel, "_MAX_SCORES", 100)
    assert torch_gumbel.draw_tokens(logits_BV, draws) == whole


def test_logits_that_the_kernel_takes_are_drawn_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_draw_tokens(torch.zeros(2, 8)) is cpu_gumbel.draw_tokens
    assert select_draw_tokens(torch.zeros(8, 2).T) is torch_gumbel.draw_tokens
    monkeypatch.setattr(cpu_gumbel, "load_library", lambda: None)
    assert select_draw_tokens(torch.zeros(2, 8)) is torch_gumbel.draw_tokens


def test_a_draw_from_no_row_of_the_logits_is_refused() -> None:
    logits_BV = torch.zeros(2, 8)
    with pytest.raises(AssertionError):
        cpu_gumbel.draw_tokens(logits_BV, [a_draw(logits_BV)._replace(row=2)])
