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

import numpy as np
import torch

from pdserve.kernels.operations import Draw, DrawTensors
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
        some = draw_tensors(draws[start : start + num_at_once], logits_BV.device)
        tokens += draw_on_device(logits_BV, some).tolist()
    return tokens


def draw_on_device(logits_BV: torch.Tensor, draws: DrawTensors) -> torch.Tensor:
    """See `pdserve.kernels.operations.DrawOnDevice`. Which tokens can win is found by the host, which waits for it."""
    vocab_size = logits_BV.shape[1]
    num_groups = -(-vocab_size // _LANES)
    padded_DV = torch.nn.functional.pad(_scaled(logits_BV, draws), (0, -vocab_size % _LANES), value=-torch.inf)
    scaled_G4 = padded_DV.view(-1, _LANES)
    group_N = (scaled_G4 >= -NOISE_RANGE).any(dim=-1).nonzero().flatten()  # of all draws, one after the other
    score_G4 = torch.full_like(scaled_G4, -torch.inf, dtype=torch.float64)
    score_G4[group_N] = scaled_G4[group_N] + _noise(draws, group_N // num_groups, group_N % num_groups)
    return score_G4.view(len(draws.row), -1).argmax(dim=-1)  # the first of equals


def draw_tensors(draws: Sequence[Draw], device: torch.device) -> DrawTensors:
    """The same on ``device``. torch computes with signed numbers only: they have the bits of what is unsigned."""

    def bits(values: list[int], unsigned: type[np.unsignedinteger]) -> torch.Tensor:
        signed = np.int64 if unsigned is np.uint64 else np.int32
        return torch.from_numpy(np.array(values, unsigned).view(signed)).to(device)

    def floats(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return DrawTensors(
        row=bits([draw.row for draw in draws], np.uint32),
        seed=bits([draw.seed for draw in draws], np.uint64),
        position=bits([draw.position for draw in draws], np.uint32),
        choice=bits([draw.choice for draw in draws], np.uint32),
        best=floats([draw.best for draw in draws]),
        temperature=floats([draw.temperature for draw in draws]),
        lowest=floats([draw.kept.lowest for draw in draws]),
        last_equal=bits([draw.kept.last_equal for draw in draws], np.uint32),
    )


def _scaled(logits_BV: torch.Tensor, draws: DrawTensors) -> torch.Tensor:
    """``(logit - best) / temperature``, ``[D, V]``; minus infinity for what must not be drawn."""
    logits_DV = logits_BV[draws.row.long()]
    ids_V = torch.arange(logits_DV.shape[1], device=logits_DV.device)
    is_equal_DV = (logits_DV == draws.lowest[:, None]) & (ids_V <= draws.last_equal[:, None])
    scaled_DV = (logits_DV - draws.best[:, None]) / draws.temperature[:, None]
    return scaled_DV.masked_fill_(~((logits_DV > draws.lowest[:, None]) | is_equal_DV), -torch.inf)


def _noise(draws: DrawTensors, draw_N: torch.Tensor, group_N: torch.Tensor) -> torch.Tensor:
    """Gumbel noise, float64 ``[N, 4]``, for groups of 4 token ids."""
    position, choice, seed = (field.long()[draw_N] for field in (draws.position, draws.choice, draws.seed))
    counter = Counter(position & _WORD, choice & _WORD, group_N.new_tensor(TOKEN_STREAM), group_N)
    words_N4 = philox4x32(counter, seed & _WORD, seed >> 32 & _WORD)
    return uniform(words_N4).log_().neg_().log_().neg_()
