"""The norm in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch

from pdserve.kernels.triton.norm import rms_normalise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_features", [1, 64, 100, 3000])
def test_matches_the_definition(dtype: torch.dtype, num_features: int) -> None:
    wide_TE = torch.randn(5, 2 * num_features).to(dtype)
    wide_TE[:, num_features:] = math.nan
    wide_TE[3] = 0
    x_TE = wide_TE[:, :num_features]
    weight_E = torch.randn(num_features).to(dtype)
    y_TE = rms_normalise(x_TE, weight_E, 1e-3)
    assert y_TE.dtype == dtype
    assert y_TE.is_contiguous()
    x_TE = x_TE.double()
    expected = x_TE / (x_TE.square().mean(dim=-1, keepdim=True) + 1e-3).sqrt() * weight_E.double()
    tolerance = 0.51 * torch.finfo(dtype).eps + 1e-6
    torch.testing.assert_close(y_TE.double(), expected, atol=1e-6, rtol=tolerance)
