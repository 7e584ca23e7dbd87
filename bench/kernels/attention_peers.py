"""Peers of the attention kernels: torch over contiguous KV, FlexAttention, FlashInfer, FlashAttention-3.

Called by `pdserve.bench.kernels.attention`. Each peer gets its preferred layout, prepared outside the timing. A peer
that needs torch's compiler imports it itself. FlashInfer needs its package; FlashAttention-3 comes from the library in
a wheel of vLLM, ``vllm_flash_attn/_vllm_fa3_C.abi3.so``, whose path is in the environment variable `FA3_LIBRARY`.

Shape suffixes: as `pdserve.bench.kernels.attention`; G query heads of a KV head.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pdserve.bench.kernels.contest import Contender, MakePeer, PeerAbsentError, import_peer

if TYPE_CHECKING:
    from pdserve.bench.kernels.attention import PagedInputs

FA3_LIBRARY = "PDSERVE_FA3_LIBRARY"
"""Environment variable."""
_WORKSPACE_BYTES = 512 * 2**20


def attention_peers(inputs: PagedInputs) -> Mapping[str, MakePeer]:
    """Every peer, by name."""
    return {
        "sdpa flash": partial(_sdpa, inputs, SDPBackend.FLASH_ATTENTION),
        "sdpa cudnn": partial(_sdpa, inputs, SDPBackend.CUDNN_ATTENTION),
        "flex": partial(_flex, inputs),
        "flashinfer": partial(_flashinfer, inputs),
        "fa3": partial(_flash_attention_3, inputs),
    }


def _contiguous(inputs: PagedInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``[B, N, Q, D]``, ``[B, H, K, D]`` and the like of values. One new token's heads of a group are given as queries
    of one head, which see the same keys: no backend reads them twice then.

    Raises:
        PeerAbsentError: rows differ in their lengths.
    """
    if inputs.row is None:
        raise PeerAbsentError("takes rows of one length")
    q_BQND = inputs.queries.view(len(inputs.case.rows), -1, *inputs.queries.shape[1:])
    if inputs.row.new == 1:
        return q_BQND.view(len(q_BQND), inputs.case.num_kv_heads, -1, inputs.case.head_dim), *inputs.contiguous_kv
    return q_BQND.transpose(1, 2).contiguous(), *inputs.contiguous_kv


def _read(o_BNQD: torch.Tensor, is_folded: bool) -> torch.Tensor:
    """``[T, N, D]``."""
    return o_BNQD.flatten(1, 2) if is_folded else o_BNQD.transpose(1, 2).flatten(0, 1)


def _sdpa(inputs: PagedInputs, backend: SDPBackend) -> Contender:
    from torch.nn.attention.bias import causal_lower_right

    q, k, v = _contiguous(inputs)
    row = inputs.row
    assert row is not None
    options: dict[str, Any] = {}
    if row.new > 1:
        options = {"enable_gqa": inputs.case.num_heads != inputs.case.num_kv_heads}
        options |= {"attn_mask": causal_lower_right(row.new, row.keys)} if row.cached else {"is_causal": True}
        if row.cached and backend == SDPBackend.CUDNN_ATTENTION:
            raise PeerAbsentError("torch lets it align causal attention with the first key only")

    def run() -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, **options)

    return Contender(run, partial(_read, is_folded=row.new == 1))


def _flex(inputs: PagedInputs) -> Contender:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = _contiguous(inputs)
    row = inputs.row
    assert row is not None
    options: dict[str, Any] = {}
    if row.new > 1:

        def sees(b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return query + row.cached >= key

        mask = create_block_mask(sees, None, None, row.new, row.keys, device=str(q.device))
        options = {"block_mask": mask, "enable_gqa": inputs.case.num_heads != inputs.case.num_kv_heads}
    attend: Any = flex_attention
    if q.device.type == "cuda":
        torch.compiler.reset()  # It compiles a few shapes of a function only.
        attend = torch.compile(flex_attention, dynamic=False)
    return Contender(partial(attend, q, k, v, **options), partial(_read, is_folded=row.new == 1))


def _flashinfer(inputs: PagedInputs) -> Contender:
    flashinfer = import_peer("flashinfer")
    case, metadata = inputs.case, inputs.host_metadata
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.queries.device)
    last_pages = (metadata.kv_lengths - 1) % inputs.kv_pool.shape.block_size + 1
    table = (metadata.block_starts, inputs.metadata.block_ids, last_pages)
    heads = (case.num_heads, case.num_kv_heads, case.head_dim, inputs.kv_pool.shape.block_size)
    dtypes = {"q_data_type": case.dtype, "kv_data_type": case.dtype}
    if case.kernel == "decode_attention" and metadata.max_new_tokens == 1:
        attend = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        attend.plan(*table, *heads, **dtypes)
    else:
        attend = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        attend.plan(metadata.query_starts, *table, *heads, causal=True, **dtypes)
    return Contender(partial(attend.run, inputs.queries, inputs.pages))


def _flash_attention_3(inputs: PagedInputs) -> Contender:
    library = os.environ.get(FA3_LIBRARY)
    if not library:
        raise PeerAbsentError(f"{FA3_LIBRARY} names no library")
    torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    metadata, case = inputs.metadata, inputs.case
    k_PSHD, v_PSHD = (side.transpose(1, 2).contiguous() for side in inputs.pages.unbind(1))
    given = {
        "q": inputs.queries,
        "k": k_PSHD,
        "v": v_PSHD,
        "cu_seqlens_q": metadata.query_starts.contiguous(),
        "seqused_k": metadata.kv_lengths.contiguous(),
        "max_seqlen_q": metadata.max_new_tokens,
        "max_seqlen_k": max(row.keys for row in case.rows),
        "page_table": inputs.block_table,
        "softmax_scale": case.head_dim**-0.5,
        "is_causal": True,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "is_rotary_interleaved": True,
        "num_splits": 0,
        "sm_margin": 0,
        "cp_world_size": 1,
        "cp_rank": 0,
    }
    attend = torch.ops._vllm_fa3_C.fwd.default
    # Versions differ in what can be left out: all of that is optional, and has no default.
    arguments = {argument.name: given.get(argument.name) for argument in attend._schema.arguments}
    return Contender(partial(attend, **arguments), lambda outcome: outcome[0])
