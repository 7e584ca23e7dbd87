"""What every implementation of the kernels must do about padding: nothing that anybody could notice."""

from __future__ import annotations

import math

import torch

from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.metadata import AttentionMetadata
from pdserve.kernels.operations import AttentionRule, DecoderKernels
from tests.kernels.paged_batch import LAYER, PagedBatch, Row, make_batch
from tests.kernels.rotation import NUM_KV_HEADS, random_qkv

NUM_PADDING = 5


def assert_padding_is_nobodys(kernels: DecoderKernels, dtype: torch.dtype) -> None:
    """A padded decode step over blocks that others used before: the pool and all rows end as without the padding."""
    batch = make_batch((Row(15, 1), Row(3, 1), Row(0, 1), Row(40, 1)), dtype=dtype)
    num_tokens = len(batch.rows)
    qkv_TMD, angles_TC = random_qkv(batch)
    angles_TC = torch.cat((angles_TC, torch.zeros(NUM_PADDING, angles_TC.shape[1])))
    padding = torch.full((NUM_PADDING, *qkv_TMD.shape[1:]), math.nan)
    results = []
    for metadata, given in ((batch.metadata, qkv_TMD), (_padded(batch), torch.cat((qkv_TMD, padding)))):
        pool = KvPool(batch.kv_pool.blocks.flatten().clone(), batch.kv_pool.shape, dtype)
        given, angles = given.clone(), angles_TC[: len(given)]
        kernels.rope_and_write_kv(given, angles.cos(), angles.sin(), pool, LAYER, metadata)
        q_TND = given[:, : -2 * NUM_KV_HEADS]
        for window in (0, 20):
            o_TND = kernels.paged_attention(q_TND, pool, LAYER, metadata, AttentionRule(scale=0.2, window=window))
            results.append((pool.blocks, given[:num_tokens], o_TND[:num_tokens]))
    for plain, padded in zip(results[:2], results[2:], strict=True):
        assert plain[2].isfinite().all()
        for expected, computed in zip(plain, padded, strict=True):
            assert torch.equal(expected, computed)


def _padded(batch: PagedBatch) -> AttentionMetadata:
    """With the ids of blocks that are somebody's behind those of the batch."""
    shape = batch.kv_pool.shape
    padded = AttentionMetadata.build(
        [row.new for row in batch.rows],
        [row.cached for row in batch.rows],
        batch.block_tables,
        num_blocks=shape.num_blocks,
        block_size=shape.block_size,
        num_padding=NUM_PADDING,
    )
    left_over = torch.tensor(batch.block_tables[3], dtype=torch.int32)
    return AttentionMetadata.of_words(
        torch.cat((padded.words, left_over)),
        num_rows=padded.num_rows,
        num_tokens=padded.num_tokens,
        min_new_tokens=1,
        max_new_tokens=1,
        most_short_tokens=1,
    )
