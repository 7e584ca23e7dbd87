from __future__ import annotations

import pytest
import torch

from pdserve.kernels import selection
from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.selection import (
    CPU_KERNELS,
    TORCH_KERNELS,
    TORCH_SAMPLING,
    select_kernels,
    select_sampling_kernels,
)
from pdserve.kernels.triton.kernels import TRITON_KERNELS, TRITON_SAMPLING
from tests.kernels.paged_batch import nan_pool


def pool(dtype: torch.dtype, head_dim: int = 16) -> KvPool:
    return nan_pool((2, 1, 1, 2, 16, head_dim), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_a_pool_that_the_compiled_kernels_take_runs_on_them(dtype: torch.dtype) -> None:
    assert select_kernels(pool(dtype)) is CPU_KERNELS


def test_other_head_dims_run_on_the_attention_of_torch() -> None:
    kernels = select_kernels(pool(torch.float32, head_dim=20))
    assert kernels.paged_attention is TORCH_KERNELS.paged_attention
    assert kernels.rope_and_write_kv is TORCH_KERNELS.rope_and_write_kv
    assert kernels.pack_linear is CPU_KERNELS.pack_linear


def test_float8_runs_on_the_attention_of_torch() -> None:
    assert select_kernels(pool(torch.float8_e4m3fn)) == select_kernels(pool(torch.float32, head_dim=20))


def test_without_a_compiler_everything_runs_on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "load_library", lambda: None)
    assert select_kernels(pool(torch.float32)) is TORCH_KERNELS


def test_a_pool_on_a_gpu_runs_on_triton() -> None:
    kernels = select_kernels(pool_elsewhere())
    assert kernels == TRITON_KERNELS._replace(device=torch.device("meta"))


def test_a_gpu_without_triton_runs_on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "find_spec", lambda name: None)
    kernels = select_kernels(pool_elsewhere())
    assert kernels == TORCH_KERNELS._replace(device=torch.device("meta"))


def test_logits_on_a_gpu_are_sampled_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_sampling_kernels(torch.device("meta")) is TRITON_SAMPLING
    monkeypatch.setattr(selection, "find_spec", lambda name: None)
    assert select_sampling_kernels(torch.device("meta")) is TORCH_SAMPLING


def pool_elsewhere() -> KvPool:
    """On a device that is no CPU."""
    memory = torch.empty(2 * 2 * 16 * 16 * 2, dtype=torch.uint8, device="meta")
    return KvPool(memory, (2, 1, 1, 2, 16, 16), torch.bfloat16)
