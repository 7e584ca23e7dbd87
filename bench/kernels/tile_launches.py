"""Launches with given tiles, for compilation: the table's tiles, and the candidates of tuning.

Read by the tests, ``--compile-only`` and `pdserve.bench.kernels.tune`. Small tensors in host memory stand for GPU
tensors; a weight is only a shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pdserve.bench.kernels.attention import AttentionCase, Row
from pdserve.bench.kernels.products import ProductCase
from pdserve.bench.kernels_compile import Launch
from pdserve.kernels.triton.configs import AttentionTile, KvCut, MatmulTile
from pdserve.kernels.triton.tuned_tiles import AttentionShape, Key, Tile
from pdserve.kernels.weight_quantisation import GROUP_INPUTS, Int4Weight, QuantisedWeight

_KV_HEADS = 2
_HOST = torch.device("cpu")


def tile_launches(tiles: Mapping[Key, Tile]) -> list[Launch]:
    """One for each entry of a table."""
    return [tile_launch(key, tile) for key, tile in tiles.items()]


def tile_launch(key: Key, tile: Tile) -> Launch:
    """The kernel of a shape, cut by a tile.

    Raises:
        TypeError: the fields are not those of the kernel's tile.
    """
    shape = key.shape
    dtype: torch.dtype = getattr(torch, shape.dtype)
    name = f"{key.kernel} {' '.join(map(str, shape))} {' '.join(map(str, tile.values()))} for {key.device}"
    if isinstance(shape, AttentionShape):
        case = AttentionCase(
            kernel="decode_attention" if key.kernel == "kv_split" else key.kernel,
            rows=(Row(3), Row(2)) if key.kernel == "prefill_attention" else (Row(1), Row(1)),
            num_heads=_KV_HEADS * shape.group,
            num_kv_heads=_KV_HEADS,
            head_dim=shape.head_dim,
            dtype=dtype,
            kv_dtype=getattr(torch, shape.kv_dtype),
        )
        inputs = case.inputs(_HOST)
        if key.kernel == "kv_split":
            return Launch(name, case.launch(inputs, split=KvCut(**tile).split(_HOST, _KV_HEADS)))
        run: Any = case.launch(inputs, AttentionTile(**tile))
        return Launch(name, run, is_wgmma=key.kernel == "prefill_attention" and dtype != torch.float32)
    product = ProductCase(
        weight=shape.weight,
        num_tokens=shape.num_tokens,
        num_inputs=shape.num_inputs,
        num_outputs=shape.num_outputs,
        dtype=dtype,
    )
    x_TE = torch.empty(shape.num_tokens, shape.num_inputs, dtype=dtype)
    run = product.launch(x_TE, _weight(product), MatmulTile(**tile))
    return Launch(name, run, is_wgmma=dtype != torch.float32)


def _weight(case: ProductCase) -> QuantisedWeight | Int4Weight:
    """Of memory that nobody writes."""
    num_outputs, num_inputs = case.num_outputs, case.num_inputs
    if case.weight == "int8":
        return QuantisedWeight(torch.empty(num_outputs, num_inputs, dtype=torch.int8), torch.empty(num_outputs))
    num_groups = -(-num_inputs // GROUP_INPUTS)
    packed = torch.empty(num_outputs, num_groups * GROUP_INPUTS // 2, dtype=torch.int8)
    return Int4Weight(packed, torch.empty(num_outputs, num_groups), num_inputs)
