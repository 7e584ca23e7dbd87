"""Norm and gate in the shapes of serving, against float64."""

from __future__ import annotations

import pytest
import torch

from pdserve.kernels.triton.gate import gate
from pdserve.kernels.triton.norm import rms_normalise
from tests.gpu.device import on_device, sized, some
from tests.kernels.gates import ACTIVATIONS, reference_gate

DTYPES = some((torch.bfloat16, torch.float16, torch.float32), 1)
NUM_TOKENS = some((7, 1, 2048), 1)


def assert_rounded_once(y_TE: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert y_TE.dtype == dtype
    torch.testing.assert_close(y_TE.double(), expected, atol=1e-5, rtol=0.51 * torch.finfo(dtype).eps + 2e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_features", some((5120, 4096, 8192, 16384), 1))
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_norm(dtype: torch.dtype, num_features: int, num_tokens: int) -> None:
    x_TE, weight_E = torch.randn(num_tokens, num_features).to(dtype), torch.randn(num_features).to(dtype)
    root_T1 = (x_TE.double().square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()
    y_TE = on_device(rms_normalise)(x_TE, weight_E, 1e-6)
    assert_rounded_once(y_TE, x_TE.double() / root_T1 * weight_E.double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_gate(dtype: torch.dtype, activation: str, num_tokens: int) -> None:
    gate_up_TF = torch.randn(num_tokens, 2 * sized(14336, 1500)).to(dtype)
    assert_rounded_once(on_device(gate)(gate_up_TF, activation), reference_gate(gate_up_TF, activation), dtype)
