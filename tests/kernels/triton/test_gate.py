"""The gate in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from pdserve.kernels.triton.gate import gate
from tests.kernels.gates import ACTIVATIONS, reference_gate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("num_features", [2, 200, 3000])
def test_matches_the_definition(dtype: torch.dtype, activation: str, num_features: int) -> None:
    gate_up_TF = (4 * torch.randn(3, num_features)).to(dtype)
    gate_up_TF[0, :2] = torch.tensor([100.0, -100.0])
    expected = reference_gate(gate_up_TF, activation)
    y_TI = gate(gate_up_TF, activation)
    assert y_TI.dtype == dtype
    # Where the gate is all but closed, what is left of it is a difference of two numbers near 1.
    tolerance = 0.51 * torch.finfo(dtype).eps + 2e-6
    torch.testing.assert_close(y_TI.double(), expected, atol=1e-5, rtol=tolerance)
