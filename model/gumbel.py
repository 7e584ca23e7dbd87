"""Draws tokens by Gumbel-max: the highest ``logit / temperature + noise`` wins, ties to the lowest id.

Called by `pdserve.model.sampling`. Keeps no state. The noise of a token is ``-log(-log(u))``, where u is word
``token % 4`` of Philox4x32-10 with the seed as key and ``(position, choice, stream, token // 4)`` as counter. Every
(seed, position, choice, token) has noise of its own, so a shard of the vocabulary or a resumed answer draws the same.
The words are exact everywhere; noise is computed in float64, so that the last bit of a device's logarithm decides
nothing.

Shape legend: R rows, D draws, V vocabulary, N groups of 4 token ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pdserve.model.philox import Counter, Words, philox4x32, uniform

TOKEN_STREAM = 0
"""The counter's third word for drawing a token. Other uses of a request's seed take other streams."""

_LANES = 4
_WORD = 0xFFFFFFFF
_NOISE_RANGE = 26.01
"""Just over the largest minus the smallest noise that a 32-bit word can give (22.88 + 3.13): a token whose scaled logit
is further than this below the best one cannot win, so its noise is not computed."""
_MAX_SCORES = 4_194_304
"""Scores held at once, at most, but for those of one draw: a request may ask for many choices."""


class Draw(NamedTuple):
    """One token to be drawn."""

    row: int
    """Of the scaled logits."""
    seed: int
    position: int
    choice: int


def draw_tokens(scaled_RV: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token id for each draw.

    Args:
        scaled_RV: fp32, ``(logit - best) / temperature``, minus infinity for what must not be drawn.
    """
    num_at_once = max(1, _MAX_SCORES // scaled_RV.shape[1])
    tokens: list[int] = []
    for start in range(0, len(draws), num_at_once):
        tokens += _draw(scaled_RV, draws[start : start + num_at_once])
    return tokens


def _draw(scaled_RV: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    rows = [draw.row for draw in draws]
    scaled_DV = scaled_RV if rows == list(range(len(scaled_RV))) else scaled_RV[rows]
    num_groups = -(-scaled_DV.shape[1] // _LANES)
    missing = num_groups * _LANES - scaled_DV.shape[1]
    scaled_G4 = torch.nn.functional.pad(scaled_DV, (0, missing), value=-torch.inf).view(-1, _LANES)
    group_N = (scaled_G4 >= -_NOISE_RANGE).any(dim=-1).nonzero().flatten()  # of all draws, one after the other
    noise_N4 = _noise(draws, group_N.numpy(force=True), num_groups).to(scaled_DV.device)
    score_G4 = torch.full_like(scaled_G4, -torch.inf, dtype=torch.float64)
    score_G4[group_N] = scaled_G4[group_N] + noise_N4
    tokens: list[int] = score_G4.view(len(draws), -1).argmax(dim=-1).tolist()  # the first of equals
    return tokens


def _noise(draws: Sequence[Draw], group_N: npt.NDArray[np.int64], num_groups: int) -> torch.Tensor:
    """Gumbel noise, float64 ``[N, 4]``, for N groups of 4 token ids; each draw has ``num_groups`` of them."""
    draw_N, index_N = np.divmod(group_N, num_groups)

    def of_draw(values: Iterable[int]) -> Words:
        return np.take(np.fromiter(values, np.uint64, len(draws)), draw_N)

    words_N4 = philox4x32(
        Counter(
            of_draw(draw.position for draw in draws),
            of_draw(draw.choice for draw in draws),
            np.full(len(group_N), TOKEN_STREAM, np.uint64),
            index_N.astype(np.uint64),
        ),
        of_draw(draw.seed & _WORD for draw in draws),
        of_draw(draw.seed >> 32 & _WORD for draw in draws),
    )
    return torch.from_numpy(uniform(words_N4)).log_().neg_().log_().neg_()
