"""Which tokens may be drawn: min-p, top-k and top-p, as the lowest logit that they leave.

Called by `pdserve.model.sampling`. Keeps no state. All three keep the most likely tokens of a row, so that what they
leave is told by two numbers, and no mask of the vocabulary's size is made.

Shape legend: R rows, V vocabulary, C the most likely tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log
from typing import NamedTuple

import torch

from pdserve.contracts.request import SamplingParams

_FIRST_CANDIDATES = 64
_MORE_CANDIDATES = 16
"""Top-p sorts so many of the most likely tokens, and so many times more of those rows in which they are too few."""


class Kept(NamedTuple):
    """The tokens that may be drawn."""

    lowest: float
    """Those of a higher logit,"""
    last_equal: int
    """and those of this logit up to this id."""


ALL = Kept(-inf, 2**31 - 1)


def truncates(params: SamplingParams) -> bool:
    """Whether some tokens may not be drawn."""
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def kept_tokens(
    logits_BV: torch.Tensor, best: Sequence[float], params: Sequence[SamplingParams], temperatures: Sequence[float]
) -> list[Kept]:
    """What min-p and top-k, then top-p leave of each row.

    Min-p keeps every token that is at least ``min_p`` times as likely as the most likely one. Top-k keeps every token
    whose logit is at least the k-th highest: equals of the k-th all stay. Top-p then keeps the smallest prefix, in
    order of (logit descending, id ascending), with at least ``top_p`` of the probability that the others left.

    Args:
        logits_BV: float32 ``[B, V]``; only rows with top-k or top-p are read.
        best: each row's highest logit, finite.
        temperatures: over 0.
    """
    vocab_size = logits_BV.shape[1]
    kept = [
        Kept(b + t * log(p.min_p), ALL.last_equal) if p.min_p > 0 else ALL
        for b, p, t in zip(best, params, temperatures, strict=True)
    ]
    rows = [row for row, p in enumerate(params) if 0 < p.top_k < vocab_size]
    if rows:
        limits = _kth_highest(_rows_of(logits_BV, rows), [params[row].top_k for row in rows])
        for row, limit in zip(rows, limits, strict=True):
            kept[row] = Kept(max(limit, kept[row].lowest), ALL.last_equal)
    rows = [row for row, p in enumerate(params) if p.top_p < 1]
    if rows:
        logits_RV = _rows_of(logits_BV, rows)
        weight_RV = logits_RV - logits_RV.new_tensor([best[row] for row in rows])[:, None]
        weight_RV.div_(logits_RV.new_tensor([temperatures[row] for row in rows])[:, None]).exp_()
        if any(kept[row].lowest > -inf for row in rows):
            lowest_R1 = logits_RV.new_tensor([kept[row].lowest for row in rows])[:, None]
            weight_RV.masked_fill_(logits_RV < lowest_R1, 0)
        prefixes = _prefixes(logits_RV, weight_RV, [params[row].top_p for row in rows])
        kept = [prefixes.pop(0) if p.top_p < 1 else before for p, before in zip(params, kept, strict=True)]
    return kept


def _rows_of(values_BX: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return values_BX if len(rows) == len(values_BX) else values_BX[rows]


def _kth_highest(logits_RV: torch.Tensor, top_ks: Sequence[int]) -> list[float]:
    highest_RC = logits_RV.topk(max(top_ks), dim=-1).values
    last_R1 = torch.tensor(top_ks, device=logits_RV.device)[:, None] - 1
    limits: list[float] = highest_RC.gather(1, last_R1).flatten().tolist()
    return limits


def _prefixes(logits_RV: torch.Tensor, weight_RV: torch.Tensor, top_ps: Sequence[float]) -> list[Kept]:
    """The smallest prefix of each row, most likely first, with a share ``top_p < 1`` of its weight."""
    num_rows, vocab_size = logits_RV.shape
    top_p_R1 = torch.tensor(top_ps, dtype=torch.float64, device=weight_RV.device)[:, None]
    wanted_R1 = weight_RV.sum(dim=-1, keepdim=True, dtype=torch.float64) * top_p_R1
    prefixes = [ALL] * num_rows
    left, size = list(range(num_rows)), _FIRST_CANDIDATES
    while left:
        size = min(size, vocab_size)
        heaviest = _rows_of(logits_RV, left).topk(size, dim=-1)
        sums_LC = _rows_of(weight_RV, left).gather(1, heaviest.indices).cumsum(dim=-1, dtype=torch.float64)
        lighter_LC = sums_LC < wanted_R1[left]
        # The last token of each prefix, and the one after it. Where rounding lets no sum reach the share, all are kept.
        ends_L1 = lighter_LC.sum(dim=-1, keepdim=True).clamp_(max=size - 1)
        is_short = lighter_LC[:, -1].tolist() if size < vocab_size else [False] * len(left)
        lowest = heaviest.values.gather(1, ends_L1).flatten().tolist()
        following = heaviest.values.gather(1, (ends_L1 + 1).clamp_(max=size - 1)).flatten().tolist()
        for place, row in enumerate(left):
            if lowest[place] > following[place]:
                prefixes[row] = Kept(lowest[place], ALL.last_equal)
            elif not is_short[place]:
                num_equals = int(ends_L1[place]) + 1 - int((heaviest.values[place] > lowest[place]).sum())
                ids = (logits_RV[row] == lowest[place]).nonzero()
                prefixes[row] = Kept(lowest[place], int(ids[num_equals - 1]))
        left = [row for row, short in zip(left, is_short, strict=True) if short]
        size *= _MORE_CANDIDATES
    return prefixes
