"""Tiles, and splits of decode attention, by shape."""

from __future__ import annotations

import pytest
import torch

from pdserve.kernels.triton import configs
from pdserve.kernels.triton.configs import (
    AttentionTile,
    KvSplit,
    MatmulTile,
    decode_tile,
    kv_split,
    matmul_tile,
    prefill_tile,
)
from tests.kernels.paged_batch import nan_pool


def queries(num_heads: int) -> torch.Tensor:
    return torch.zeros(1, num_heads, 64, dtype=torch.bfloat16)


def test_attention() -> None:
    kv_pool = nan_pool((1, 2, 1, 2, 16, 64), torch.bfloat16)
    assert prefill_tile(queries(4), kv_pool) == AttentionTile(128, 64, 8, 5)
    assert decode_tile(queries(4), kv_pool) == AttentionTile(16, 64, 4, 5)
    assert prefill_tile(queries(4).float(), kv_pool) == AttentionTile(32, 32, 4, 2)


@pytest.mark.parametrize(("capability", "rows"), [(80, 64), (86, 64), (90, 128), (103, 64), (120, 64)])
def test_gpus_get_tiles_that_their_memory_holds(capability: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "compute_capability", lambda device: capability)
    kv_pool = nan_pool((1, 2, 1, 2, 16, 256), torch.bfloat16)
    assert prefill_tile(torch.zeros(1, 4, 256, dtype=torch.bfloat16), kv_pool).rows == rows


def test_splits() -> None:
    """On the CPU there is one processor, for two KV heads."""
    kv_pool = nan_pool((1, 2, 1, 2, 16, 64), torch.bfloat16)
    assert kv_split(queries(4), kv_pool) == KvSplit(num_chunks=2, chunk_tokens=256)
    assert kv_split(queries(8), kv_pool, is_fixed=True) == KvSplit(1, 256, is_fixed=True)


def test_few_tokens_share_kernels_and_so_do_all_others() -> None:
    def tile(num_tokens: int) -> MatmulTile:
        return matmul_tile(torch.zeros(num_tokens, 256).bfloat16(), "int8", None)

    assert [tile(count).tokens for count in (1, 16, 17, 33, 64)] == [16, 16, 32, 64, 64]
    assert tile(17) == MatmulTile(32, 64, 128, 4, 4)
    assert matmul_tile(torch.zeros(256, 256).bfloat16(), "int8", None, num_experts=64).tokens == 16
    assert tile(65) == tile(100_000) == MatmulTile(128, 128, 64, 8, 4)
