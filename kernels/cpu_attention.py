"""Attention kernels in C++, through ctypes: shapes are asserted here, because nothing is checked on the other side.

Chosen by `pdserve.kernels.selection`; compiled by `pdserve.kernels.cpu_build` from cpu_attention.cpp. Runs on as many
threads as torch does (`torch.set_num_threads`).
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from pdserve.kernels.cpu_build import load_library
from pdserve.kernels.metadata import AttentionMetadata
from pdserve.kernels.operations import AttentionRule, QkNorm

_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_HEAD_DIM_MULTIPLE = 8


class _Batch(ctypes.Structure):
    """Mirrors ``struct Batch`` of cpu_attention.cpp."""

    _fields_ = (
        ("num_rows", ctypes.c_int64),
        ("query_starts", ctypes.c_void_p),
        ("kv_lengths", ctypes.c_void_p),
        ("block_starts", ctypes.c_void_p),
        ("block_ids", ctypes.c_void_p),
    )


class _Pool(ctypes.Structure):
    """Mirrors ``struct Pool`` of cpu_attention.cpp."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("num_kv_heads", ctypes.c_int64),
        ("num_layers", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
    )


def supports(kv_pool: torch.Tensor) -> bool:
    """Whether the C++ kernels run on ``kv_pool`` here. Compiles them if that was not done yet."""
    return (
        kv_pool.device.type == "cpu"
        and kv_pool.dtype in _SUFFIXES
        and kv_pool.shape[-1] % _HEAD_DIM_MULTIPLE == 0
        and load_library() is not None
    )


def paged_attention(
    q_TND: torch.Tensor, kv_pool: torch.Tensor, layer: int, metadata: AttentionMetadata, rule: AttentionRule
) -> torch.Tensor:
    """See `pdserve.kernels.operations.PagedAttention`."""
    num_tokens, num_heads, head_dim = q_TND.shape
    assert not rule.window
    assert not rule.softcap
    assert rule.scale == head_dim**-0.5
    assert (num_tokens, head_dim) == (metadata.num_tokens, kv_pool.shape[-1])
    assert num_heads % kv_pool.shape[1] == 0
    assert q_TND.dtype == kv_pool.dtype
    assert q_TND.stride()[1:] == (head_dim, 1)
    o_TND = torch.empty(num_tokens, num_heads, head_dim, dtype=q_TND.dtype)
    _kernel("paged_attention", kv_pool.dtype)(
        ctypes.c_void_p(q_TND.data_ptr()),
        ctypes.c_int64(q_TND.stride(0)),
        ctypes.c_void_p(o_TND.data_ptr()),
        ctypes.c_int64(num_heads),
        *_pool_and_batch(kv_pool, layer, metadata),
    )
    return o_TND


def rope_and_write_kv(
    qkv_TMD: torch.Tensor,
    cos_TC: torch.Tensor,
    sin_TC: torch.Tensor,
    kv_pool: torch.Tensor,
    layer: int,
    metadata: AttentionMetadata,
    qk_norm: QkNorm | None = None,
) -> None:
    """See `pdserve.kernels.operations.RopeAndWriteKv`."""
    assert qk_norm is None
    num_tokens, num_all_heads, head_dim = qkv_TMD.shape
    num_heads = num_all_heads - 2 * kv_pool.shape[1]
    assert (num_tokens, head_dim) == (metadata.num_tokens, kv_pool.shape[-1])
    assert num_heads > 0
    assert qkv_TMD.dtype == kv_pool.dtype
    assert qkv_TMD.is_contiguous()
    for table in (cos_TC, sin_TC):
        assert table.shape == (num_tokens, head_dim // 2)
        assert table.dtype == torch.float32
        assert table.is_contiguous()
    _kernel("rope_and_write_kv", kv_pool.dtype)(
        ctypes.c_void_p(qkv_TMD.data_ptr()),
        ctypes.c_int64(num_heads),
        ctypes.c_void_p(cos_TC.data_ptr()),
        ctypes.c_void_p(sin_TC.data_ptr()),
        *_pool_and_batch(kv_pool, layer, metadata),
    )


def _kernel(name: str, dtype: torch.dtype) -> Any:
    library = load_library()
    assert library is not None, "the C++ kernels are not available: select_kernels was not asked"
    return getattr(library, f"{name}_{_SUFFIXES[dtype]}")


def _pool_and_batch(kv_pool: torch.Tensor, layer: int, metadata: AttentionMetadata) -> tuple[object, ...]:
    """The arguments that both kernels end with: pool, layer, batch, threads."""
    assert kv_pool.is_contiguous()
    assert 0 <= layer < kv_pool.shape[2]
    pool = _Pool(kv_pool.data_ptr(), kv_pool.shape[1], kv_pool.shape[2], kv_pool.shape[4], kv_pool.shape[5])
    batch = _Batch(
        metadata.num_rows,
        metadata.query_starts.data_ptr(),
        metadata.kv_lengths.data_ptr(),
        metadata.block_starts.data_ptr(),
        metadata.block_ids.data_ptr(),
    )
    return ctypes.byref(pool), ctypes.c_int64(layer), ctypes.byref(batch), ctypes.c_int(torch.get_num_threads())
