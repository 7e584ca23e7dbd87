"""Random ragged batches over a paged pool, and attention over them by the definition, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pdserve.kernels.metadata import AttentionMetadata

NUM_LAYERS = 2
LAYER = 1


class Row(NamedTuple):
    """One sequence's share of a step."""

    cached: int
    new: int


@dataclass(frozen=True)
class PagedBatch:
    """Rows with random queries, and a pool that holds their KV in shuffled blocks and NaN everywhere else."""

    rows: tuple[Row, ...]
    queries: torch.Tensor
    """``[num_tokens, num_heads, head_dim]``."""
    kv_pool: torch.Tensor
    block_tables: list[list[int]]
    metadata: AttentionMetadata


def make_batch(
    rows: tuple[Row, ...],
    *,
    num_kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    shared_blocks: int = 0,
    spread: float = 1.0,
) -> PagedBatch:
    """Random rows; the first ``shared_blocks`` blocks of every row are those of the first. ``spread`` scales scores."""
    generator = torch.Generator().manual_seed(len(rows) + head_dim)
    needed = [-(-(row.cached + row.new) // block_size) for row in rows]
    num_blocks = sum(needed) + 3
    ids = torch.randperm(num_blocks, generator=generator).tolist()
    block_tables = []
    for count in needed:
        block_tables.append([ids.pop() for _ in range(count)])
        block_tables[-1][:shared_blocks] = block_tables[0][:shared_blocks]
    shape = (num_blocks, num_kv_heads, NUM_LAYERS, 2, block_size, head_dim)
    kv_pool = torch.full(shape, math.nan, dtype=dtype)
    for row, table in zip(rows, block_tables, strict=True):
        for index, block in enumerate(table):
            filled = min(block_size, row.cached + row.new - index * block_size)
            values = torch.randn(num_kv_heads, 2, filled, head_dim, generator=generator)
            kv_pool[block, :, LAYER, :, :filled] = values.to(dtype)
    num_tokens = sum(row.new for row in rows)
    q_TND = spread * torch.randn(num_tokens, num_kv_heads * group, head_dim, generator=generator)
    metadata = AttentionMetadata.build(
        [row.new for row in rows],
        [row.cached for row in rows],
        block_tables,
        num_blocks=num_blocks,
        block_size=block_size,
    )
    return PagedBatch(rows, q_TND.to(dtype), kv_pool, block_tables, metadata)


def reference_attention(batch: PagedBatch) -> torch.Tensor:
    """``o_TND`` in float64: softmax over the keys up to each token's own, one token and one head at a time."""
    block_size, head_dim = batch.kv_pool.shape[4:]
    q_TND = batch.queries.double()
    group = q_TND.shape[1] // batch.kv_pool.shape[1]
    o_TND = torch.empty_like(q_TND)
    token = 0
    for row, table in zip(batch.rows, batch.block_tables, strict=True):
        for position in range(row.cached, row.cached + row.new):
            slots = [(table[p // block_size], p % block_size) for p in range(position + 1)]
            blocks, offsets = (torch.tensor(column) for column in zip(*slots, strict=True))
            for head in range(q_TND.shape[1]):
                k_LD, v_LD = batch.kv_pool.double()[:, head // group, LAYER].unbind(1)
                weights = torch.softmax(k_LD[blocks, offsets] @ q_TND[token, head] / math.sqrt(head_dim), dim=0)
                o_TND[token, head] = weights @ v_LD[blocks, offsets]
            token += 1
    return o_TND
