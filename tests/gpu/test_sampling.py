"""Sampling over vocabularies of real models: the draws and the nuclei that a CPU gives."""

from __future__ import annotations

import math

import pytest
import torch

from pdserve.kernels import torch_gumbel, torch_nucleus
from pdserve.kernels.operations import ALL_KEPT, Draw, Kept, Nucleus
from pdserve.kernels.triton_sampling import draw_on_device, draw_tokens, find_nuclei, find_nuclei_on_device
from tests.gpu.device import on_device, sized, some
from tests.kernels.device_nuclei import as_find_nuclei

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
    tokens = torch_gumbel.draw_tokens(logits_BV, draws)
    assert on_device(draw_tokens)(logits_BV, draws) == tokens
    tensors = torch_gumbel.draw_tensors(draws, logits_BV.device)
    assert on_device(draw_on_device)(logits_BV, tensors).tolist() == tokens


def test_noise_is_the_documented_function_of_philox() -> None:
    """Known answers: the first words of counter and key 0, by Random123."""
    words = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    first, *others = (-math.log(-math.log((word + 0.5) / 2**32)) for word in words)
    for gap, expected in ((max(others) - first + 1e-4, 0), (max(others) - first - 1e-4, 1 + others.index(max(others)))):
        logits_BV = torch.tensor([[gap, 0.0, 0.0, 0.0]])
        assert on_device(draw_tokens)(logits_BV, [Draw(0, 0, 0, 0, max(gap, 0.0), 1.0, ALL_KEPT)]) == [expected]


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("scale", SCALES)
def test_nuclei(vocab_size: int, scale: float) -> None:
    """Up to the one token by which sums of another order may differ."""
    logits_BV = random_logits(NUM_ROWS, vocab_size, scale)
    shares = some((0.9, 0.01, 0.5, 0.95, 0.999, math.nextafter(1.0, 0.0)))
    nuclei = [
        Nucleus(row, share, logits_BV[row].max().item(), (0.7, 1.0)[row % 2], -math.inf)
        for row in range(NUM_ROWS)
        for share in shares
    ]
    found = on_device(find_nuclei)(logits_BV, nuclei)
    assert as_find_nuclei(on_device(find_nuclei_on_device))(logits_BV, nuclei) == found
    for nucleus, kept, expected in zip(nuclei, found, torch_nucleus.find_nuclei(logits_BV, nuclei), strict=True):
        weight_V = ((logits_BV[nucleus.row].double() - nucleus.best) / nucleus.temperature).exp()
        shares_kept = [
            float(weight_V[_is_kept(logits_BV[nucleus.row], limits)].sum() / weight_V.sum())
            for limits in (kept, expected)
        ]
        assert shares_kept[0] == pytest.approx(shares_kept[1], abs=1e-6), (nucleus, kept, expected)


def _is_kept(logits_V: torch.Tensor, kept: Kept) -> torch.Tensor:
    ids_V = torch.arange(len(logits_V))
    return (logits_V > kept.lowest) | ((logits_V == kept.lowest) & (ids_V <= kept.last_equal))
