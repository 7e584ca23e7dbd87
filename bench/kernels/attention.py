"""Cases of attention over a paged pool, against torch over contiguous KV and FlashInfer over the same pages.

Cases of `pdserve.kernels.triton.prefill_attention` and `decode_attention`. Each peer gets its preferred layout,
prepared outside the timing. A peer that cannot read quantised KV gets it in bfloat16, so that the ratio is the gain of
quantisation.

Shape suffixes: T new tokens, N query heads, H KV heads, D head dim, B rows, Q new tokens of a row, K keys of a row, P
blocks, S block size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pdserve.bench.kernels.case import OWN, AbsentError, Case, Implementation, Make, Work, import_peer
from pdserve.kernels.kv_pool import LARGEST_VALUES, KvPool, vector_bytes
from pdserve.kernels.metadata import AttentionMetadata
from pdserve.kernels.operations import AttentionRule
from pdserve.kernels.triton.decode_attention import decode_attention
from pdserve.kernels.triton.prefill_attention import prefill_attention

BLOCK_SIZE = 16
SERVED_LAYERS, POOL_BYTES = 32, 8 << 30
"""The pool has as many layers as a served model's, within these bytes: blocks of a layer are then as far apart, each in
another page of the device's address tables."""
_TOLERANCE = 0.02
_WORKSPACE_BYTES = 512 * 2**20
ATTENTION_KERNELS: Mapping[str, Callable[..., None]] = {
    "prefill_attention": prefill_attention,
    "decode_attention": decode_attention,
}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Row(NamedTuple):
    """One sequence's share of a step."""

    new: int
    cached: int = 0

    @property
    def keys(self) -> int:
        return self.cached + self.new


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """One layer's attention of a batch."""

    kernel: str
    """``prefill_attention`` or ``decode_attention``."""
    rows: tuple[Row, ...]
    num_heads: int
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False

    def __str__(self) -> str:
        first, keys = self.rows[0], [row.keys for row in self.rows]
        tokens = f"{len(self.rows)} x {first.new}" + f" after {first.cached}" * bool(first.cached)
        if any(row != first for row in self.rows):
            tokens = f"{len(self.rows)} rows of {min(keys)} to {max(keys)}"
        words = [f"{self.num_heads}/{self.num_kv_heads} heads D{self.head_dim}", tokens]
        words += [dtype_name(self.dtype)] * (self.dtype != torch.bfloat16)
        words += [f"KV {dtype_name(self.kv_dtype)}"] * (self.kv_dtype != self.dtype)
        return ", ".join(
            words + ["window"] * bool(self.window) + ["softcap"] * bool(self.softcap) + ["sinks"] * self.has_sinks
        )

    @property
    def work(self) -> Work:
        """Formulas of both kernels, each bound by the longer of reads and products. Prefill counts queries and results,
        which are as large as the KV there."""
        pairs = sum(row.new * row.cached + row.new * (row.new + 1) / 2 for row in self.rows)
        num_vectors = 2 * self.num_kv_heads * sum(row.keys for row in self.rows)
        num_bytes = num_vectors * vector_bytes(self.head_dim, self.kv_dtype)
        if self.kernel == "prefill_attention":
            num_bytes += 2 * self.num_heads * sum(row.new for row in self.rows) * self.head_dim * self.dtype.itemsize
        return Work(num_bytes, flops=4 * self.num_heads * self.head_dim * pairs)


def attention_case(shape: AttentionShape) -> Case:
    """Our kernel, as in serving."""

    def make(device: torch.device) -> Mapping[str, Make]:
        inputs = _Inputs.draw(shape, device)
        return {
            OWN: partial(_own, inputs),
            "sdpa flash": partial(_sdpa, inputs, SDPBackend.FLASH_ATTENTION),
            "sdpa cudnn": partial(_sdpa, inputs, SDPBackend.CUDNN_ATTENTION),
            "flashinfer": partial(_flashinfer, inputs),
        }

    return Case(shape.kernel, str(shape), shape.work, make, _TOLERANCE)


