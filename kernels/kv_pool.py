"""One rank's KV pool as kernels see it: views of one run of bytes.

Built once by an executor, over memory that somebody else owns, and passed through the model untouched. Which block
belongs to whom is not known here.

A block is one run of bytes, and so is a KV head within it: the values of all layers, keys and values, and where they
are quantised a strip of scales behind them, as `pdserve.contracts.kv_layout` describes.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

LARGEST_VALUES = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Dtypes of quantised pools, and what the largest magnitude of a vector becomes in them."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, *LARGEST_VALUES)
_SCALE_BYTES = 4


def vector_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of K, or of V, of one token and head in one layer, its scale included."""
    return head_dim * dtype.itemsize + (_SCALE_BYTES if dtype in LARGEST_VALUES else 0)


class KvPoolShape(NamedTuple):
    """As `pdserve.contracts.kv_layout.KvLayout.shape`."""

    num_blocks: int
    num_kv_heads: int
    num_layers: int
    num_sides: int
    """2: keys, then values."""
    block_size: int
    head_dim: int


class PoolStruct(ctypes.Structure):
    """Mirrors ``struct Pool`` of cpu_pool.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("num_layers", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("head_bytes", ctypes.c_int64),
    )


class KvPool:
    """Keys and values of every block, head and layer."""

    def __init__(self, memory: torch.Tensor, shape: tuple[int, int, int, int, int, int], dtype: torch.dtype) -> None:
        """View ``memory``, which stays whose it is.

        Args:
            memory: uint8 ``[pool_bytes]``.
            shape: of `KvPoolShape`.
            dtype: float32, bfloat16, float16, or int8 or float8_e4m3fn with float32 scales.
        """
        assert dtype in _DTYPES, f"no KV pool of {dtype}"
        self.shape = KvPoolShape(*shape)
        self.dtype = dtype
        num_blocks, num_kv_heads, num_layers, num_sides, block_size, head_dim = shape
        num_vectors = num_layers * num_sides * block_size
        value_bytes = num_vectors * head_dim * dtype.itemsize
        head_bytes = num_vectors * vector_bytes(head_dim, dtype)
        assert num_sides == 2
        assert memory.dtype == torch.uint8
        assert memory.is_contiguous()
        assert memory.numel() == num_blocks * num_kv_heads * head_bytes, f"{memory.numel()} bytes for a pool {shape}"
        self.blocks = memory.view(num_blocks, num_kv_heads * head_bytes)
        """uint8 ``[num_blocks, block_bytes]``: a block is a run of bytes."""
        heads = memory.view(num_blocks, num_kv_heads, head_bytes)
        self.values = heads[..., :value_bytes].view(dtype).view(shape)
        """``[num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]``."""
        self.scales: torch.Tensor | None = None
        """Of quantised pools: float32 ``[num_blocks, num_kv_heads, num_layers, 2, block_size]``: a value is
        ``values * scales``."""
        if dtype in LARGEST_VALUES:
            self.scales = heads[..., value_bytes:].view(torch.float32).view(shape[:-1])
        self.struct = PoolStruct(
            memory.data_ptr(), _DTYPES.index(dtype), num_kv_heads, num_layers, block_size, head_dim, head_bytes
        )
        """What the C++ kernels read; it points into ``memory``, which this object keeps."""
