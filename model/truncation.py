"""Which tokens may be drawn: min-p, top-k and top-p.

Called by `pdserve.model.sampling` with the logits of the rows that truncate. Keeps no state.

Shape legend: R rows, V vocabulary, K and C the most likely tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import torch

from pdserve.contracts.request import SamplingParams

_MIN_TEMPERATURE = 1e-6
"""Lower temperatures are taken as this one, lest the division overflow."""


def scale(logits_RV: torch.Tensor, best_R: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """``(logit - best) / temperature``: at most 0, and never NaN."""
    temperature_R = logits_RV.new_tensor([max(p.temperature, _MIN_TEMPERATURE) for p in params])
    return (logits_RV - best_R[:, None]) / temperature_R[:, None]


def truncates(params: SamplingParams, vocab_size: int) -> bool:
    """Whether some tokens may not be drawn."""
    return 0 < params.top_k < vocab_size or params.top_p < 1 or params.min_p > 0


def kept_tokens(logits_RV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Which tokens survive min-p and top-k, then top-p, at the rows' temperatures.

    Min-p keeps every token that is at least ``min_p`` times as likely as the most likely one. Top-k keeps every token
    whose logit is at least the k-th highest: equals of the k-th all stay. Top-p then keeps the smallest prefix, in
    order of (probability descending, id ascending), with at least ``top_p`` of the probability that the others left.

    Args:
        logits_RV: fp32 ``[R, V]``, with a finite one in each row.

    Returns:
        bool ``[R, V]``, at least one true in each row.
    """
    vocab_size = logits_RV.shape[1]
    scaled_RV = scale(logits_RV, logits_RV.amax(dim=-1), params)
    kept_RV = scaled_RV >= scaled_RV.new_tensor([log(p.min_p) if p.min_p > 0 else -torch.inf for p in params])[:, None]
    rows = [row for row, p in enumerate(params) if 0 < p.top_k < vocab_size]
    if rows:
        kept_RV[rows] &= _top_k_mask(logits_RV[rows], [params[row].top_k for row in rows])
    rows = [row for row, p in enumerate(params) if p.top_p < 1]
    if rows:
        weight_RV = scaled_RV[rows].masked_fill_(~kept_RV[rows], -torch.inf).double().exp_()
        kept_RV[rows] = _top_p_mask(weight_RV, [params[row].top_p for row in rows])
    return kept_RV


def _top_k_mask(logits_RV: torch.Tensor, top_ks: Sequence[int]) -> torch.Tensor:
    highest_RK = logits_RV.topk(max(top_ks), dim=-1).values
    last_R1 = torch.tensor(top_ks, device=logits_RV.device)[:, None] - 1
    return logits_RV >= highest_RK.gather(1, last_R1)


def _top_p_mask(weight_RV: torch.Tensor, top_ps: Sequence[float]) -> torch.Tensor:
    """Smallest prefix of the tokens, heaviest first, with a share ``top_p < 1`` of the row's weight (float64)."""
    top_p_R1 = weight_RV.new_tensor(top_ps)[:, None]
    total_R1 = weight_RV.sum(dim=-1, keepdim=True)
    # Tokens lighter than (1 - p) / V of the total weigh less than 1 - p together, so the prefix ends before them and
    # only the others need sorting. Half of that leaves room for rounding.
    is_candidate_RV = weight_RV >= total_R1 * (1 - top_p_R1) / (2 * weight_RV.shape[1])
    num_candidates = int(is_candidate_RV.sum(dim=-1).max())
    heaviest_RC = weight_RV.topk(num_candidates, dim=-1).values
    # The last candidate is left out: where rounding lets no sum reach the share, all candidates are kept.
    num_kept_R1 = (heaviest_RC.cumsum(dim=-1)[:, :-1] < top_p_R1 * total_R1).sum(dim=-1, keepdim=True) + 1
    lightest_R1 = heaviest_RC.gather(1, num_kept_R1 - 1)
    is_heavier_RV = weight_RV > lightest_R1
    is_equal_RV = weight_RV == lightest_R1
    num_equals_R1 = num_kept_R1 - is_heavier_RV.sum(dim=-1, keepdim=True)
    return is_heavier_RV | (is_equal_RV & (is_equal_RV.cumsum(dim=-1) <= num_equals_R1))