@dataclass(frozen=True)
class _Inputs:
    """A batch on a device, and the layouts of it that peers take, made on first use."""

    shape: AttentionShape
    queries: torch.Tensor
    """``[T, N, D]``."""
    kv_pool: KvPool
    """Only its last layer has values."""
    host_metadata: AttentionMetadata
    metadata: AttentionMetadata
    """On the device."""

    @classmethod
    def draw(cls, shape: AttentionShape, device: torch.device) -> _Inputs:
        """Random queries, and random KV in shuffled blocks."""
        needed = [-(-row.keys // BLOCK_SIZE) for row in shape.rows]
        ids = iter(torch.randperm(sum(needed)).tolist())
        metadata = AttentionMetadata.build(
            [row.new for row in shape.rows],
            [row.cached for row in shape.rows],
            [[next(ids) for _ in range(count)] for count in needed],
            num_blocks=sum(needed),
            block_size=BLOCK_SIZE,
        )
        q_TND = torch.randn(metadata.num_tokens, shape.num_heads, shape.head_dim, device=device).to(shape.dtype)
        layer_bytes = sum(needed) * shape.num_kv_heads * 2 * BLOCK_SIZE * vector_bytes(shape.head_dim, shape.kv_dtype)
        num_layers = max(1, min(SERVED_LAYERS, POOL_BYTES // layer_bytes))
        pool_shape = (sum(needed), shape.num_kv_heads, num_layers, 2, BLOCK_SIZE, shape.head_dim)
        kv_pool = random_pool(pool_shape, shape.kv_dtype, device, num_layers - 1)
        return cls(shape, q_TND, kv_pool, metadata, metadata.to(device))

    @property
    def layer(self) -> int:
        return self.kv_pool.shape[2] - 1

    @cached_property
    def pages(self) -> torch.Tensor:
        """``[P, 2, H, S, D]``, contiguous, in the dtype of the queries: keys, then values, of every block."""
        values = self.kv_pool.values[:, :, self.layer]
        if self.kv_pool.scales is not None:
            values = values.to(self.shape.dtype) * self.kv_pool.scales[:, :, self.layer, ..., None]
        return values.to(self.shape.dtype).transpose(1, 2).contiguous()

    @cached_property
    def contiguous_kv(self) -> torch.Tensor:
        """``[2, B, H, K, D]``, contiguous, for rows of one length: keys, then values, without pages."""
        pages = self.pages[self.metadata.block_ids.long()]
        pages_BPsHSD = pages.view(len(self.shape.rows), -1, *pages.shape[1:])
        keys = self.shape.rows[0].keys
        kv: torch.Tensor = pages_BPsHSD.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, :keys].contiguous()
        return kv


def random_pool(
    shape: tuple[int, int, int, int, int, int], dtype: torch.dtype, device: torch.device, first_layer: int = 0
) -> KvPool:
    """A pool with finite random values from ``first_layer`` on, and any before: zeros would draw less power, and clocks
    follow power."""
    num_blocks, num_heads, num_layers, two, block_size, head_dim = shape
    num_bytes = num_blocks * num_heads * num_layers * two * block_size * vector_bytes(head_dim, dtype)
    kv_pool = KvPool(torch.empty(num_bytes, dtype=torch.uint8, device=device), shape, dtype)
    values = kv_pool.values[:, :, first_layer:]
    if kv_pool.scales is None:
        values.normal_()
        return kv_pool
    # A float8 is a sign and seven bits, all of them set for NaN; an int8 may be any number.
    bits = torch.empty(values.shape, dtype=torch.uint8, device=device).random_(0, 254)
    values.view(torch.uint8).copy_(bits >> 1 | bits << 7)
    kv_pool.scales[:, :, first_layer:].uniform_(0.5, 0.99).div_(LARGEST_VALUES[dtype])
    return kv_pool


def _own(inputs: _Inputs) -> Implementation:
    shape, o_TND = inputs.shape, torch.empty_like(inputs.queries)
    rule = AttentionRule(
        scale=shape.head_dim**-0.5,
        window=shape.window,
        softcap=shape.softcap,
        sinks=torch.zeros(shape.num_heads, device=o_TND.device) if shape.has_sinks else None,
    )
    attend = partial(
        ATTENTION_KERNELS[shape.kernel], inputs.queries, o_TND, inputs.kv_pool, inputs.layer, inputs.metadata, rule
    )

    def run() -> torch.Tensor:
        attend()
        return o_TND

    return Implementation(run)


def _sdpa(inputs: _Inputs, backend: SDPBackend) -> Implementation:
    """torch's own. With one new token, the heads of a group are given as queries of one head, which see the same keys:
    no backend reads them twice then."""
    from torch.nn.attention.bias import causal_lower_right

    shape, row = inputs.shape, inputs.shape.rows[0]
    if any(other != row for other in shape.rows):
        raise AbsentError("takes rows of one length")
    k_BHKD, v_BHKD = inputs.contiguous_kv
    q_BQND = inputs.queries.view(len(shape.rows), -1, *inputs.queries.shape[1:])
    options: dict[str, Any] = {}
    if row.new == 1:
        q = q_BQND.view(len(q_BQND), shape.num_kv_heads, -1, shape.head_dim)
    else:
        q = q_BQND.transpose(1, 2).contiguous()
        options = {"enable_gqa": shape.num_heads != shape.num_kv_heads}
        options |= {"attn_mask": causal_lower_right(row.new, row.keys)} if row.cached else {"is_causal": True}
        if row.cached and backend == SDPBackend.CUDNN_ATTENTION:
            raise AbsentError("torch lets it align causal attention with the first key only")

    def run() -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k_BHKD, v_BHKD, **options)

    def read(o_BNQD: torch.Tensor) -> torch.Tensor:
        return o_BNQD.flatten(1, 2) if row.new == 1 else o_BNQD.transpose(1, 2).flatten(0, 1)

    return Implementation(run, read)


def _flashinfer(inputs: _Inputs) -> Implementation:
    flashinfer = import_peer("flashinfer")
    shape, metadata = inputs.shape, inputs.host_metadata
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.queries.device)
    last_pages = (metadata.kv_lengths - 1) % BLOCK_SIZE + 1
    table = (metadata.block_starts, inputs.metadata.block_ids, last_pages)
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, BLOCK_SIZE)
    dtypes = {"q_data_type": shape.dtype, "kv_data_type": shape.dtype}
    if shape.kernel == "decode_attention" and metadata.max_new_tokens == 1:
        attend = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        attend.plan(*table, *heads, **dtypes)
    else:
        attend = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        attend.plan(metadata.query_starts, *table, *heads, causal=True, **dtypes)
    return Implementation(partial(attend.run, inputs.queries, inputs.pages))
