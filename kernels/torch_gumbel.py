"""Draws tokens by Gumbel-max, in torch operations on any device: the definition, and what other kernels are tested by.

The token with the highest ``(logit - best) / temperature + noise`` wins, ties to the lowest id. Its noise is
``-log(-log(u))``, where u is word ``token % 4`` of Philox4x32-10 with the seed as key and ``(position, choice, stream,
token // 4)`` as counter. Every (seed, position, choice, token) has noise of its own, so a shard of the vocabulary or a
resumed answer draws the same. The words are exact everywhere; noise is computed in float64, so that the last bit of a
device's logarithm decides nothing.

Shape legend: B rows of logits, D draws, V vocabulary, G groups of 4 token ids of a row, N groups that can win.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdserve.kernels.operations import Draw
from pdserve.kernels.philox import Counter, philox4x32, uniform

TOKEN_STREAM = 0
"""The counter's third word for drawing a token. Other uses of a request's seed take other streams."""

_LANES = 4
_WORD = 0xFFFFFFFF
NOISE_RANGE = 26.01
"""Just over the largest minus the smallest noise that a 32-bit word can give (22.88 + 3.13): a token whose scaled logit
is further than this below the best one cannot win, so its noise is not computed."""
_MAX_SCORES = 4_194_304
"""Scores held at once, at most, but for those of one draw: a request may ask for many choices."""


def draw_tokens(logits_BV: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """See `pdserve.kernels.operations.DrawTokens`."""
    num_at_once = max(1, _MAX_SCORES // logits_BV.shape[1])
    tokens: list[int] = []
    for start in range(0, len(draws), num_at_once):
        tokens += _draw(logits_BV, draws[start : start + num_at_once])
    return tokens


def _draw(logits_BV: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    vocab_size = logits_BV.shape[1]
    num_groups = -(-vocab_size // _LANES)
    padded_DV = torch.nn.functional.pad(_scaled(logits_BV, draws), (0, -vocab_size % _LANES), value=-torch.inf)
    scaled_G4 = padded_DV.view(-1, _LANES)
    group_N = (scaled_G4 >= -NOISE_RANGE).any(dim=-1).nonzero().flatten()  # of all draws, one after the other
    score_G4 = torch.full_like(scaled_G4, -torch.inf, dtype=torch.float64)
    score_G4[group_N] = scaled_G4[group_N] + _noise(draws, group_N // num_groups, group_N % num_groups)
    tokens: list[int] = score_G4.view(len(draws), -1).argmax(dim=-1).tolist()  # the first of equals
    return tokens


def _scaled(logits_BV: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """``(logit - best) / temperature``, ``[D, V]``; minus infinity for what must not be drawn."""
    logits_DV = logits_BV[[draw.row for draw in draws]]
    ids_V = torch.arange(logits_DV.shape[1], device=logits_DV.device)
    lowest_D1 = logits_DV.new_tensor([draw.kept.lowest for draw in draws])[:, None]
    last_equal_D1 = ids_V.new_tensor([draw.kept.last_equal for draw in draws])[:, None]
    is_kept_DV = (logits_DV > lowest_D1) | ((logits_DV == lowest_D1) & (ids_V <= last_equal_D1))
    scaled_DV = logits_DV - logits_DV.new_tensor([draw.best for draw in draws])[:, None]
    scaled_DV /= logits_DV.new_tensor([draw.temperature for draw in draws])[:, None]
    return scaled_DV.masked_fill_(~is_kept_DV, -torch.inf)


def _noise(draws: Sequence[Draw], draw_N: torch.Tensor, group_N: torch.Tensor) -> torch.Tensor:
    """Gumbel noise, float64 ``[N, 4]``, for groups of 4 token ids."""
    position, choice, key_0, key_1 = draw_N.new_tensor(
        [(draw.position, draw.choice, draw.seed & _WORD, draw.seed >> 32) for draw in draws]
    ).T[:, draw_N]
    words_N4 = philox4x32(Counter(position, choice, group_N.new_tensor(TOKEN_STREAM), group_N), key_0, key_1)
    return uniform(words_N4).log_().neg_().log_().neg_()
