"""Shared parts of the Triton attention kernels: the loop over a row's pages, and the pool arguments of launchers.

Called by `pdserve.kernels.triton.prefill_attention` and `pdserve.kernels.triton.decode_attention`. Launches nothing.

The loop is FlashAttention-2 (Dao 2023): scores of a key tile, a running maximum and sum, and one rescaled accumulator.
The rule's scale and log2(e) fold into one factor, so that a weight costs one exp2. Rows of a query tile are (token,
head) pairs of one KV head's group, so that every key is read once for the whole group.

Shape suffixes: M rows of a tile of queries, N keys of a tile, D head dim padded to a power of two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.operations import AttentionRule

METADATA_POINTERS = ["query_starts_ptr", "kv_lengths_ptr", "block_starts_ptr", "block_ids_ptr", "positions_ptr"]
"""Pointers into one tensor, at offsets that change every step: alignment must not trigger a compilation."""
_LOG2_E = math.log2(math.e)


@triton.jit
def attend(
    q_MD: tl.tensor,
    acc_MD: tl.tensor,
    max_M: tl.tensor,
    sum_M: tl.tensor,
    positions_M: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    table_ptr: tl.tensor,
    kv_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    block_stride: tl.tensor,
    side_stride: tl.tensor,
    scale_block_stride: tl.tensor,
    scale_side_stride: tl.tensor,
    score_factor: tl.tensor,
    cap: tl.tensor,
    window: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the keys of positions ``first .. end`` of one row to what its queries have seen.

    Args:
        q_MD: queries; 0 in padding.
        acc_MD: float32: values seen, weighted.
        max_M: float32: highest score seen, in powers of two; -inf where none was.
        sum_M: float32: sum of the weights seen.
        positions_M: int32: of each query.
        first: a multiple of ``KEYS``.
        end: also one, but where ``MASKED``.
        table_ptr: the row's block ids, int32.
        kv_ptr: keys of one head and layer in block 0: ``[BLOCK_SIZE, HEAD_DIM]``; values are ``side_stride`` further,
            and the next block ``block_stride``. Offsets are 64 bits wide.
        scales_ptr: float32, of quantised keys: ``[BLOCK_SIZE]``, strided likewise; or ``None``.
        score_factor: of `score_constants`, and so is ``cap``.
        MASKED: some of the keys are not seen by all of the queries, or lie past ``end``.

    Returns:
        ``acc_MD, max_M, sum_M``.
    """
    dim_D = tl.arange(0, q_MD.shape[1])
    is_dim_D = dim_D < HEAD_DIM
    CHECKED: tl.constexpr = MASKED or q_MD.shape[1] != HEAD_DIM
    for start in tl.range(first, end, KEYS):
        key_N = start + tl.arange(0, KEYS)
        is_key_N = key_N < end
        block_N = load(table_ptr + key_N // BLOCK_SIZE, is_key_N, MASKED).to(tl.int64)
        slot_N = key_N % BLOCK_SIZE
        kv_N = kv_ptr + block_N * block_stride + slot_N * HEAD_DIM
        k_DN = load(kv_N[None, :] + dim_D[:, None], is_key_N[None, :] & is_dim_D[:, None], CHECKED)
        scores_MN = tl.dot(q_MD, k_DN.to(q_MD.dtype), input_precision="ieee") * score_factor
        if scales_ptr is not None:
            scales_N = scales_ptr + block_N * scale_block_stride + slot_N
            scores_MN *= load(scales_N, is_key_N, MASKED)[None, :]
        if HAS_CAP:
            scores_MN = cap * tanh_of_power(scores_MN)
        if MASKED:
            seen_MN = key_N[None, :] <= positions_M[:, None]
            if HAS_WINDOW:
                seen_MN &= key_N[None, :] > positions_M[:, None] - window
            scores_MN = tl.where(seen_MN, scores_MN, float("-inf"))
        new_max_M = tl.maximum(max_M, tl.max(scores_MN, 1))
        # A query that has seen nothing yet must not subtract infinities.
        base_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M) if MASKED else new_max_M
        weights_MN = tl.exp2(scores_MN - base_M[:, None])
        kept_M = tl.exp2(max_M - base_M)
        sum_M = sum_M * kept_M + tl.sum(weights_MN, 1)
        max_M = new_max_M
        if scales_ptr is not None:
            weights_MN *= load(scales_N + scale_side_stride, is_key_N, MASKED)[None, :]
        v_ND = load(kv_N[:, None] + side_stride + dim_D[None, :], is_key_N[:, None] & is_dim_D[None, :], CHECKED)
        acc_MD = tl.dot(
            weights_MN.to(q_MD.dtype), v_ND.to(q_MD.dtype), acc_MD * kept_M[:, None], input_precision="ieee"
        )
    return acc_MD, max_M, sum_M


