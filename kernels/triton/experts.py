"""Experts on a GPU: pairs of a token and an expert sorted, products of every expert's rows, and their weighted sum.

Called through `pdserve.kernels.selection`; routes come from `pdserve.kernels.torch.experts`. Each is one launch, whose
grid depends on shapes alone. No atomics: results are deterministic.

Targets: ``bytes / (0.9 bandwidth)``: for a product, those of `pdserve.kernels.triton.quantized_matmul` of every expert
that has rows; for a sum, ``(P + T) E b``.

Shape suffixes: T tokens, K experts of a token, P = T K pairs, X experts of this rank, Y = X + 1, E features.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from pdserve.kernels.operations import SortedPairs
from pdserve.kernels.triton.quantized_matmul import PackedWeight, pack, quantized_matmul, stacked
from pdserve.kernels.weight_quantisation import GroupedWeight

_PAIR_TILE = 1024
_SUM_TILE = 1024


def pack_experts(
    weights: Iterable[torch.Tensor | GroupedWeight],
    biases_XF: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> TritonExperts:
    """See `pdserve.kernels.operations.PackExperts`."""
    return TritonExperts(stacked([pack(weight) for weight in weights]), biases_XF)


class TritonExperts:
    """Implements `pdserve.kernels.operations.Experts`."""

    def __init__(self, weight: PackedWeight, biases_XF: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._biases_XF = biases_XF

    @property
    def num_bytes(self) -> int:
        return self._weight.num_bytes + (0 if self._biases_XF is None else self._biases_XF.nbytes)

    def __call__(self, x_PE: torch.Tensor, starts_Y: torch.Tensor) -> torch.Tensor:
        return quantized_matmul(x_PE, self._weight, self._biases_XF, starts_Y=starts_Y)


def sort_pairs(experts_TK: torch.Tensor, here: range) -> SortedPairs:
    """See `pdserve.kernels.operations.SortPairs`."""
    assert experts_TK.stride(1) == 1
    places_TK = torch.empty_like(experts_TK, memory_format=torch.contiguous_format)
    tokens_P = experts_TK.new_empty(experts_TK.numel())
    starts_Y = experts_TK.new_empty(len(here) + 1)
    _sort_kernel[(len(here) + 1,)](
        experts_TK,
        tokens_P,
        starts_Y,
        places_TK,
        num_pairs=len(tokens_P),
        FIRST_EXPERT=here.start,
        NUM_EXPERTS=len(here),
        PER_TOKEN=experts_TK.shape[1],
        STRIDE=experts_TK.stride(0),
        TILE=_PAIR_TILE,
        num_warps=4,
    )
    return SortedPairs(tokens_P, starts_Y, places_TK)


def combine(y_PE: torch.Tensor, places_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """See `pdserve.kernels.operations.Combine`."""
    assert y_PE.is_contiguous()
    assert places_TK.is_contiguous()
    assert weights_TK.stride(1) == 1
    (num_tokens, per_token), num_features = places_TK.shape, y_PE.shape[1]
    sum_TE = y_PE.new_empty(num_tokens, num_features)
    _combine_kernel[num_tokens, triton.cdiv(num_features, _SUM_TILE)](
        y_PE,
        places_TK,
        weights_TK,
        sum_TE,
        NUM_FEATURES=num_features,
        PER_TOKEN=per_token,
        STRIDE=weights_TK.stride(0),
        TILE=_SUM_TILE,
        num_warps=4,
    )
    return sum_TE


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_kernel(
    experts_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    places_ptr: tl.tensor,
    num_pairs: tl.tensor,
    FIRST_EXPERT: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    STRIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid ``(Y)``: each program places one expert's pairs, and the last one those of no expert here. Pointers, all to
    int64: experts ``[T, K]``, whose rows are ``STRIDE`` apart; tokens ``[P]``; starts ``[Y]``; places ``[T, K]``."""
    expert = tl.program_id(0)
    place = 0
    for first in tl.range(0, num_pairs, TILE):
        expert_P = _experts(experts_ptr, first, num_pairs, FIRST_EXPERT, NUM_EXPERTS, PER_TOKEN, STRIDE, TILE)
        place += tl.sum((expert_P < expert).to(tl.int32))
    tl.store(starts_ptr + expert, place)
    for first in tl.range(0, num_pairs, TILE):
        expert_P = _experts(experts_ptr, first, num_pairs, FIRST_EXPERT, NUM_EXPERTS, PER_TOKEN, STRIDE, TILE)
        is_own_P = expert_P == expert
        pair_P = first + tl.arange(0, TILE)
        place_P = place + tl.cumsum(is_own_P.to(tl.int32)) - 1
        tl.store(tokens_ptr + place_P, pair_P // PER_TOKEN, mask=is_own_P)
        tl.store(places_ptr + pair_P, tl.where(expert < NUM_EXPERTS, place_P, -1), mask=is_own_P)
        place += tl.sum(is_own_P.to(tl.int32))


@triton.jit
def _experts(
    experts_ptr: tl.tensor,
    first: tl.tensor,
    num_pairs: tl.tensor,
    FIRST_EXPERT: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    STRIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    """``[TILE]`` experts of pairs from ``first`` on, counted from the first one here; ``NUM_EXPERTS`` is none of them,
    and past the last pair it is more."""
    pair_P = first + tl.arange(0, TILE)
    is_pair_P = pair_P < num_pairs
    place_P = (pair_P // PER_TOKEN).to(tl.int64) * STRIDE + pair_P % PER_TOKEN
    expert_P = tl.load(experts_ptr + place_P, mask=is_pair_P, other=0).to(tl.int32) - FIRST_EXPERT
    expert_P = tl.where((expert_P >= 0) & (expert_P < NUM_EXPERTS), expert_P, NUM_EXPERTS)
    return tl.where(is_pair_P, expert_P, NUM_EXPERTS + 1)


@triton.jit
def _combine_kernel(
    y_ptr: tl.tensor,
    places_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    NUM_FEATURES: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    STRIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid ``(T, tiles of E)``. Pointers: y ``[P, E]``; places ``[T, K]``, int64; weights ``[T, K]``, float32, whose
    rows are ``STRIDE`` apart; sum ``[T, E]``."""
    token = tl.program_id(0).to(tl.int64)
    feature_E = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_feature_E = feature_E < NUM_FEATURES
    acc_E = tl.zeros([TILE], tl.float32)
    for slot in tl.static_range(PER_TOKEN):
        place = tl.load(places_ptr + token * PER_TOKEN + slot)
        # What lies at no place here is not read: it may be NaN.
        y_E = tl.load(y_ptr + place * NUM_FEATURES + feature_E, mask=is_feature_E & (place >= 0), other=0)
        acc_E += y_E.to(tl.float32) * tl.load(weights_ptr + token * STRIDE + slot)
    tl.store(sum_ptr + token * NUM_FEATURES + feature_E, acc_E.to(sum_ptr.dtype.element_ty), mask=is_feature_E)
