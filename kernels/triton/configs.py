"""Tile sizes of the Triton kernels per GPU and shape, fixed in advance so that serving never tunes.

Launchers read them. Measured tiles (`pdserve.kernels.triton.tuned_tiles`) take precedence; the rules here cover every
other shape. Every tile compiles for its GPU without spilling registers, as the tests of `pdserve.bench.kernels_compile`
check for both.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from triton import next_power_of_2

from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.triton.tuned_tiles import AttentionShape, Key, ProductShape, Tile, tuned_tiles


class AttentionTile(NamedTuple):
    """One program's share of an attention launch."""

    rows: int
    """(token, head) pairs that attend together; 64 and more use Hopper's wgmma."""
    keys: int
    """Keys per iteration."""
    num_warps: int
    num_stages: int
    """Key tiles loaded ahead."""


_FLOAT32_OVER_QUANTISED = AttentionTile(16, 16, 4, 1)


def prefill_tile(q_TND: torch.Tensor, kv_pool: KvPool) -> AttentionTile:
    """Return the tile for `pdserve.kernels.triton.prefill_attention`."""
    if (tuned := _tuned("prefill_attention", q_TND, kv_pool)) is not None:
        return AttentionTile(**tuned)
    head_dim = kv_pool.shape.head_dim
    if q_TND.dtype == torch.float32:
        if kv_pool.scales is not None:
            return _FLOAT32_OVER_QUANTISED
        return AttentionTile(32, 32, 4, 2) if head_dim <= 64 else AttentionTile(16, 16, 4, 2)
    if head_dim <= 64:
        return AttentionTile(128, 64, 4, 3)
    if head_dim <= 128:
        return AttentionTile(128, 64, 8, 3)
    return AttentionTile(128 if kv_pool.scales is None else 64, 32, 8, 2)


def decode_tile(q_TND: torch.Tensor, kv_pool: KvPool) -> AttentionTile:
    """Return the tile for `pdserve.kernels.triton.decode_attention`, which has few rows."""
    if (tuned := _tuned("decode_attention", q_TND, kv_pool)) is not None:
        return AttentionTile(**tuned)
    if q_TND.dtype == torch.float32:
        return AttentionTile(16, 16, 4, 2) if kv_pool.scales is None else _FLOAT32_OVER_QUANTISED
    head_dim = kv_pool.shape.head_dim
    if kv_pool.scales is not None:
        return AttentionTile(16, 32, 4, 4) if head_dim <= 128 else AttentionTile(16, 16, 4, 4)
    return AttentionTile(16, 64, 4, 3) if head_dim <= 128 else AttentionTile(16, 32, 4, 3)


def _tuned(kernel: str, q_TND: torch.Tensor, kv_pool: KvPool) -> Tile | None:
    """Look up an attention kernel in the table of measured tiles."""
    group = q_TND.shape[1] // kv_pool.shape.num_kv_heads
    shape = AttentionShape(dtype_name(q_TND.dtype), dtype_name(kv_pool.dtype), kv_pool.shape.head_dim, group)
    return tuned_tiles().get(Key(device_name(q_TND.device), kernel, shape))


class KvSplit(NamedTuple):
    """Division of a batch's rows into chunks, so that many programs read their KV in parallel."""

    num_chunks: int
    """Approximate number per KV head, over all rows."""
    chunk_tokens: int
    """Fewest tokens per chunk: large enough that merging is cheap compared to reading."""
    is_fixed: bool = False
    """Chunks have exactly ``chunk_tokens``; ``num_chunks`` is ignored."""


class KvCut(NamedTuple):
    """Device-independent parameters of a `KvSplit`."""

    chunks_per_processor: int
    """Approximate number over all rows and KV heads."""
    chunk_tokens: int
    """As in `KvSplit`; a multiple of every tile's ``keys``."""

    def split(self, device: torch.device, num_kv_heads: int) -> KvSplit:
        """Return the split for batches on ``device``."""
        return KvSplit(-(-self.chunks_per_processor * _num_processors(device) // num_kv_heads), self.chunk_tokens)


_CUT = KvCut(chunks_per_processor=4, chunk_tokens=256)
_FIXED_SPLIT = KvSplit(num_chunks=1, chunk_tokens=_CUT.chunk_tokens, is_fixed=True)


def kv_split(q_TND: torch.Tensor, kv_pool: KvPool, *, is_fixed: bool = False) -> KvSplit:
    """Return the split for `pdserve.kernels.triton.decode_attention`: a few chunks per multiprocessor, or chunks that
    do not depend on the batch if ``is_fixed``."""
    if is_fixed:
        return _FIXED_SPLIT
    tuned = _tuned("kv_split", q_TND, kv_pool)
    cut = _CUT if tuned is None else KvCut(**tuned)
    return cut.split(q_TND.device, kv_pool.shape.num_kv_heads)


class MatmulTile(NamedTuple):
    """One program's share of a product."""

    tokens: int
    outputs: int
    inputs: int
    """Inputs per iteration."""
    num_warps: int
    num_stages: int


def matmul_tile(x_TE: torch.Tensor, num_outputs: int, *, is_int4: bool) -> MatmulTile:
    """Return the tile for `pdserve.kernels.triton.quantized_matmul`; int4 tiles take one group of inputs at a time."""
    num_tokens, num_inputs = x_TE.shape
    bucket = token_bucket(num_tokens)
    shape = ProductShape(dtype_name(x_TE.dtype), "int4" if is_int4 else "int8", bucket, num_inputs, num_outputs)
    tuned = tuned_tiles().get(Key(device_name(x_TE.device), "quantized_matmul", shape))
    if tuned is not None:
        return MatmulTile(**tuned)
    if x_TE.dtype == torch.float32:
        return MatmulTile(16, 32, 128, 4, 1) if is_int4 else MatmulTile(16, 32, 32, 4, 2)
    if num_tokens <= _FEW_TOKENS:
        return MatmulTile(bucket, 64, 128, 4, 4)
    return MatmulTile(128, 128, 128, 8, 2) if is_int4 else MatmulTile(128, 128, 64, 8, 4)


def token_bucket(num_tokens: int) -> int:
    """Round up to the bucket's largest token count; all counts in a bucket share their kernels."""
    return max(16, next_power_of_2(num_tokens)) if num_tokens <= _FEW_TOKENS else MANY_TOKENS


MANY_TOKENS = 4096
"""Bucket of every token count over `_FEW_TOKENS`."""
_FEW_TOKENS = 64
_PROGRAMS_PER_PROCESSOR = 2
_SPLIT_INPUTS = 512
"""Fewest inputs worth a program."""


def split_inputs(
    device: torch.device,
    num_tokens: int,
    num_tiles: int,
    num_inputs: int,
    tile_inputs: int,
    num_splits: int | None = None,
) -> int:
    """Return the inputs per program, a multiple of ``tile_inputs``.

    By default all inputs, if there are many tokens or the ``num_tiles`` output tiles already occupy every
    multiprocessor. All small token counts get the same split.
    """
    if num_splits is None:
        wanted = -(-_PROGRAMS_PER_PROCESSOR * _num_processors(device) // num_tiles)
        num_splits = min(wanted, num_inputs // _SPLIT_INPUTS) if num_tokens <= _FEW_TOKENS else 1
    return -(-num_inputs // (max(num_splits, 1) * tile_inputs)) * tile_inputs


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that the table of tiles uses."""
    return str(dtype).removeprefix("torch.")


@cache
def device_name(device: torch.device) -> str:
    """Return the name that the table of tiles uses, such as "NVIDIA H100 80GB HBM3"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter.
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
