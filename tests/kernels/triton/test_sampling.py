"""Draws and top-p in Triton's interpreter: those of torch operations, and what is documented."""

from __future__ import annotations

import math

import pytest
import torch

from pdserve.contracts.request import SamplingParams
from pdserve.kernels.selection import CPU_SAMPLING
from pdserve.kernels.torch import sampling as torch_sampling
from pdserve.kernels.triton import sampling as triton_sampling
from pdserve.kernels.triton.kernels import TRITON_SAMPLING
from pdserve.kernels.triton.sampling import draw_tokens, find_top_p
from tests.kernels.sampling_tensors import ALL_KEPT, Kept, TopP, a_draw, draw, find
from tests.model.sampling_rows import sample, sampling_row

INF = math.inf


@pytest.fixture(autouse=True)
def _small_tiles_and_nan_workspaces(monkeypatch: pytest.MonkeyPatch, nan_workspaces: None) -> None:
    monkeypatch.setattr(triton_sampling, "_TILE", 512)


def random_logits(num_rows: int, vocab_size: int, scale: float = 3.0) -> torch.Tensor:
    """Behind each row lies what would win."""
    generator = torch.Generator().manual_seed(vocab_size)
    wide = torch.full((num_rows, vocab_size + 3), INF)
    wide[:, :vocab_size] = torch.randn(num_rows, vocab_size, generator=generator) * scale
    return wide[:, :vocab_size]


def assert_same_tokens(logits_BV: torch.Tensor, rows: list[TopP]) -> None:
    """Top-p keeps what torch operations keep."""
    expected = find(torch_sampling.find_top_p, logits_BV, rows)
    for row, kept, wanted in zip(rows, find(find_top_p, logits_BV, rows), expected, strict=True):
        assert kept.ids(logits_BV[row.row]) == wanted.ids(logits_BV[row.row])


