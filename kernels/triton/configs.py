"""Tile sizes of the Triton kernels by shape and GPU, fixed in advance so that serving never tunes.

Launchers read them. Tiles are chosen from what the compiler makes of them, without a GPU: no register is spilled,
shared memory fits, and keys and values are loaded ahead, as `pdserve.bench.kernels_compile` and its tests check.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from triton import next_power_of_2

from pdserve.kernels.kv_pool import KvPool


class AttentionTile(NamedTuple):
    """One program's share of an attention launch."""

    rows: int
    """(token, head) pairs that attend together; 64 and more use Hopper's wgmma."""
    keys: int
    """Keys per iteration."""
    num_warps: int
    num_stages: int
    """Steps of the loop in flight. A load of block ids comes before each key tile: five stages leave a key tile in
    flight where the loop waits for another, or six with scales, and three none."""


_FLOAT32_OVER_QUANTISED = AttentionTile(16, 16, 4, 1)
_PREFILL_TILES = {
    (90, False): (AttentionTile(128, 64, 8, 5), AttentionTile(128, 64, 8, 5), AttentionTile(128, 32, 8, 5)),
    (90, True): (AttentionTile(128, 64, 8, 6), AttentionTile(128, 64, 8, 6), AttentionTile(64, 32, 8, 6)),
    (100, False): (AttentionTile(64, 64, 8, 5), AttentionTile(64, 64, 8, 5), AttentionTile(64, 32, 8, 5)),
    (100, True): (AttentionTile(64, 64, 8, 6), AttentionTile(64, 64, 8, 6), AttentionTile(64, 16, 8, 6)),
    (80, False): (AttentionTile(128, 64, 8, 5), AttentionTile(128, 32, 8, 5), AttentionTile(64, 16, 8, 5)),
    (80, True): (AttentionTile(64, 64, 8, 6), AttentionTile(64, 64, 8, 6), AttentionTile(64, 16, 8, 6)),
}
"""In half precision, by kind of GPU (`_kind`) and whether KV is quantised: for head sizes up to 64, 128 and 256."""
_DECODE_TILES = {
    False: (AttentionTile(16, 64, 4, 5), AttentionTile(16, 64, 4, 5), AttentionTile(16, 32, 4, 5)),
    True: (AttentionTile(16, 32, 4, 6), AttentionTile(16, 32, 4, 6), AttentionTile(16, 16, 4, 6)),
}
"""In half precision, on every GPU."""


def _of_head_dim(tiles: tuple[AttentionTile, AttentionTile, AttentionTile], head_dim: int) -> AttentionTile:
    return tiles[0 if head_dim <= 64 else 1 if head_dim <= 128 else 2]


def _kind(capability: int) -> int:
    """90 for Hopper, 100 for data centres' Blackwell, and 80 for GPUs with the instructions of Ampere, consumers'
    Blackwell among them, most of which have 99 KiB of shared memory."""
    return 80 if capability < 90 or capability >= 120 else 90 if capability < 100 else 100


def prefill_tile(q_TND: torch.Tensor, kv_pool: KvPool) -> AttentionTile:
    """Return the tile for `pdserve.kernels.triton.prefill_attention`."""
    head_dim = kv_pool.shape.head_dim
    if q_TND.dtype == torch.float32:
        if kv_pool.scales is not None:
            return _FLOAT32_OVER_QUANTISED
        return AttentionTile(32, 32, 4, 2) if head_dim <= 64 else AttentionTile(16, 16, 4, 2)
    kind = _kind(compute_capability(q_TND.device))
    return _of_head_dim(_PREFILL_TILES[kind, kv_pool.scales is not None], head_dim)


def decode_tile(q_TND: torch.Tensor, kv_pool: KvPool) -> AttentionTile:
    """Return the tile for `pdserve.kernels.triton.decode_attention`, which has few rows."""
    if q_TND.dtype == torch.float32:
        return AttentionTile(16, 16, 4, 3) if kv_pool.scales is None else _FLOAT32_OVER_QUANTISED
    return _of_head_dim(_DECODE_TILES[kv_pool.scales is not None], kv_pool.shape.head_dim)


class KvSplit(NamedTuple):
    """Division of a batch's rows into chunks, so that many programs read their KV in parallel."""

    num_chunks: int
    """Approximate number per KV head, over all rows."""
    chunk_tokens: int
    """Fewest tokens per chunk: large enough that merging is cheap compared to reading."""
    is_fixed: bool = False
    """Chunks have exactly ``chunk_tokens``; ``num_chunks`` is ignored."""


_CHUNKS_PER_PROCESSOR = 4
"""Approximate number over all rows and KV heads."""
_CHUNK_TOKENS = 256
"""A multiple of every tile's ``keys``."""


def kv_split(q_TND: torch.Tensor, kv_pool: KvPool, *, is_fixed: bool = False) -> KvSplit:
    """Return the split for `pdserve.kernels.triton.decode_attention`: a few chunks per multiprocessor, or chunks that
    do not depend on the batch if ``is_fixed``."""
    if is_fixed:
        return KvSplit(num_chunks=1, chunk_tokens=_CHUNK_TOKENS, is_fixed=True)
    num_chunks = _CHUNKS_PER_PROCESSOR * _num_processors(q_TND.device)
    return KvSplit(-(-num_chunks // kv_pool.shape.num_kv_heads), _CHUNK_TOKENS)


class MatmulTile(NamedTuple):
    """One program's share of a product."""

    tokens: int
    outputs: int
    inputs: int
    """Inputs per iteration."""
    num_warps: int
    num_stages: int


def matmul_tile(x_TE: torch.Tensor, kind: str, group: int | None, num_experts: int = 1) -> MatmulTile:
    """Return the tile for `pdserve.kernels.triton.quantized_matmul`; it takes one group of inputs at a time, or one
    pair of runs of four bits.

    Args:
        group: inputs of a group; ``None``: one for all inputs.
        num_experts: among which rows are divided, so that a tile of one expert's rows is not mostly empty.
    """
    num_tokens = -(-len(x_TE) // num_experts)
    inputs = 2 * run_of_pair(group) if kind in PAIRED_KINDS else group
    if x_TE.dtype == torch.float32:
        return MatmulTile(16, 32, inputs or 32, 4, 2 if inputs is None else 1)
    # wgmma leaves registers to the sum of a group.
    is_tight = group is not None and compute_capability(x_TE.device) < 90
    if num_tokens <= _FEW_TOKENS:
        tokens, num_stages = max(16, next_power_of_2(num_tokens)), 3 if kind == "float" else 4
        return MatmulTile(tokens, 64, inputs or 128, 8 if is_tight and tokens == 64 else 4, num_stages)
    tokens = 64 if is_tight else 128
    if kind == "float":
        return MatmulTile(tokens, 128, 64, 8, 3)
    return MatmulTile(tokens, 128, inputs or 64, 8, 2 if inputs == 128 else 4)


PAIRED_KINDS = ("int4", "e2m1")
"""Kinds of weights of which two share a byte."""


def run_of_pair(group: int | None) -> int:
    """Consecutive inputs of a weight of four bits in the same half of consecutive bytes, all of one group."""
    return min(group or _RUN, _RUN)


_RUN = 64
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
def compute_capability(device: torch.device) -> int:
    """Return that of a GPU, as in sm_90; Triton's interpreter is taken for Hopper."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return 10 * major + minor


@cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter.
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
