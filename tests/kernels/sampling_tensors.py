"""Draws and rows with top-p one by one, and kernels called with the tensors of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from pdserve.kernels.operations import LAST_ID, DrawTensors, DrawTokens, FindTopP, TopPTensors


class Kept(NamedTuple):
    lowest: float
    last_equal: int

    def ids(self, logits_V: torch.Tensor) -> list[int]:
        """The tokens of a row that may be drawn."""
        ids_V = torch.arange(len(logits_V))
        is_kept_V = (logits_V > self.lowest) | ((logits_V == self.lowest) & (ids_V <= self.last_equal))
        return is_kept_V.nonzero().flatten().tolist()


ALL_KEPT = Kept(-math.inf, LAST_ID)


class Draw(NamedTuple):
    row: int
    seed: int
    position: int
    choice: int
    best: float
    temperature: float
    kept: Kept


class TopP(NamedTuple):
    row: int
    top_p: float
    best: float
    temperature: float
    lowest: float


def a_draw(logits_BV: torch.Tensor, row: int = 0, *, seed: int = 0, position: int = 0, choice: int = 0) -> Draw:
    return Draw(row, seed, position, choice, logits_BV[row].max().item(), 1.0, ALL_KEPT)


def draw_tensors(draws: Sequence[Draw]) -> DrawTensors:
    row, seed, position, choice, best, temperature, kept = zip(*draws, strict=True)
    lowest, last_equal = zip(*kept, strict=True)
    return DrawTensors(
        row=torch.tensor(row, dtype=torch.int32),
        seed=torch.from_numpy(np.array(seed, np.uint64).view(np.int64)),
        position=_bits(position),
        choice=_bits(choice),
        best=torch.tensor(best),
        temperature=torch.tensor(temperature),
        lowest=torch.tensor(lowest),
        last_equal=torch.tensor(last_equal, dtype=torch.int32),
    )


def draw(draw_tokens: DrawTokens, logits_BV: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    tokens: list[int] = draw_tokens(logits_BV, draw_tensors(draws)).tolist()
    return tokens


def top_p_tensors(rows: Sequence[TopP]) -> TopPTensors:
    row, top_p, best, temperature, lowest = zip(*rows, strict=True)
    return TopPTensors(
        row=torch.tensor(row, dtype=torch.int32),
        top_p=torch.tensor(top_p, dtype=torch.float64),
        best=torch.tensor(best),
        temperature=torch.tensor(temperature),
        lowest=torch.tensor(lowest),
    )


def find(find_top_p: FindTopP, logits_BV: torch.Tensor, rows: Sequence[TopP]) -> list[Kept]:
    found = find_top_p(logits_BV, top_p_tensors(rows))
    assert (found.lowest.dtype, found.last_equal.dtype) == (torch.float32, torch.int32)
    return [Kept(*kept) for kept in zip(found.lowest.tolist(), found.last_equal.tolist(), strict=True)]


def _bits(values: Sequence[int]) -> torch.Tensor:
    """Unsigned numbers as int32 of the same bits."""
    return torch.from_numpy(np.array(values, np.uint32).view(np.int32))
