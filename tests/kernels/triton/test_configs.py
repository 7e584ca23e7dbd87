"""Tiles come from the table where it has the shape, and from rules where it has not."""

from __future__ import annotations

import pytest
import torch

from pdserve.kernels.triton import configs as triton_configs
from pdserve.kernels.triton.configs import (
    AttentionTile,
    KvSplit,
    MatmulTile,
    decode_tile,
    kv_split,
    matmul_tile,
    prefill_tile,
    token_bucket,
)
from pdserve.kernels.triton.tuned_tiles import AttentionShape, Key, ProductShape, Tile
from tests.kernels.paged_batch import nan_pool

ATTENTION = AttentionShape("bfloat16", "bfloat16", 64, 4)
PRODUCT = ProductShape("bfloat16", "int8", 32, 256, 128)
TABLE: dict[Key, Tile] = {
    Key("cpu", "prefill_attention", ATTENTION): {"rows": 64, "keys": 16, "num_warps": 2, "num_stages": 1},
    Key("cpu", "decode_attention", ATTENTION): {"rows": 16, "keys": 16, "num_warps": 1, "num_stages": 5},
    Key("cpu", "quantized_matmul", PRODUCT): {
        "tokens": 32,
        "outputs": 128,
        "inputs": 32,
        "num_warps": 8,
        "num_stages": 2,
    },
    Key("cpu", "kv_split", ATTENTION): {"chunks_per_processor": 9, "chunk_tokens": 512},
    Key("another", "decode_attention", ATTENTION._replace(group=2)): {"rows": 1},
}


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_configs, "tuned_tiles", lambda: TABLE)


def queries(num_heads: int) -> torch.Tensor:
    return torch.zeros(1, num_heads, 64, dtype=torch.bfloat16)


def test_attention() -> None:
    kv_pool = nan_pool((1, 2, 1, 2, 16, 64), torch.bfloat16)
    assert prefill_tile(queries(8), kv_pool) == AttentionTile(64, 16, 2, 1)
    assert decode_tile(queries(8), kv_pool) == AttentionTile(16, 16, 1, 5)
    assert prefill_tile(queries(4), kv_pool) == AttentionTile(128, 64, 4, 3)
    assert decode_tile(queries(4), kv_pool) == AttentionTile(16, 64, 4, 3)  # The table's is of another device.
    assert decode_tile(queries(8).half(), kv_pool) == AttentionTile(16, 64, 4, 3)


def test_splits() -> None:
    kv_pool = nan_pool((1, 2, 1, 2, 16, 64), torch.bfloat16)
    assert kv_split(queries(8), kv_pool) == KvSplit(num_chunks=5, chunk_tokens=512)  # 9 of one processor, for 2 heads.
    assert kv_split(queries(4), kv_pool) == KvSplit(num_chunks=2, chunk_tokens=256)
    assert kv_split(queries(8), kv_pool, is_fixed=True) == KvSplit(1, 256, is_fixed=True)


def test_products() -> None:
    assert matmul_tile(torch.zeros(17, 256).bfloat16(), 128, is_int4=False) == MatmulTile(32, 128, 32, 8, 2)
    for x_TE, num_outputs, is_int4 in (
        (torch.zeros(17, 256).bfloat16(), 64, False),
        (torch.zeros(17, 128).bfloat16(), 128, False),
        (torch.zeros(17, 256).bfloat16(), 128, True),
    ):
        assert matmul_tile(x_TE, num_outputs, is_int4=is_int4) == MatmulTile(32, 64, 128, 4, 4)


def test_few_tokens_share_kernels_and_so_do_all_others() -> None:
    assert [token_bucket(count) for count in (1, 16, 17, 33, 64)] == [16, 16, 32, 64, 64]
    assert token_bucket(65) == token_bucket(100_000)
