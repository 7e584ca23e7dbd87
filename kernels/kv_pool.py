"""One rank's KV pool as kernels see it: views of one contiguous buffer, which ranks of a host may share.

An executor builds it once, over memory that it does not own, and passes it through the model untouched. Never knows
which block belongs to which sequence.

A block is contiguous, and so is each KV head within it: keys and values of all layers, followed by a strip of scales in
a quantised pool (`pdserve.contracts.kv_layout`).
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from pdserve.contracts.kv_layout import kv_vector_bytes

LARGEST_VALUES = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Dtypes of quantised pools, each with the value that a vector's largest magnitude maps to."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, *LARGEST_VALUES)


def vector_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one token's K (or V) vector for one head and layer, including its scale."""
    return kv_vector_bytes(head_dim, str(dtype).removeprefix("torch."))


class KvPoolShape(NamedTuple):
    """The fields of `pdserve.contracts.kv_layout.KvLayout.shape`."""

    num_blocks: int
    num_kv_heads: int
    num_layers: int
    num_sides: int
    """2: keys, then values."""
    block_size: int
    head_dim: int


class PoolStruct(ctypes.Structure):
    """Mirrors ``struct Pool`` of cpu/pool.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("num_layers", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("head_bytes", ctypes.c_int64),
        ("block_bytes", ctypes.c_int64),
    )


class KvPool:
    """Keys and values of every block, layer and head of one rank. Kernels count its layers from 0."""

    def __init__(
        self,
        memory: torch.Tensor,
        shape: tuple[int, int, int, int, int, int],
        dtype: torch.dtype,
        heads: range | None = None,
        first_layer: int = 0,
    ) -> None:
        """View ``memory`` without taking ownership.

        Args:
            memory: uint8 ``[pool_bytes]``.
            shape: the fields of `KvPoolShape`.
            dtype: float32, bfloat16, float16, or int8 or float8_e4m3fn with float32 scales.
            heads: KV heads of ``memory`` that this rank computes; by default all.
            first_layer: layer of the model that the first one in ``memory`` is.
        """
        assert dtype in _DTYPES, f"no KV pool of {dtype}"
        heads = range(shape[1]) if heads is None else heads
        self.shape = KvPoolShape(*shape)._replace(num_kv_heads=len(heads))
        """With the rank's heads only."""
        self.first_layer = first_layer
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
        """uint8 ``[num_blocks, block_bytes]``, with the heads of all ranks."""
        rank_heads = memory.view(num_blocks, num_kv_heads, head_bytes)[:, heads.start : heads.stop]
        self.values = rank_heads[..., :value_bytes].view(dtype).view(self.shape)
        """``[num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]``."""
        self.scales: torch.Tensor | None = None
        """Quantised pools only: float32 ``[num_blocks, num_kv_heads, num_layers, 2, block_size]``. The stored number is
        ``values * scales``."""
        if dtype in LARGEST_VALUES:
            self.scales = rank_heads[..., value_bytes:].view(torch.float32).view(self.shape[:-1])
        self.launch_arguments: dict[int, dict[str, object]] = {}
        """Of Triton's kernels, by layer: making views of one takes the host as long as a launch."""
        self.struct = PoolStruct(
            memory.data_ptr() + heads.start * head_bytes,
            _DTYPES.index(dtype),
            len(heads),
            num_layers,
            block_size,
            head_dim,
            head_bytes,
            num_kv_heads * head_bytes,
        )
        """The pool for the C++ kernels; points into ``memory``, which this object keeps alive."""