@pytest.mark.parametrize(("vocab_size", "scale"), [(1, 1.0), (511, 0.0), (513, 3.0), (1100, 0.3), (1100, 30.0)])
def test_draws_are_those_of_torch(vocab_size: int, scale: float) -> None:
    logits_BV = random_logits(3, vocab_size, scale).round(decimals=1)
    logits_BV[1, vocab_size // 2 + 1 :] = -INF
    draws = []
    for index in range(12):
        row = (2, 0, 1)[index % 3]
        equals = (logits_BV[row] == logits_BV[row].median()).nonzero().flatten().tolist()
        kept = Kept(logits_BV[row].median().item(), equals[len(equals) // 2]) if index % 2 else ALL_KEPT
        drawn = a_draw(logits_BV, row, seed=2**64 - 1 - index * 2**31, position=2**32 - 1 - index, choice=index * 2**26)
        draws.append(drawn._replace(kept=kept, temperature=(1e-6, 0.5, 1.0, 7.0)[index % 4]))
    tokens = draw(torch_sampling.draw_tokens, logits_BV, draws)
    assert draw(draw_tokens, logits_BV, draws) == tokens


def test_many_draws_of_one_row() -> None:
    """All tiles win some, and the ids of a tile that has no chance are not looked at."""
    logits_BV = random_logits(1, 1500, 1.0)
    logits_BV[0, 512:1024] -= 100
    draws = [a_draw(logits_BV, seed=5, position=position) for position in range(20)]
    tokens = draw(draw_tokens, logits_BV, draws)
    assert tokens == draw(torch_sampling.draw_tokens, logits_BV, draws)
    assert {token // 512 for token in tokens} == {0, 2}


def test_many_unlikely_tokens_win_together() -> None:
    """All of their tile are far below the best one."""
    logits_BV = torch.full((1, 1024), -5.0)
    logits_BV[0, 1:512] = -INF
    logits_BV[0, 0] = 0.0
    draws = [a_draw(logits_BV, position=position) for position in range(10)]
    tokens = draw(draw_tokens, logits_BV, draws)
    assert tokens == draw(torch_sampling.draw_tokens, logits_BV, draws)
    assert {token // 512 for token in tokens} == {0, 1}


def test_noise_is_the_documented_function_of_philox() -> None:
    words = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    first, *others = (-math.log(-math.log((word + 0.5) / 2**32)) for word in words)
    for gap, expected in [(max(others) - first + 1e-4, 0), (max(others) - first - 1e-4, 1 + others.index(max(others)))]:
        logits_BV = torch.tensor([[gap, 0.0, 0.0, 0.0]])
        assert draw(draw_tokens, logits_BV, [a_draw(logits_BV)]) == [expected]


def test_the_only_token_is_drawn_whatever_its_noise() -> None:
    logits_BV = torch.full((1, 300), -INF)
    logits_BV[0, 299] = 5.0
    assert set(draw(draw_tokens, logits_BV, [a_draw(logits_BV, position=position) for position in range(5)])) == {299}


@pytest.mark.parametrize(
    ("vocab_size", "scale"), [(1, 3.0), (130, 0.0), (700, 0.3), (700, 3.0), (130, 30.0), (130, 1e6)]
)
def test_top_p_keeps_the_smallest_prefix_with_the_share(vocab_size: int, scale: float) -> None:
    logits_BV = random_logits(2, vocab_size, scale)
    logits_BV[1] = logits_BV[1].round(decimals=1)  # ties
    logits_BV[1, vocab_size // 2 + 1 :] = -INF
    logits_BV[0, ::7] *= 0.0  # of both signs
    rows = []
    for index, top_p in enumerate((5e-324, 0.01, 0.3, 0.8, 0.95, 0.9999, math.nextafter(1.0, 0.0))):
        sorted_V = logits_BV[index % 2].sort(descending=True).values
        lowest = sorted_V[vocab_size // 3].item() if index % 3 else -INF
        rows.append(TopP(index % 2, top_p, sorted_V[0].item(), (0.5, 1.0, 7.0)[index % 3], lowest))
    found = find(find_top_p, logits_BV, rows)
    for row, kept in zip(rows, found, strict=True):
        logits_V = logits_BV[row.row].double()
        sorted_V, order_V = logits_V.sort(descending=True, stable=True)
        weight_V = ((sorted_V - row.best) / row.temperature).exp().where(sorted_V >= row.lowest, 0)
        sums_V = weight_V.cumsum(dim=-1) / weight_V.sum()
        ids = kept.ids(logits_BV[row.row])
        assert sorted(order_V[: len(ids)].tolist()) == ids
        assert sums_V[len(ids) - 1] >= row.top_p - 1e-5
        assert len(ids) == 1 or sums_V[len(ids) - 2] < row.top_p + 1e-5


def test_thresholds_of_a_large_vocabulary_are_those_of_torch() -> None:
    """Candidates of less than a tile, and of many."""
    logits_BV = random_logits(3, 2001, 1.0) * torch.tensor([[1.0], [3.0], [9.0]])
    rows = [TopP(row, 0.9, logits_BV[row].max().item(), 1.0, -INF) for row in (0, 1, 2)]
    assert_same_tokens(logits_BV, rows)


def test_top_p_of_equals_ends_at_an_id() -> None:
    assert find(find_top_p, torch.full((1, 1000), 2.0), [TopP(0, 0.5, 2.0, 1.0, -INF)]) == [Kept(2.0, 499)]
    assert find(find_top_p, torch.full((1, 1000), -0.0), [TopP(0, 0.25, 0.0, 1.0, -INF)]) == [Kept(0.0, 249)]


def test_top_p_whose_candidates_weigh_too_little_by_rounding_keeps_all_of_them() -> None:
    """Summed tile by tile the light tokens count; behind the heavy one, where candidates lie, some of them do not."""
    light = math.log(0.9 * 2**-53)
    logits_BV = torch.full((1, 1512), -INF)
    logits_BV[0, 0], logits_BV[0, 512:] = 0.0, light
    row = TopP(0, math.nextafter(1.0, 0.0), 0.0, 1.0, -INF)
    assert find(find_top_p, logits_BV, [row]) == [Kept(logits_BV[0, 512].item(), ALL_KEPT.last_equal)]


def test_tokens_with_penalties_and_truncation_are_those_of_a_cpu() -> None:
    logits_BV = random_logits(18, 400, 2.0)
    rows = []
    for index in range(18):
        params = SamplingParams(
            temperature=(0.7, 1.0, 0.0)[index % 3],
            top_k=(0, 50)[index % 2],
            top_p=(1.0, 0.9, 0.5)[index // 2 % 3],
            min_p=(0.0, 0.05)[index // 3 % 2],
            repetition_penalty=1.2,
            presence_penalty=0.5,
            frequency_penalty=0.25,
            logit_bias=((index, 3.0),),
            seed=index,
        )
        history = range(0, 400, index + 2)
        rows.append(sampling_row(params, index, banned=(7,), prompt=history[:9], answer=history[9:]))
    expected = sample(logits_BV.clone(), rows, CPU_SAMPLING)
    assert sample(logits_BV.clone(), rows, TRITON_SAMPLING) == expected
    assert len({sampled.token for sampled in expected}) > 10


def test_rows_beyond_32_bits() -> None:
    """Only memory that is touched is taken."""
    torch.use_deterministic_algorithms(False)
    logits_BV = torch.empty(2**31 // 2**20 + 1, 2**20)[:, :300]
    logits_BV[-1] = random_logits(1, 300)[0]
    row = len(logits_BV) - 1
    draws = [a_draw(logits_BV, row, position=position) for position in range(5)]
    assert draw(draw_tokens, logits_BV, draws) == draw(torch_sampling.draw_tokens, logits_BV, draws)
    rows = [TopP(row, 0.9, draws[0].best, 1.0, -INF)]
    assert_same_tokens(logits_BV, rows)


def test_what_would_be_misread_is_refused() -> None:
    logits_BV = torch.zeros(2, 8)
    for logits in (logits_BV.double(), torch.zeros(8, 2).T):
        with pytest.raises(AssertionError):
            draw(draw_tokens, logits, [a_draw(logits_BV)])
