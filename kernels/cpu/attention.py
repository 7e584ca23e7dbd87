"""C++ attention kernels, called through ctypes. Shapes are asserted here; the C++ side checks nothing.

`pdserve.kernels.selection` chooses them; `pdserve.kernels.cpu.build` compiles attention.cpp and rope.cpp. They take
float32 activations and a pool of any dtype except float8, and run on the threads of `pdserve.kernels.cpu.threads`.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p
from functools import cache
from typing import Any

import torch

from pdserve.kernels.cpu.build import kernel, load_library
from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.metadata import AttentionMetadata
from pdserve.kernels.operations import AttentionRule, QkNorm

_HEAD_DIM_MULTIPLE = 8
# As declared in attention.cpp and rope.cpp.
_POOL_AND_BATCH = (c_void_p, c_int64, c_void_p)
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "paged_attention": (
        *(c_void_p, c_int64, c_void_p, c_int64),
        *(c_float, c_int64, c_float, c_void_p, c_int64),
        *_POOL_AND_BATCH,
    ),
    "rope_and_write_kv": (c_void_p, c_int64, *[c_void_p] * 4, c_float, *_POOL_AND_BATCH),
}


def supports(kv_pool: KvPool) -> bool:
    """Report whether the C++ kernels run on ``kv_pool``. Compiles them on first use."""
    return (
        kv_pool.values.device.type == "cpu"
        and kv_pool.dtype != torch.float8_e4m3fn
        and kv_pool.shape.head_dim % _HEAD_DIM_MULTIPLE == 0
        and load_library() is not None
    )


def paged_attention(
    q_TND: torch.Tensor, kv_pool: KvPool, layer: int, metadata: AttentionMetadata, rule: AttentionRule
) -> torch.Tensor:
    """See `pdserve.kernels.operations.PagedAttention`."""
    num_tokens, num_heads, head_dim = q_TND.shape
    assert (num_tokens, head_dim) == (metadata.num_tokens, kv_pool.shape.head_dim)
    assert num_heads % kv_pool.shape.num_kv_heads == 0
    assert q_TND.dtype == torch.float32
    assert q_TND.stride()[1:] == (head_dim, 1)
    assert rule.window >= 0
    assert rule.softcap >= 0
    if rule.sinks is not None:
        _assert_float32(rule.sinks, (num_heads,))
    o_TND = torch.empty(num_tokens, num_heads, head_dim)
    _function("paged_attention")(
        q_TND.data_ptr(),
        q_TND.stride(0),
        o_TND.data_ptr(),
        num_heads,
        rule.scale,
        rule.window,
        rule.softcap,
        None if rule.sinks is None else rule.sinks.data_ptr(),
        rule.in_bfloat16,
        *_pool_and_batch(kv_pool, layer, metadata),
    )
    return o_TND


def rope_and_write_kv(
    qkv_TMD: torch.Tensor,
    cos_TC: torch.Tensor,
    sin_TC: torch.Tensor,
    kv_pool: KvPool,
    layer: int,
    metadata: AttentionMetadata,
    qk_norm: QkNorm | None = None,
) -> None:
    """See `pdserve.kernels.operations.RopeAndWriteKv`."""
    num_tokens, num_all_heads, head_dim = qkv_TMD.shape
    num_heads = num_all_heads - 2 * kv_pool.shape.num_kv_heads
    assert (num_tokens, head_dim) == (metadata.num_tokens, kv_pool.shape.head_dim)
    assert num_heads > 0
    _assert_float32(qkv_TMD, qkv_TMD.shape)
    for table_TC in (cos_TC, sin_TC):
        _assert_float32(table_TC, (num_tokens, head_dim // 2))
    q_weight = k_weight = None
    if qk_norm is not None:
        for weight_D in (qk_norm.q_weight, qk_norm.k_weight):
            _assert_float32(weight_D, (head_dim,))
        q_weight, k_weight = qk_norm.q_weight.data_ptr(), qk_norm.k_weight.data_ptr()
    _function("rope_and_write_kv")(
        qkv_TMD.data_ptr(),
        num_heads,
        cos_TC.data_ptr(),
        sin_TC.data_ptr(),
        q_weight,
        k_weight,
        0.0 if qk_norm is None else qk_norm.eps,
        *_pool_and_batch(kv_pool, layer, metadata),
    )


def _assert_float32(tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    assert tensor.shape == shape
    assert tensor.dtype == torch.float32
    assert tensor.is_contiguous()


@cache
def _function(name: str) -> Any:
    return kernel(name, *_ARGUMENTS[name])


def _pool_and_batch(kv_pool: KvPool, layer: int, metadata: AttentionMetadata) -> tuple[object, ...]:
    """Trailing arguments of both kernels: pool, layer, batch."""
    assert 0 <= layer < kv_pool.shape.num_layers
    assert kv_pool.dtype != torch.float8_e4m3fn, "no kernel in C++ reads float8"
    return ctypes.byref(kv_pool.struct), layer, metadata.packed.data_ptr()
