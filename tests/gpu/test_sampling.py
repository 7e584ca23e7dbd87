"""Sampling over vocabularies of real models: the draws and the thresholds that a CPU gives."""

from __future__ import annotations

import math

import pytest
import torch

from pdserve.kernels.torch import sampling as torch_sampling
from pdserve.kernels.triton.sampling import draw_tokens, find_top_p
from tests.gpu.device import on_device, sized, some
from tests.kernels.sampling_tensors import ALL_KEPT, Draw, Kept, TopP, draw, find

VOCABULARIES = some((1100, 2861, 32000, 151936, 256000), 1)
SCALES = some((3.0, 0.3, 30.0), 1)
NUM_ROWS = sized(8, 2)


def random_logits(num_rows: int, vocab_size: int, scale: float) -> torch.Tensor:
    """Some are equal, and a few cannot be drawn."""
    logits_BV = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * scale
    logits_BV[1::2] = logits_BV[1::2].round(decimals=1)
    logits_BV[:, 5::97] = -math.inf
    return logits_BV


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("scale", SCALES)
def test_draws(vocab_size: int, scale: float) -> None:
    logits_BV = random_logits(NUM_ROWS, vocab_size, scale)
    draws = []
    for index in range(sized(64, 6)):
        row = index % NUM_ROWS
        best, median = logits_BV[row].max().item(), logits_BV[row].median().item()
        kept = Kept(median, vocab_size // 2) if index % 3 == 0 else ALL_KEPT
        temperature = (0.1, 0.7, 1.0, 2.0)[index % 4]
        draws.append(Draw(row, 2**64 - 1 - 12345 * index, 2**20 + index, index % 5, best, temperature, kept))
    tokens = draw(torch_sampling.draw_tokens, logits_BV, draws)
    assert draw(on_device(draw_tokens), logits_BV, draws) == tokens


def test_noise_is_the_documented_function_of_philox() -> None:
    """Known answers: the first words of counter and key 0, by Random123."""
    words = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    first, *others = (-math.log(-math.log((word + 0.5) / 2**32)) for word in words)
    for gap, expected in ((max(others) - first + 1e-4, 0), (max(others) - first - 1e-4, 1 + others.index(max(others)))):
        logits_BV = torch.tensor([[gap, 0.0, 0.0, 0.0]])
        assert draw(on_device(draw_tokens), logits_BV, [Draw(0, 0, 0, 0, max(gap, 0.0), 1.0, ALL_KEPT)]) == [expected]


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("scale", SCALES)
def test_top_p(vocab_size: int, scale: float) -> None:
    """Up to the one token by which sums of another order may differ."""
    logits_BV = random_logits(NUM_ROWS, vocab_size, scale)
    shares = some((0.9, 0.01, 0.5, 0.95, 0.999, math.nextafter(1.0, 0.0)))
    rows = [
        TopP(index, share, logits_BV[index].max().item(), (0.7, 1.0)[index % 2], -math.inf)
        for index in range(NUM_ROWS)
        for share in shares
    ]
    found = find(on_device(find_top_p), logits_BV, rows)
    for row, kept, expected in zip(rows, found, find(torch_sampling.find_top_p, logits_BV, rows), strict=True):
        weight_V = ((logits_BV[row.row].double() - row.best) / row.temperature).exp()
        shares_kept = [
            float(weight_V[limits.ids(logits_BV[row.row])].sum() / weight_V.sum()) for limits in (kept, expected)
        ]
        assert shares_kept[0] == pytest.approx(shares_kept[1], abs=1e-6), (row, kept, expected)
