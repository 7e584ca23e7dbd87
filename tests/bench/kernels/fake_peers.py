"""Stand-ins for peers that run on GPUs only: what their documentation says that they compute, from the same arguments.

With them it shows whether the benchmark gives such a peer the batch, the pages and the layout that it expects.
"""

from __future__ import annotations

import math
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

FA3_SCHEMA = """fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out,
Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k,
int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos,
Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale,
float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap,
bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, Tensor? s_aux,
int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"""
"""Of vllm-project/flash-attention, hopper/flash_api_torch_lib.cpp."""


def _attend(q_QND: torch.Tensor, k_KHD: torch.Tensor, v_KHD: torch.Tensor) -> torch.Tensor:
    """Causal, aligned with the last key."""
    num_new, num_keys, group = len(q_QND), len(k_KHD), q_QND.shape[1] // k_KHD.shape[1]
    k_KND, v_KND = (x.double().repeat_interleave(group, dim=1) for x in (k_KHD, v_KHD))
    scores_NQK = torch.einsum("qnd,knd->nqk", q_QND.double(), k_KND) / math.sqrt(q_QND.shape[2])
    hidden_QK = torch.ones(num_new, num_keys, dtype=torch.bool).triu(num_keys - num_new + 1)
    weights_NQK = scores_NQK.masked_fill(hidden_QK, -math.inf).softmax(dim=-1)
    return torch.einsum("nqk,knd->qnd", weights_NQK, v_KND).to(q_QND.dtype)


class _Wrapper:
    """What both wrappers of FlashInfer have in common; ``HND`` only: pages of ``[2, H, S, D]``."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str, use_tensor_cores: bool = False) -> None:
        assert workspace.dtype == torch.uint8
        assert kv_layout == "HND"

    def _plan(self, starts: Any, indptr: Any, indices: Any, last_page_len: Any, *numbers: int) -> None:
        self._planned = [x.tolist() for x in (starts, indptr, indices, last_page_len)]
        self._numbers = numbers

    def run(self, q_TND: torch.Tensor, pages_PsHSD: torch.Tensor) -> torch.Tensor:
        starts, indptr, indices, last_page_len = self._planned
        num_heads, num_kv_heads, head_dim, page_size = self._numbers
        assert q_TND.shape[1:] == (num_heads, head_dim)
        assert pages_PsHSD.shape[1:] == (2, num_kv_heads, page_size, head_dim)
        assert pages_PsHSD.is_contiguous()
        outputs = []
        for row, last in enumerate(last_page_len):
            pages = indices[indptr[row] : indptr[row + 1]]
            num_keys = (len(pages) - 1) * page_size + last
            k_KHD, v_KHD = pages_PsHSD[pages].permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :num_keys]
            outputs.append(_attend(q_TND[starts[row] : starts[row + 1]], k_KHD, v_KHD))
        return torch.cat(outputs)


class _DecodeWrapper(_Wrapper):
    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        *numbers: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        self._plan(torch.arange(len(last_page_len) + 1), indptr, indices, last_page_len, *numbers)


class _PrefillWrapper(_Wrapper):
    def plan(
        self,
        qo_indptr: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        *numbers: int,
        causal: bool,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert causal
        self._plan(qo_indptr, indptr, indices, last_page_len, *numbers)


def flashinfer() -> SimpleNamespace:
    """The package."""
    return SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=_DecodeWrapper,
        BatchPrefillWithPagedKVCacheWrapper=_PrefillWrapper,
    )


@cache
def define_fa3() -> torch.library.Library:
    """Register the operator, for as long as this process lives."""
    library = torch.library.Library("_vllm_fa3_C", "DEF")  # type: ignore[no-untyped-call]
    library.define(FA3_SCHEMA)  # type: ignore[no-untyped-call]
    library.impl("fwd", _fa3_forward, "CPU")  # type: ignore[no-untyped-call]
    return library


def _fa3_forward(*arguments: Any) -> list[torch.Tensor]:
    names = [argument.name for argument in torch.ops._vllm_fa3_C.fwd.default._schema.arguments]
    given = dict(zip(names, arguments, strict=False))
    starts, lengths = given["cu_seqlens_q"].tolist(), given["seqused_k"].tolist()
    assert given["is_causal"]
    assert (given["window_size_left"], given["window_size_right"]) == (-1, -1)
    assert given["max_seqlen_k"] == max(lengths)
    outputs = []
    for row, num_keys in enumerate(lengths):
        pages = given["page_table"][row]
        k_KHD, v_KHD = (given[name][pages.long()].flatten(0, 1)[:num_keys] for name in ("k", "v"))
        outputs.append(_attend(given["q"][starts[row] : starts[row + 1]], k_KHD, v_KHD))
    return [torch.cat(outputs), torch.empty(0)]
