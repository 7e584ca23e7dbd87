"""Prefill attention on a GPU, and batches of both kinds of rows."""

from __future__ import annotations

import pytest
import torch

from pdserve.kernels.triton.attention import paged_attention
from pdserve.kernels.triton.kernels import TRITON_KERNELS
from pdserve.kernels.triton.prefill_attention import prefill_attention
from tests.gpu.attention_cases import (
    BF16,
    CASES,
    DECODE_ROWS,
    FP8,
    FP32,
    INT8,
    PREFILL_ROWS,
    Case,
    assert_attends,
    assert_reaches_beyond_32_bits,
    batch_of,
    each_of,
    launched,
)
from tests.gpu.device import on_device, some
from tests.kernels.padding import assert_padding_is_nobodys
from tests.kernels.paged_batch import LAYER


@each_of(some(CASES))
def test_prefill(case: Case) -> None:
    batch, rule = batch_of(case, PREFILL_ROWS)
    assert_attends(launched(prefill_attention, batch, rule), batch, rule)


@each_of(some(CASES[:3], 1))
def test_both_over_one_batch(case: Case) -> None:
    batch, rule = batch_of(case, (*PREFILL_ROWS, *DECODE_ROWS))
    o_TND = on_device(paged_attention)(batch.queries, batch.kv_pool, LAYER, batch.metadata, rule)
    assert_attends(o_TND, batch, rule)


@pytest.mark.parametrize("dtype", some((INT8, BF16, FP8), 1), ids=str)
def test_blocks_beyond_32_bits(dtype: torch.dtype) -> None:
    assert_reaches_beyond_32_bits(prefill_attention, dtype)


@pytest.mark.parametrize("dtype", some((FP32, INT8, FP8), 1), ids=str)
def test_padding_is_nobodys(dtype: torch.dtype) -> None:
    kernels = TRITON_KERNELS._replace(
        rope_and_write_kv=on_device(TRITON_KERNELS.rope_and_write_kv),
        paged_attention=on_device(TRITON_KERNELS.paged_attention),
    )
    assert_padding_is_nobodys(kernels, dtype)
