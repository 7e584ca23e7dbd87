"""Random ragged batches over a paged pool, and what the kernels compute with them, by the definition, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pdserve.kernels.kv_pool import LARGEST_VALUES, KvPool, vector_bytes
from pdserve.kernels.metadata import AttentionMetadata
from pdserve.kernels.operations import AttentionRule, QkNorm

NUM_LAYERS = 2
LAYER = 1


class Row(NamedTuple):
    """One sequence's share of a step."""

    cached: int
    new: int


class Slot(NamedTuple):
    """Where a new token's KV lies."""

    token: int
    block: int
    offset: int


@dataclass(frozen=True)
class PagedBatch:
    """Rows with random queries, and a pool that holds their KV in shuffled blocks and NaN everywhere else."""

    rows: tuple[Row, ...]
    queries: torch.Tensor
    """``[num_tokens, num_heads, head_dim]``."""
    kv_pool: KvPool
    block_tables: list[list[int]]
    metadata: AttentionMetadata

    def new_slots(self) -> Iterator[Slot]:
        """Every new token's place."""
        size = self.kv_pool.shape.block_size
        token = 0
        for row, table in zip(self.rows, self.block_tables, strict=True):
            for position in range(row.cached, row.cached + row.new):
                yield Slot(token, table[position // size], position % size)
                token += 1


def nan_pool(shape: tuple[int, int, int, int, int, int], dtype: torch.dtype = torch.float32) -> KvPool:
    """A pool where every value is NaN, and every scale."""
    num_bytes = math.prod(shape[:-1]) * vector_bytes(shape[-1], dtype)
    pool = KvPool(torch.ones(num_bytes, dtype=torch.uint8), shape, dtype)
    poison(pool, list(range(shape[0])))
    return pool


def poison(pool: KvPool, blocks: list[int]) -> None:
    """Make every number of these blocks NaN."""
    if pool.dtype.is_floating_point:
        pool.values[blocks] = math.nan
    if pool.scales is not None:
        pool.scales[blocks] = math.nan


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
    """Random rows; the first ``shared_blocks`` blocks of every row are those of the first.

    Args:
        dtype: of the pool; queries are float32.
        spread: scales the scores.
    """
    generator = torch.Generator().manual_seed(len(rows) + head_dim)
    needed = [-(-(row.cached + row.new) // block_size) for row in rows]
    num_blocks = sum(needed) + 3
    ids = torch.randperm(num_blocks, generator=generator).tolist()
    block_tables = []
    for count in needed:
        block_tables.append([ids.pop() for _ in range(count)])
        block_tables[-1][:shared_blocks] = block_tables[0][:shared_blocks]
    kv_pool = nan_pool((num_blocks, num_kv_heads, NUM_LAYERS, 2, block_size, head_dim), dtype)
    for row, table in zip(rows, block_tables, strict=True):
        for index, block in enumerate(table):
            filled = min(block_size, row.cached + row.new - index * block_size)
            values = torch.randn(num_kv_heads, 2, filled, head_dim, generator=generator)
            if kv_pool.scales is None:
                kv_pool.values[block, :, LAYER, :, :filled] = values.to(dtype)
            else:
                scales = values.abs().amax(dim=-1) / LARGEST_VALUES[dtype]
                kv_pool.values[block, :, LAYER, :, :filled] = rounded_to(dtype, values / scales[..., None])
                kv_pool.scales[block, :, LAYER, :, :filled] = scales
    num_tokens = sum(row.new for row in rows)
    q_TND = spread * torch.randn(num_tokens, num_kv_heads * group, head_dim, generator=generator)
    metadata = AttentionMetadata.build(
        [row.new for row in rows],
        [row.cached for row in rows],
        block_tables,
        num_blocks=num_blocks,
        block_size=block_size,
    )
    return PagedBatch(rows, q_TND, kv_pool, block_tables, metadata)


def rounded_to(dtype: torch.dtype, values: torch.Tensor) -> torch.Tensor:
    """To the nearest even: integers where torch would truncate."""
    return (values if dtype.is_floating_point else values.round()).to(dtype)


def far_batch(near: PagedBatch) -> PagedBatch:
    """The same in a pool of more than 2^31 elements, in its last blocks. Only pages that are touched take memory."""
    dtype, size = near.kv_pool.dtype, near.kv_pool.shape.block_size
    shape = near.kv_pool.shape._replace(num_layers=40000)
    block_bytes = shape.num_kv_heads * shape.num_layers * 2 * size * vector_bytes(shape.head_dim, dtype)
    needed = [block for table in near.block_tables for block in table]
    num_blocks = 2**31 * dtype.itemsize // block_bytes + 2 + len(needed)
    kv_pool = KvPool(
        torch.empty(num_blocks * block_bytes, dtype=torch.uint8), shape._replace(num_blocks=num_blocks), dtype
    )
    moved = {block: num_blocks - 1 - index for index, block in enumerate(needed)}
    for source, target in moved.items():
        kv_pool.values[target, :, LAYER] = near.kv_pool.values[source, :, LAYER]
        if kv_pool.scales is not None and near.kv_pool.scales is not None:
            kv_pool.scales[target, :, LAYER] = near.kv_pool.scales[source, :, LAYER]
    tables = [[moved[block] for block in table] for table in near.block_tables]
    metadata = AttentionMetadata.build(
        [row.new for row in near.rows],
        [row.cached for row in near.rows],
        tables,
        num_blocks=num_blocks,
        block_size=size,
    )
    return PagedBatch(near.rows, near.queries, kv_pool, tables, metadata)


def reference_attention(batch: PagedBatch, rule: AttentionRule) -> torch.Tensor:
    """``o_TND``: softmax over the keys that each token sees and the head's sink, one row at a time."""
    return torch.cat(
        [
            torch.einsum("nql,lnd->qnd", _weights(scores_NQL, rule.sinks), v_LND)
            for scores_NQL, v_LND in _rows_scores_and_values(batch, rule)
        ]
    )


def _weights(scores_NQL: torch.Tensor, sinks_N: torch.Tensor | None) -> torch.Tensor:
    if sinks_N is None:
        return scores_NQL.softmax(dim=-1)
    sinks_NQ1 = sinks_N.double()[:, None, None].expand(-1, scores_NQL.shape[1], 1)
    return torch.cat((sinks_NQ1, scores_NQL), dim=-1).softmax(dim=-1)[..., 1:]


def sinks_of(num_heads: int) -> torch.Tensor:
    """One that counts little, one that counts as a key does, one as many, and one alone; and so on."""
    return torch.tensor([-300.0, 0.5, 5.0, 300.0]).repeat(num_heads)[:num_heads].contiguous()


def reference_lse(batch: PagedBatch, rule: AttentionRule) -> torch.Tensor:
    """``lse_TN``: of the scores of the keys that each token sees."""
    return torch.cat([scores_NQL.logsumexp(dim=-1).T for scores_NQL, _ in _rows_scores_and_values(batch, rule)])


def _rows_scores_and_values(batch: PagedBatch, rule: AttentionRule) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Scores of each row's new tokens, -inf of what they do not see, and the values of its keys."""
    block_size = batch.kv_pool.shape.block_size
    group = batch.queries.shape[1] // batch.kv_pool.shape.num_kv_heads
    queries = batch.queries.double().split_with_sizes([row.new for row in batch.rows])
    for row, table, q_QND in zip(batch.rows, batch.block_tables, queries, strict=True):
        first = max(0, row.cached - rule.window + 1) if rule.window else 0
        seen_L = torch.arange(first, row.cached + row.new)
        blocks_L, offsets_L = torch.tensor(table)[seen_L // block_size], seen_L % block_size
        kv_LHD = (stored_kv(batch.kv_pool, blocks_L, side, offsets_L) for side in (0, 1))
        k_LND, v_LND = (side_LHD.repeat_interleave(group, dim=1) for side_LHD in kv_LHD)
        scores_NQL = rule.scale * torch.einsum("qnd,lnd->nql", q_QND, k_LND)
        if rule.softcap:
            scores_NQL = rule.softcap * torch.tanh(scores_NQL / rule.softcap)
        distance_QL = seen_L[-row.new :, None] - seen_L
        unseen_QL = (distance_QL < 0) | (distance_QL >= (rule.window or math.inf))
        yield scores_NQL.masked_fill(unseen_QL, -math.inf), v_LND


def stored_kv(kv_pool: KvPool, blocks_L: torch.Tensor, side: int, offsets_L: torch.Tensor) -> torch.Tensor:
    """Keys (``side`` 0) or values (1) of some slots of `LAYER`: ``[L, H, D]``."""
    stored_LHD = kv_pool.values[blocks_L, :, LAYER, side, offsets_L].double()
    return (
        stored_LHD if kv_pool.scales is None else stored_LHD * kv_pool.scales[blocks_L, :, LAYER, side, offsets_L, None]
    )


def reference_rotation(x_TND: torch.Tensor, angles_TC: torch.Tensor) -> torch.Tensor:
    """``x_TND`` with its halves paired and turned, as complex numbers."""
    pairs = torch.view_as_complex(torch.stack(x_TND.double().chunk(2, dim=-1), dim=-1))
    turned = pairs * torch.polar(torch.ones_like(angles_TC), angles_TC).to(torch.complex128)[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)


def reference_qk_norm(x_TND: torch.Tensor, num_kv_heads: int, qk_norm: QkNorm) -> torch.Tensor:
    """Every query head over its root mean square, times its weight; the last ``num_kv_heads`` heads are keys."""
    x_TND = x_TND.double()
    normed_TND = x_TND / (x_TND.square().mean(dim=-1, keepdim=True) + qk_norm.eps).sqrt()
    num_heads = x_TND.shape[1] - num_kv_heads
    return normed_TND * torch.stack([qk_norm.q_weight] * num_heads + [qk_norm.k_weight] * num_kv_heads).double()
