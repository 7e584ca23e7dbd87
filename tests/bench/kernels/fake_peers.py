"""A stand-in for FlashInfer, which runs on GPUs only: computes what its documentation says from the same arguments.

Shows whether the benchmark gives it the batch, the pages and the layout that it expects.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch


def _attend(q_QND: torch.Tensor, k_KHD: torch.Tensor, v_KHD: torch.Tensor) -> torch.Tensor:
    """Causal, aligned with the last key."""
    num_new, num_keys, group = len(q_QND), len(k_KHD), q_QND.shape[1] // k_KHD.shape[1]
    k_KND, v_KND = (x.double().repeat_interleave(group, dim=1) for x in (k_KHD, v_KHD))
    scores_NQK = torch.einsum("qnd,knd->nqk", q_QND.double(), k_KND) / math.sqrt(q_QND.shape[2])
    hidden_QK = torch.ones(num_new, num_keys, dtype=torch.bool).triu(num_keys - num_new + 1)
    weights_NQK = scores_NQK.masked_fill(hidden_QK, -math.inf).softmax(dim=-1)
    return torch.einsum("nqk,knd->qnd", weights_NQK, v_KND).to(q_QND.dtype)


class _Wrapper:
    """Common part of both wrappers; ``HND`` only: pages of ``[2, H, S, D]``."""

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
