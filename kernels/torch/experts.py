"""Mixture of experts in plain torch: routing, pairs sorted by expert, a product per expert, and their weighted sum.

`pdserve.kernels.selection` chooses them; routing is the same for every device. Knows no model.

Shape suffixes: T tokens, A experts of the layer, X of them on this rank, Y = X + 1, K experts of a token, P = T K
pairs, E input features, F output features.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from pdserve.kernels.operations import SortedPairs
from pdserve.kernels.torch.dense import TorchLinear, pack_linear
from pdserve.kernels.weight_quantisation import GroupedWeight


class Routes(NamedTuple):
    experts: torch.Tensor
    """int64 ``[T, K]``: by weight descending, then by id."""
    weights: torch.Tensor
    """float32 ``[T, K]``, contiguous."""


def route(
    logits_TA: torch.Tensor, experts_per_token: int, *, normalise: bool = False, of_chosen: bool = False
) -> Routes:
    """Choose experts by the softmax over all, and of ties the lowest id (Jiang et al. 2024, Mixtral; Qwen team 2024).

    Args:
        logits_TA: float32.
        normalise: divide the weights by their sum.
        of_chosen: choose by logits, and weigh by the softmax over the chosen ones (OpenAI 2025, gpt-oss).
    """
    assert logits_TA.dtype == torch.float32
    scores_TA = logits_TA if of_chosen else logits_TA.softmax(dim=-1)
    # ``topk`` promises no order of ties.
    sorted_TA, ids_TA = scores_TA.sort(dim=-1, descending=True, stable=True)
    weights_TK = sorted_TA[:, :experts_per_token].contiguous()
    if of_chosen:
        weights_TK = weights_TK.softmax(dim=-1)
    if normalise:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return Routes(ids_TA[:, :experts_per_token], weights_TK)


def sort_pairs(experts_TK: torch.Tensor, here: range) -> SortedPairs:
    """See `pdserve.kernels.operations.SortPairs`."""
    local_TK = experts_TK - here.start
    is_here_TK = (local_TK >= 0) & (local_TK < len(here))
    local_P, pairs_P = local_TK.where(is_here_TK, len(here)).flatten().sort(stable=True)
    places_P = torch.empty_like(pairs_P)
    places_P[pairs_P] = torch.arange(len(pairs_P), device=pairs_P.device)
    return SortedPairs(
        tokens=pairs_P // experts_TK.shape[1],
        starts=torch.searchsorted(local_P, torch.arange(len(here) + 1, device=local_P.device)),
        places=places_P.view_as(local_TK).where(is_here_TK, -1),
    )


def combine(y_PE: torch.Tensor, places_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """See `pdserve.kernels.operations.Combine`."""
    places_KT = places_TK.T.contiguous()
    parts_KTE = y_PE[places_KT].float().mul_(weights_TK.T[..., None])
    parts_KTE.masked_fill_(places_KT[..., None] < 0, 0.0)
    first_TE, *others_TE = parts_KTE.unbind()  # ``sum`` promises no order
    for other_TE in others_TE:
        first_TE += other_TE
    return first_TE.to(y_PE.dtype)


def pack_experts(
    weights: Iterable[torch.Tensor | GroupedWeight],
    biases_XF: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> TorchExperts:
    """See `pdserve.kernels.operations.PackExperts`."""
    return TorchExperts(
        [
            pack_linear(weight, None if biases_XF is None else biases_XF[index], dtype=dtype)
            for index, weight in enumerate(weights)
        ]
    )


class TorchExperts:
    """Implements `pdserve.kernels.operations.Experts`: one product after the other. The host waits for ``starts_Y``."""

    def __init__(self, linears: Sequence[TorchLinear]) -> None:
        self._linears = linears

    @property
    def num_bytes(self) -> int:
        return sum(linear.num_bytes for linear in self._linears)

    def __call__(self, x_PE: torch.Tensor, starts_Y: torch.Tensor) -> torch.Tensor:
        bounds = [*pairwise(starts_Y.tolist())]
        touched = [each for each in zip(self._linears, bounds, strict=True) if each[1][0] < each[1][1]]
        parts = [linear(x_PE[start:end]) for linear, (start, end) in touched or [(self._linears[0], (0, 0))]]
        return pad(torch.cat(parts), (0, 0, 0, len(x_PE) - bounds[-1][1]))
