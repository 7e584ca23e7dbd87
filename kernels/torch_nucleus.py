"""Finds the tokens that top-p keeps, in torch operations on any device: what other kernels are tested by.

Shape legend: R rows, V vocabulary, C the most likely tokens of a row, L rows whose prefix is not found yet.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdserve.kernels.operations import ALL_KEPT, Kept, KeptTensors, Nucleus, NucleusTensors

_FIRST_CANDIDATES = 64
_MORE_CANDIDATES = 16
"""So many of the most likely tokens are sorted, and so many times more of those rows in which they are too few."""


def find_nuclei(logits_BV: torch.Tensor, nuclei: Sequence[Nucleus]) -> list[Kept]:
    """See `pdserve.kernels.operations.FindNuclei`."""
    logits_RV = logits_BV[[nucleus.row for nucleus in nuclei]]
    top_p_R1, best_R1, temperature_R1, lowest_R1 = torch.tensor(
        [nucleus[1:] for nucleus in nuclei], dtype=torch.float64, device=logits_RV.device
    ).T[..., None]
    weight_RV = ((logits_RV - best_R1.float()) / temperature_R1.float()).exp_()
    weight_RV.masked_fill_(logits_RV < lowest_R1.float(), 0)
    return _prefixes(logits_RV, weight_RV, weight_RV.sum(dim=-1, keepdim=True, dtype=torch.float64) * top_p_R1)


def _prefixes(logits_RV: torch.Tensor, weight_RV: torch.Tensor, wanted_R1: torch.Tensor) -> list[Kept]:
    """The smallest prefix of each row, most likely first, with at least the wanted weight."""
    num_rows, vocab_size = logits_RV.shape
    prefixes = [ALL_KEPT] * num_rows
    left, size = list(range(num_rows)), _FIRST_CANDIDATES
    while left:
        size = min(size, vocab_size)
        heaviest = logits_RV[left].topk(size, dim=-1)
        sums_LC = weight_RV[left].gather(1, heaviest.indices).cumsum(dim=-1, dtype=torch.float64)
        lighter_LC = sums_LC < wanted_R1[left]
        # The last token of each prefix, and the one after it. Where rounding lets no sum reach the share, all are kept.
        ends_L1 = lighter_LC.sum(dim=-1, keepdim=True).clamp_(max=size - 1)
        is_short = lighter_LC[:, -1].tolist() if size < vocab_size else [False] * len(left)
        lowest = heaviest.values.gather(1, ends_L1).flatten().tolist()
        following = heaviest.values.gather(1, (ends_L1 + 1).clamp_(max=size - 1)).flatten().tolist()
        for place, row in enumerate(left):
            if lowest[place] > following[place]:
                prefixes[row] = Kept(lowest[place], ALL_KEPT.last_equal)
            elif not is_short[place]:
                num_equals = int(ends_L1[place]) + 1 - int((heaviest.values[place] > lowest[place]).sum())
                ids = (logits_RV[row] == lowest[place]).nonzero()
                prefixes[row] = Kept(lowest[place], int(ids[num_equals - 1]))
        left = [row for row, short in zip(left, is_short, strict=True) if short]
        size *= _MORE_CANDIDATES
    return prefixes


def find_nuclei_on_device(logits_BV: torch.Tensor, nuclei: NucleusTensors) -> KeptTensors:
    """See `pdserve.kernels.operations.FindNucleiOnDevice`. Sorts whole rows, because it may not look at any."""
    logits_RV = logits_BV[nuclei.row.long()]
    weight_RV = ((logits_RV - nuclei.best[:, None]) / nuclei.temperature[:, None]).exp_()
    weight_RV.masked_fill_(logits_RV < nuclei.lowest[:, None], 0)
    wanted_R1 = weight_RV.sum(dim=-1, keepdim=True, dtype=torch.float64) * nuclei.top_p[:, None]
    heaviest = logits_RV.sort(dim=-1, descending=True, stable=True)
    lighter_RV = weight_RV.gather(1, heaviest.indices).cumsum(dim=-1, dtype=torch.float64) < wanted_R1
    end_R1 = lighter_RV.sum(dim=-1, keepdim=True).clamp_(max=logits_RV.shape[1] - 1)
    lowest_R, last_R = (field.gather(1, end_R1)[:, 0] for field in heaviest)
    # Where rounding lets no sum reach the share, all are kept that were not left out beforehand.
    is_short_R = lighter_RV[:, -1]
    return KeptTensors(
        lowest=torch.where(is_short_R, nuclei.lowest, lowest_R),
        last_equal=torch.where(is_short_R, ALL_KEPT.last_equal, last_R).int(),
    )
