"""Which tokens may be drawn: min-p, top-k and top-p, as the lowest logit that they leave.

Called by `pdserve.model.sampling`. Keeps no state. All three keep the most likely tokens of a row, so that what they
leave is told by two numbers, and no mask of the vocabulary's size is made.

Shape legend: B rows, R of them, V vocabulary, C the most likely tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log

import torch

from pdserve.contracts.request import SamplingParams
from pdserve.kernels.operations import ALL_KEPT, Kept, Nucleus
from pdserve.kernels.selection import select_sampling_kernels


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
    lowest = [b + t * log(p.min_p) if p.min_p > 0 else -inf for b, p, t in zip(best, params, temperatures, strict=True)]
    rows = [row for row, p in enumerate(params) if 0 < p.top_k < logits_BV.shape[1]]
    if rows:
        limits = _kth_highest(_rows_of(logits_BV, rows), [params[row].top_k for row in rows])
        for row, limit in zip(rows, limits, strict=True):
            lowest[row] = max(lowest[row], limit)
    kept = [Kept(limit, ALL_KEPT.last_equal) for limit in lowest]
    nuclei = [
        Nucleus(row, p.top_p, best[row], temperatures[row], lowest[row]) for row, p in enumerate(params) if p.top_p < 1
    ]
    if nuclei:
        found = select_sampling_kernels(logits_BV).find_nuclei(logits_BV, nuclei)
        for nucleus, prefix in zip(nuclei, found, strict=True):
            kept[nucleus.row] = prefix
    return kept


def _rows_of(values_BX: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return values_BX if len(rows) == len(values_BX) else values_BX[rows]


def _kth_highest(logits_RV: torch.Tensor, top_ks: Sequence[int]) -> list[float]:
    highest_RC = logits_RV.topk(max(top_ks), dim=-1).values
    last_R1 = torch.tensor(top_ks, device=logits_RV.device)[:, None] - 1
    limits: list[float] = highest_RC.gather(1, last_R1).flatten().tolist()
    return limits
