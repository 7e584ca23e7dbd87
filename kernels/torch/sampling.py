"""Draws and top-p in torch operations on any device: the definition and the reference for the other kernels.

Draws use Gumbel-max: the token with the highest ``(logit - best) / temperature + noise`` wins, ties to the lowest id.
The noise is ``-log(-log(u))``, where u is word ``token % 4`` of Philox4x32-10 with the seed as key and ``(position,
choice, stream, token // 4)`` as counter. Noise depends only on (seed, position, choice, token), so a vocabulary shard
or a resumed request draws the same token. The words are exact everywhere; float64 noise keeps the last bit of a
device's logarithm from deciding a draw.

Shape suffixes: B rows of logits, V vocabulary, D draws, R rows with top-p, G groups of 4 token ids of a row, N groups
that can win.
"""

from __future__ import annotations

import torch

from pdserve.kernels.operations import LAST_ID, DrawTensors, Thresholds, TopPTensors
from pdserve.kernels.philox import Counter, philox4x32, uniform

TOKEN_STREAM = 0
"""Third word of the counter for token draws. Other uses of a request's seed take other streams."""
NOISE_RANGE = 26.01
"""Just over the largest minus the smallest noise of a 32-bit word (22.88 + 3.13). A token whose scaled logit is further
below the best cannot win, so its noise is not computed."""

_LANES = 4
_WORD = 0xFFFFFFFF


def draw_tokens(logits_BV: torch.Tensor, draws: DrawTensors) -> torch.Tensor:
    """See `pdserve.kernels.operations.DrawTokens`. The host waits here, to find the tokens that can win."""
    vocab_size = logits_BV.shape[1]
    num_groups = -(-vocab_size // _LANES)
    padded_DV = torch.nn.functional.pad(_scaled(logits_BV, draws), (0, -vocab_size % _LANES), value=-torch.inf)
    scaled_G4 = padded_DV.view(-1, _LANES)
    group_N = (scaled_G4 >= -NOISE_RANGE).any(dim=-1).nonzero().flatten()  # of all draws, draw after draw
    score_G4 = torch.full_like(scaled_G4, -torch.inf, dtype=torch.float64)
    score_G4[group_N] = scaled_G4[group_N] + _noise(draws, group_N // num_groups, group_N % num_groups)
    return score_G4.view(len(draws.row), -1).argmax(dim=-1)  # the first of equals


def find_top_p(logits_BV: torch.Tensor, rows: TopPTensors) -> Thresholds:
    """See `pdserve.kernels.operations.FindTopP`. Sorts whole rows."""
    logits_RV = logits_BV[rows.row.long()]
    weight_RV = ((logits_RV - rows.best[:, None]) / rows.temperature[:, None]).exp_()
    weight_RV.masked_fill_(logits_RV < rows.lowest[:, None], 0)
    needed_R1 = weight_RV.sum(dim=-1, keepdim=True, dtype=torch.float64) * rows.top_p[:, None]
    heaviest = logits_RV.sort(dim=-1, descending=True, stable=True)
    lighter_RV = weight_RV.gather(1, heaviest.indices).cumsum(dim=-1, dtype=torch.float64) < needed_R1
    end_R1 = lighter_RV.sum(dim=-1, keepdim=True).clamp_(max=logits_RV.shape[1] - 1)
    lowest_R, last_R = (field.gather(1, end_R1)[:, 0] for field in heaviest)
    # If rounding keeps every sum below the share, all tokens that were still allowed stay.
    is_short_R = lighter_RV[:, -1]
    return Thresholds(
        lowest=torch.where(is_short_R, rows.lowest, lowest_R),
        last_equal=torch.where(is_short_R, LAST_ID, last_R).int(),
    )


def _scaled(logits_BV: torch.Tensor, draws: DrawTensors) -> torch.Tensor:
    """Compute ``(logit - best) / temperature``: ``[D, V]``; minus infinity for tokens that must not be drawn."""
    logits_DV = logits_BV[draws.row.long()]
    ids_V = torch.arange(logits_DV.shape[1], device=logits_DV.device)
    is_equal_DV = (logits_DV == draws.lowest[:, None]) & (ids_V <= draws.last_equal[:, None])
    scaled_DV = (logits_DV - draws.best[:, None]) / draws.temperature[:, None]
    return scaled_DV.masked_fill_(~((logits_DV > draws.lowest[:, None]) | is_equal_DV), -torch.inf)


def _noise(draws: DrawTensors, draw_N: torch.Tensor, group_N: torch.Tensor) -> torch.Tensor:
    """Compute Gumbel noise for groups of 4 token ids: float64 ``[N, 4]``."""
    position, choice, seed = (field.long()[draw_N] for field in (draws.position, draws.choice, draws.seed))
    counter = Counter(position & _WORD, choice & _WORD, group_N.new_tensor(TOKEN_STREAM), group_N)
    words_N4 = philox4x32(counter, seed & _WORD, seed >> 32 & _WORD)
    return uniform(words_N4).log_().neg_().log_().neg_()
