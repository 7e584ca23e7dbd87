"""Rounding of weights, and parts of a quantised weight."""

from __future__ import annotations

import math

import pytest
import torch

from pdserve.kernels.weight_quantisation import GroupedWeight, dequantise, joined, quantise
from tests.kernels.random_tensors import random


def grouped(num_outputs: int, num_inputs: int, group_inputs: int, seed: int = 0) -> GroupedWeight:
    """Random values, scales and zeros."""
    generator = torch.Generator().manual_seed(seed)
    num_groups = -(-num_inputs // group_inputs)
    values_FE = torch.randint(-8, 8, (num_outputs, num_inputs), generator=generator, dtype=torch.int8)
    zeros_FG = torch.randint(-8, 8, (num_outputs, num_groups), generator=generator).float()
    return GroupedWeight(values_FE, random(num_outputs, num_groups, seed=seed).abs(), "int4", group_inputs, zeros_FG)


@pytest.mark.parametrize(("kind", "largest"), [("int8", 127), ("int4", 7)])
def test_a_rounded_weight_is_within_half_a_scale(kind: str, largest: int) -> None:
    weight_FE = random(3000, 200) * torch.logspace(-6, 6, 3000)[:, None]
    weight_FE[1] = 0
    weight_FE[2] = 1e-44
    weight = quantise(weight_FE, kind)
    assert weight.values.abs().max() == largest
    kept_FE = dequantise(weight)
    for group, scales_F in enumerate(weight.scales.unbind(dim=1)):
        inputs = slice(group * weight.group_inputs, (group + 1) * weight.group_inputs)
        torch.testing.assert_close(scales_F, weight_FE[:, inputs].abs().amax(dim=1) / largest)
        limit_F = 0.5001 * scales_F.double()
        limit_F[2] = 1e-43
        error_FI = (kept_FE[:, inputs].double() - weight_FE[:, inputs].double()).abs()
        assert (error_FI <= limit_F[:, None]).all()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_what_is_not_finite_makes_its_scale_nan(kind: str) -> None:
    weight_FE = random(4, 300)
    weight_FE[1, 4], weight_FE[3, 260] = math.nan, -math.inf
    scales_FG = quantise(weight_FE, kind).scales
    assert scales_FG.isnan().nonzero().tolist() == [[1, 0], [3, scales_FG.shape[1] - 1]]


def test_values_less_zeros_times_scales_in_the_order_of_the_inputs() -> None:
    weight = GroupedWeight(
        torch.tensor([[1, 2, 3], [-8, 7, 0]], dtype=torch.int8),
        torch.tensor([[0.5, 2.0], [1.0, 4.0]]),
        "int4",
        2,
        torch.tensor([[1.0, -1.0], [0.0, 3.0]]),
        torch.tensor([2, 0, 1]),
    )
    assert dequantise(weight).tolist() == [[0.5, 8.0, 0.0], [7.0, -12.0, -8.0]]
    assert dequantise(weight._replace(group_inputs=99, scales=torch.ones(2, 1), zeros=None))[0].tolist() == [2, 3, 1]


def test_joined_and_cut() -> None:
    first, second = grouped(5, 90, 32), grouped(7, 90, 32, seed=1)
    whole = joined([first, second])
    whole_FE = torch.cat((dequantise(first), dequantise(second)))
    assert torch.equal(dequantise(whole), whole_FE)
    for inputs in (range(90), range(32, 64), range(64, 90)):
        assert torch.equal(dequantise(whole.inputs(inputs)), whole_FE[:, inputs.start : inputs.stop])
    with pytest.raises(AssertionError):
        whole.inputs(range(16, 64))
    with pytest.raises(AssertionError):
        joined([first, grouped(5, 90, 64)])
    whole = quantise(whole_FE, "int8")
    assert torch.equal(dequantise(whole.inputs(range(10, 20))), dequantise(whole)[:, 10:20])