@triton.jit
def load(pointers: tl.tensor, mask: tl.tensor, MASKED: tl.constexpr):
    """What lies at ``pointers``, 0 outside the mask; without ``MASKED`` the mask is known to be true."""
    # 0.0, because Triton converts no integer to float8.
    return tl.load(pointers, mask=mask, other=0.0) if MASKED else tl.load(pointers)


@triton.jit
def tanh_of_power(x: tl.tensor):
    """``tanh(x / (2 log2(e)))``, by one exp2: right at both infinities, and to 1e-7 around 0."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x))


def score_constants(rule: AttentionRule) -> tuple[float, float]:
    """Return ``score_factor`` and ``cap``: scaled by the factor, products feed exp2, or `tanh_of_power` under a cap."""
    if rule.softcap:
        return 2 * _LOG2_E * rule.scale / rule.softcap, rule.softcap * _LOG2_E
    return rule.scale * _LOG2_E, 0.0


@triton.jit
def add_sink(sum_M: tl.tensor, max_M: tl.tensor, sinks_ptr: tl.tensor, head_M: tl.tensor, is_row_M: tl.tensor):
    """Sum of the weights that `attend` has seen, and of the heads' sinks; infinite where only the sink counts."""
    sink_M = tl.load(sinks_ptr + head_M, mask=is_row_M, other=0.0) * 1.4426950408889634  # log2(e)
    return sum_M + tl.exp2(sink_M - max_M)


def pool_arguments(kv_pool: KvPool, layer: int) -> Mapping[str, object]:
    """Return the kernels' arguments for one layer of a pool; strides are in elements."""
    if layer not in kv_pool.launch_arguments:
        kv_pool.launch_arguments[layer] = _pool_arguments(kv_pool, layer)
    return kv_pool.launch_arguments[layer]


def _pool_arguments(kv_pool: KvPool, layer: int) -> dict[str, object]:
    values = kv_pool.values[:, :, layer]
    scales = None if kv_pool.scales is None else kv_pool.scales[:, :, layer]
    scale_strides = (0, 0, 0) if scales is None else scales.stride()[:3]
    return {
        "kv_ptr": values,
        "scales_ptr": scales,
        "block_stride": values.stride(0),
        "head_stride": values.stride(1),
        "side_stride": values.stride(2),
        "scale_block_stride": scale_strides[0],
        "scale_head_stride": scale_strides[1],
        "scale_side_stride": scale_strides[2],
        "BLOCK_SIZE": kv_pool.shape.block_size,
        "HEAD_DIM": kv_pool.shape.head_dim,
    }


def check_queries(q_TND: torch.Tensor, kv_pool: KvPool, layer: int, num_tokens: int, rule: AttentionRule) -> None:
    """Assert the preconditions of the kernels."""
    assert 0 <= layer < kv_pool.shape.num_layers
    assert (q_TND.shape[0], q_TND.shape[2]) == (num_tokens, kv_pool.shape.head_dim)
    assert q_TND.shape[1] % kv_pool.shape.num_kv_heads == 0
    assert q_TND.stride()[1:] == (q_TND.shape[2], 1)
    assert q_TND.is_floating_point()
    assert rule.window >= 0
    assert rule.softcap >= 0
    if rule.sinks is not None:
        assert (rule.sinks.shape, rule.sinks.dtype) == (q_TND.shape[1:2], torch.float32)
        assert rule.sinks.is_contiguous()
