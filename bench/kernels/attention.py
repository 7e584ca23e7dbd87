"""Benchmark cases of attention: batches over a paged pool, and the same KV in the layouts of the peers.

Cases of `pdserve.kernels.triton.prefill_attention` and `triton_decode_attention`; their peers are in
`pdserve.bench.kernels.attention_peers`. A peer that cannot read quantised KV gets it in bfloat16, so that the ratio is
the gain of quantisation.

Shape suffixes: T new tokens, N query heads, H KV heads, D head dim, B rows, Q new tokens of a row, K keys of a row, P
blocks, S block size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

import torch

from pdserve.bench.kernels.attention_peers import attention_peers
from pdserve.bench.kernels.contest import Contender, Contest, Work
from pdserve.kernels.kv_pool import KvPool, vector_bytes
from pdserve.kernels.metadata import AttentionMetadata
from pdserve.kernels.operations import AttentionRule
from pdserve.kernels.triton.configs import AttentionTile, KvSplit, dtype_name
from pdserve.kernels.triton.decode_attention import decode_attention
from pdserve.kernels.triton.prefill_attention import prefill_attention

BLOCK_SIZE = 16
_TOLERANCE = 0.02
_KERNELS: Mapping[str, Callable[..., None]] = {
    "prefill_attention": prefill_attention,
    "decode_attention": decode_attention,
}


class Row(NamedTuple):
    """One sequence's share of a step."""

    new: int
    cached: int = 0

    @property
    def keys(self) -> int:
        return self.cached + self.new


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """One layer's attention of a batch."""

    kernel: str
    """``prefill_attention`` or ``decode_attention``."""
    rows: tuple[Row, ...]
    num_heads: int
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16

    @property
    def shape(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads} heads D{self.head_dim}"
        first = self.rows[0]
        tokens = f"{len(self.rows)} x {first.new}" + f" after {first.cached}" * bool(first.cached)
        if any(row != first for row in self.rows):
            keys = [row.keys for row in self.rows]
            tokens = f"{len(self.rows)} rows of {min(keys)} to {max(keys)}"
        return f"{heads}, {tokens}" + f", KV {dtype_name(self.kv_dtype)}" * (self.kv_dtype != self.dtype)

    @property
    def work(self) -> Work:
        """The formulas of both kernels: they differ in what is asked of them, and each is bound by what takes longer.
        Queries and results are counted in prefill, where they are as large as the KV."""
        pairs = sum(row.new * row.cached + row.new * (row.new + 1) / 2 for row in self.rows)
        num_vectors = 2 * self.num_kv_heads * sum(row.keys for row in self.rows)
        num_bytes = num_vectors * vector_bytes(self.head_dim, self.kv_dtype)
        if self.kernel == "prefill_attention":
            num_queries = self.num_heads * sum(row.new for row in self.rows)
            num_bytes += 2 * num_queries * self.head_dim * self.dtype.itemsize
        return Work(num_bytes, flops=4 * self.num_heads * self.head_dim * pairs)

    def inputs(self, device: torch.device) -> PagedInputs:
        """Random queries, and random KV in shuffled blocks."""
        num_blocks = sum(-(-row.keys // BLOCK_SIZE) for row in self.rows)
        shape = (num_blocks, self.num_kv_heads, 1, 2, BLOCK_SIZE, self.head_dim)
        num_bytes = num_blocks * self.num_kv_heads * 2 * BLOCK_SIZE * vector_bytes(self.head_dim, self.kv_dtype)
        kv_pool = KvPool(torch.empty(num_bytes, dtype=torch.uint8, device=device), shape, self.kv_dtype)
        if kv_pool.scales is None:
            kv_pool.values.normal_()
        else:
            _fill_quantised(kv_pool.values)
            kv_pool.scales.uniform_(0.005, 0.02)
        metadata = AttentionMetadata.build(
            [row.new for row in self.rows],
            [row.cached for row in self.rows],
            _tables(self.rows, num_blocks),
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
        )
        q_TND = torch.randn(metadata.num_tokens, self.num_heads, self.head_dim, device=device).to(self.dtype)
        return PagedInputs(self, q_TND, kv_pool, metadata, metadata.to(device))

    def launch(
        self, inputs: PagedInputs, tile: AttentionTile | None = None, split: KvSplit | None = None
    ) -> Callable[[], torch.Tensor]:
        """Our kernel, cut as ``tile`` and, of decode attention, ``split`` say, or as in serving."""
        attend = _KERNELS[self.kernel]
        o_TND = torch.empty_like(inputs.queries)
        rule = AttentionRule(scale=self.head_dim**-0.5)
        launch = partial(attend, inputs.queries, o_TND, inputs.kv_pool, 0, inputs.metadata, rule, tile=tile)
        if split is not None:
            launch = partial(launch, split=split)

        def run() -> torch.Tensor:
            launch()
            return o_TND

        return run

    def contest(self, device: torch.device) -> Contest:
        inputs = self.inputs(device)
        return Contest(Contender(self.launch(inputs)), attention_peers(inputs), _TOLERANCE)


def _fill_quantised(values: torch.Tensor) -> None:
    """With any numbers of their dtype."""
    if values.dtype == torch.int8:
        values.random_(-127, 128)
        return
    # A sign beside seven bits, which are NaN where all of them are set.
    bits = values.view(torch.uint8).random_(0, 254)
    bits.copy_(bits >> 1 | bits << 7)


def _tables(rows: Sequence[Row], num_blocks: int) -> list[list[int]]:
    ids = iter(torch.randperm(num_blocks).tolist())
    return [[next(ids) for _ in range(-(-row.keys // BLOCK_SIZE))] for row in rows]


@dataclass(frozen=True)
class PagedInputs:
    """A batch on a device, and the forms of it that peers take, which are made when the first of them asks."""

    case: AttentionCase
    queries: torch.Tensor
    """``[T, N, D]``."""
    kv_pool: KvPool
    host_metadata: AttentionMetadata
    metadata: AttentionMetadata
    """On the device."""

    @property
    def row(self) -> Row | None:
        """Of a batch whose rows are alike."""
        first = self.case.rows[0]
        return first if all(row == first for row in self.case.rows) else None

    @cached_property
    def pages(self) -> torch.Tensor:
        """``[P, 2, H, S, D]``, contiguous, of the dtype of the queries: keys, then values, of every block."""
        values = self.kv_pool.values[:, :, 0]
        if self.kv_pool.scales is not None:
            values = values.to(self.case.dtype) * self.kv_pool.scales[:, :, 0, ..., None]
        return values.to(self.case.dtype).transpose(1, 2).contiguous()

    @cached_property
    def contiguous_kv(self) -> torch.Tensor:
        """``[2, B, H, K, D]``, contiguous, of rows that are alike: keys, then values, without pages."""
        row = self.row
        assert row is not None
        pages = self.pages[self.metadata.block_ids.long()]
        pages_BPsHSD = pages.view(len(self.case.rows), -1, *pages.shape[1:])
        kv: torch.Tensor = pages_BPsHSD.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, : row.keys].contiguous()
        return kv

    @cached_property
    def block_table(self) -> torch.Tensor:
        """int32 ``[B, P]``, filled up with zeros."""
        starts = self.host_metadata.block_starts.tolist()
        rows = [self.metadata.block_ids[start:end] for start, end in pairwise(starts)]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
