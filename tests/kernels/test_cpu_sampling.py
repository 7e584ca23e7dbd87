"""What the C++ kernels draw and keep is what torch operations do, and both are what is documented."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kernels import cpu_sampling, torch_gumbel, torch_nucleus
from pdserve.kernels.operations import ALL_KEPT, Draw, Kept, Nucleus
from pdserve.kernels.selection import CPU_SAMPLING, TORCH_SAMPLING, select_sampling_kernels
from tests.kernels.device_nuclei import as_find_nuclei

DrawTokens = Callable[[torch.Tensor, Sequence[Draw]], list[int]]

ALL_FIND_NUCLEI = (
    cpu_sampling.find_nuclei,
    torch_nucleus.find_nuclei,
    as_find_nuclei(torch_nucleus.find_nuclei_on_device),
)
EITHER = pytest.mark.parametrize("draw_tokens", [cpu_sampling.draw_tokens, torch_gumbel.draw_tokens])


def a_draw(logits_BV: torch.Tensor, row: int = 0, *, seed: int = 0, position: int = 0, choice: int = 0) -> Draw:
    return Draw(row, seed, position, choice, logits_BV[row].max().item(), 1.0, ALL_KEPT)


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
        draw = a_draw(logits_BV, row, seed=seed, position=position, choice=(choice + len(draws)) % 2**32)
        draws.append(draw._replace(temperature=temperature, kept=Kept(lowest, equals[len(equals) // 2])))
    tokens = cpu_sampling.draw_tokens(logits_BV, draws)
    assert tokens == torch_gumbel.draw_tokens(logits_BV, draws)
    for draw, token in zip(draws, tokens, strict=True):
        logit = logits_BV[draw.row, token].item()
        assert (-logit, token) <= (-draw.kept.lowest, draw.kept.last_equal)


def test_the_kernel_draws_what_torch_draws_from_a_large_vocabulary() -> None:
    logits_BV = torch.randn(2, 20_001, generator=torch.Generator().manual_seed(0)) * 2
    draws = [a_draw(logits_BV, position % 2, seed=9, position=position) for position in range(300)]
    tokens = cpu_sampling.draw_tokens(logits_BV, draws)
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


@settings(max_examples=100)
@given(
    vocab_size=st.integers(1, 700),
    scale=st.sampled_from([0.0, 0.3, 3.0, 30.0, 1e6]),
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([1e-6, 0.5, 1.0, 7.0]),
    top_p=st.sampled_from([5e-324, 0.01, 0.3, 0.8, 0.95, 0.9999, math.nextafter(1.0, 0.0)]),
    num_left=st.integers(1, 700),
)
def test_a_nucleus_is_the_smallest_prefix_with_the_share(
    vocab_size: int, scale: float, seed: int, temperature: float, top_p: float, num_left: int
) -> None:
    logits_BV = torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale
    logits_BV[1] = logits_BV[1].round(decimals=1)  # ties
    logits_BV[1, vocab_size // 2 + 1 :] = -torch.inf
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    lowest = sorted_BV[:, min(num_left, vocab_size) - 1].tolist()
    best = sorted_BV[:, 0].tolist()
    nuclei = [Nucleus(row, top_p, best[row], temperature, lowest[row]) for row in (1, 0)]
    for find_nuclei in ALL_FIND_NUCLEI:
        for nucleus, kept in zip(nuclei, find_nuclei(logits_BV, nuclei), strict=True):
            logit_V = sorted_BV[nucleus.row].double()
            weight_V = ((logit_V - nucleus.best) / temperature).exp().where(logit_V >= nucleus.lowest, 0)
            sums_V = weight_V.cumsum(dim=-1) / weight_V.sum()
            keys = zip((-sorted_BV[nucleus.row]).tolist(), order_BV[nucleus.row].tolist(), strict=True)
            num_kept = sum(key <= (-kept.lowest, kept.last_equal) for key in keys)
            assert num_kept >= 1
            assert sums_V[num_kept - 1] >= top_p - 1e-5
            assert num_kept == 1 or sums_V[num_kept - 2] < top_p + 1e-5


def test_nuclei_of_a_large_vocabulary_are_those_of_torch() -> None:
    """Fewer tokens than are sorted at first, and more; the very same, as no sum comes near the share here."""
    logits_BV = torch.randn(3, 20_001, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0], [3.0], [9.0]])
    best = logits_BV.amax(dim=-1).tolist()
    nuclei = [Nucleus(row, 0.9, best[row], 1.0, -math.inf) for row in (0, 1, 2)]
    kept = cpu_sampling.find_nuclei(logits_BV, nuclei)
    for find_nuclei in ALL_FIND_NUCLEI:
        assert [limits.lowest for limits in kept] == [limits.lowest for limits in find_nuclei(logits_BV, nuclei)]
    sizes = [int((logits_BV[row] >= limits.lowest).sum()) for row, limits in enumerate(kept)]
    assert sizes[0] > 10_000 > 1024 > sizes[1] > 64 > sizes[2]


def test_a_nucleus_of_equals_ends_at_an_id() -> None:
    nucleus = Nucleus(0, 0.5, 2.0, 1.0, -math.inf)
    for find_nuclei in ALL_FIND_NUCLEI:
        [kept] = find_nuclei(torch.full((1, 1000), 2.0), [nucleus])
        assert kept == Kept(2.0, 499)


def test_logits_that_the_kernels_take_are_sampled_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_sampling_kernels(torch.zeros(2, 8)) is CPU_SAMPLING
    assert select_sampling_kernels(torch.zeros(8, 2).T) is TORCH_SAMPLING
    monkeypatch.setattr(cpu_sampling, "load_library", lambda: None)
    assert select_sampling_kernels(torch.zeros(2, 8)) is TORCH_SAMPLING


def test_a_draw_from_no_row_of_the_logits_is_refused() -> None:
    logits_BV = torch.zeros(2, 8)
    with pytest.raises(AssertionError):
        cpu_sampling.draw_tokens(logits_BV, [a_draw(logits_BV)._replace(row=2)])
