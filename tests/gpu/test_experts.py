"""Pairs of tokens and experts, their products and sums, from one token to as many as a long prompt has."""

from __future__ import annotations

import math

import pytest
import torch

from pdserve.kernels.torch import experts as torch_experts
from pdserve.kernels.triton.experts import combine, sort_pairs
from pdserve.kernels.triton.quantized_matmul import pack, quantized_matmul, stacked
from pdserve.kernels.weight_quantisation import dequantise
from tests.gpu.device import on_device, sized, some
from tests.kernels.grouped_weights import Form, random_weight
from tests.kernels.random_tensors import random

NUM_EXPERTS, PER_TOKEN = sized((64, 8), (6, 2))
NUM_INPUTS, NUM_OUTPUTS = sized((2048, 768), (160, 40))
NUM_TOKENS = some((1, 70, 16, 2048))
HERE = range(1, NUM_EXPERTS - 1)


def routes(num_tokens: int) -> torch_experts.Routes:
    return torch_experts.route(random(num_tokens, NUM_EXPERTS, seed=0), PER_TOKEN, normalise=True)


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_pairs_and_sums_are_those_of_torch(num_tokens: int) -> None:
    experts_TK, weights_TK = routes(num_tokens)
    pairs = on_device(sort_pairs)(experts_TK, HERE)
    for part, expected in zip(pairs, torch_experts.sort_pairs(experts_TK, HERE), strict=True):
        assert torch.equal(part, expected)
    y_PE = random(num_tokens * PER_TOKEN, NUM_INPUTS, seed=1)
    y_PE[int(pairs.starts[-1]) :] = math.nan
    sum_TE = on_device(combine)(y_PE, pairs.places, weights_TK)
    torch.testing.assert_close(sum_TE, torch_experts.combine(y_PE, pairs.places, weights_TK))


@pytest.mark.parametrize("form", [None, Form("int4", 128), Form("int8", 32), Form("e4m3", 128)], ids=str)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_products_are_rounded_once(form: Form | None, num_tokens: int) -> None:
    if form is None:
        weights = [random(NUM_OUTPUTS, NUM_INPUTS, seed=seed).bfloat16() / math.sqrt(NUM_INPUTS) for seed in HERE]
        packed = stacked([pack(weight) for weight in weights])
    else:
        quantised = [random_weight(form, NUM_OUTPUTS, NUM_INPUTS, seed) for seed in HERE]
        weights, packed = [dequantise(weight) for weight in quantised], stacked([pack(weight) for weight in quantised])
    starts_Y = torch_experts.sort_pairs(routes(num_tokens).experts, HERE).starts
    x_PE = random(num_tokens * PER_TOKEN, NUM_INPUTS, seed=1).bfloat16()
    y_PF = on_device(quantized_matmul)(x_PE, packed, starts_Y=starts_Y)
    expected_PF = torch.cat(
        [
            x_PE[start:end].double() @ weight.double().T
            for start, end, weight in zip(starts_Y[:-1], starts_Y[1:], weights, strict=True)
        ]
    )
    tolerance = 0.51 * torch.finfo(torch.bfloat16).eps + 2e-6
    torch.testing.assert_close(y_PF[: len(expected_PF)].double(), expected_PF, atol=5e-5, rtol=tolerance)
