"""Products with weights of 8 and 4 bits, from one token to as many as a long prompt has, against float64."""

from __future__ import annotations

import pytest
import torch

from pdserve.kernels.triton.quantized_matmul import pack, quantized_matmul
from pdserve.kernels.weight_quantisation import dequantise
from tests.gpu.device import on_device, sized, some
from tests.kernels.grouped_weights import FORMS, Form, random_weight
from tests.kernels.random_tensors import random

SHAPES = some(((256, 384), (4096, 4096), (4096, 1000), (1100, 6144)), 1)
"""Inputs and outputs; the last two fill no tile."""


@pytest.mark.parametrize("form", [Form("int8", None), Form("int4", 128)], ids=str)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), SHAPES)
@pytest.mark.parametrize("num_tokens", some((1, 17, 16, 64, 65, 300, 4096)))
@pytest.mark.parametrize("dtype", some((torch.bfloat16, torch.float16), 1), ids=str)
def test_rounded_once(form: Form, num_inputs: int, num_outputs: int, num_tokens: int, dtype: torch.dtype) -> None:
    _assert_product(form, num_inputs, num_outputs, num_tokens, dtype)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("num_tokens", some((1, 33, 300), 1))
def test_every_form_is_rounded_once(form: Form, num_tokens: int) -> None:
    _assert_product(form, *sized((1100, 2000), (300, 100)), num_tokens, torch.bfloat16)


@pytest.mark.parametrize("form", [Form("int8", None), Form("int4", 128), Form("e4m3", 128)], ids=str)
@pytest.mark.parametrize("num_tokens", some((1, 33, 500), 1))
def test_float32_is_computed_as_such(form: Form, num_tokens: int) -> None:
    _assert_product(form, *sized((1100, 2000), (300, 200)), num_tokens, torch.float32)


def _assert_product(form: Form, num_inputs: int, num_outputs: int, num_tokens: int, dtype: torch.dtype) -> None:
    """With a bias and a residual, and without."""
    weight = random_weight(form, num_outputs, num_inputs)
    packed = pack(weight)
    x_TE, bias_F, added_TF = (
        random(*shape, seed=index).to(dtype)
        for index, shape in enumerate(((num_tokens, num_inputs), (num_outputs,), (num_tokens, num_outputs)), 1)
    )
    product_TF = x_TE.double() @ dequantise(weight).double().T
    expected_TF = added_TF.double() + product_TF + bias_F.double()
    # Tensor cores do not round their sums to the nearest.
    tolerance = 0.51 * torch.finfo(dtype).eps + 2e-6
    y_TF = on_device(quantized_matmul)(x_TE, packed)
    torch.testing.assert_close(y_TF.double(), product_TF, atol=5e-5, rtol=tolerance)
    y_TF = on_device(quantized_matmul)(x_TE, packed, bias_F, added_TF)
    assert y_TF is added_TF
    torch.testing.assert_close(y_TF.double(), expected_TF, atol=5e-5, rtol=tolerance)
