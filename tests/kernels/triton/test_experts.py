"""Experts in Triton's interpreter: pairs and sums as in torch, products against float64."""

from __future__ import annotations

import math

import pytest
import torch

from pdserve.kernels.torch import experts as torch_experts
from pdserve.kernels.triton.experts import combine, pack_experts, sort_pairs
from pdserve.kernels.triton.quantized_matmul import pack, quantized_matmul, stacked
from pdserve.kernels.weight_quantisation import dequantise
from tests.kernels.grouped_weights import FORMS, Form, random_weight
from tests.kernels.launch_recorder import WAITING_OPERATIONS, recorded_launches
from tests.kernels.random_tensors import random

pytestmark = pytest.mark.usefixtures("nan_workspaces")

NUM_OUTPUTS, NUM_INPUTS = 40, 160


def routed(num_tokens: int, num_experts: int, per_token: int) -> torch.Tensor:
    """Experts as routing gives them: part of a wider tensor."""
    return random(num_tokens, num_experts).argsort(dim=1)[:, :per_token]


def starts_of(*counts: int) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0)


def assert_product(
    y_PF: torch.Tensor, x_PE: torch.Tensor, weights: list[torch.Tensor], counts: tuple[int, ...]
) -> None:
    """Of all rows that are of an expert."""
    expected = [
        x.double() @ weight.double().T
        for x, weight in zip(x_PE[: sum(counts)].split_with_sizes([*counts]), weights, strict=True)
    ]
    tolerance = 0.51 * torch.finfo(x_PE.dtype).eps + 2e-6
    torch.testing.assert_close(y_PF[: sum(counts)].double(), torch.cat(expected), atol=5e-6, rtol=tolerance)


@pytest.mark.parametrize("here", [range(12), range(3, 7), range(11, 12)], ids=str)
@pytest.mark.parametrize(("num_tokens", "per_token"), [(1, 3), (70, 3), (300, 8)])
def test_pairs_are_sorted_as_in_torch(num_tokens: int, per_token: int, here: range) -> None:
    """Up to more pairs than are counted at once."""
    experts_TK = routed(num_tokens, 12, per_token)
    for part, expected in zip(sort_pairs(experts_TK, here), torch_experts.sort_pairs(experts_TK, here), strict=True):
        assert torch.equal(part, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_summed_as_in_torch(dtype: torch.dtype) -> None:
    """In the order of a token's experts; those of other ranks are not read."""
    y_PE, weights_TK = random(210, 1030).to(dtype), random(70, 4).abs()[:, :3]
    y_PE[100] = math.nan
    places_TK = torch.randperm(210, generator=torch.Generator().manual_seed(0)).view(70, 3)
    places_TK[(places_TK >= 100) & (places_TK < 150)] = -1
    places_TK[7] = -1
    expected = torch_experts.combine(y_PE, places_TK, weights_TK)
    torch.testing.assert_close(combine(y_PE, places_TK, weights_TK), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)
    large_PE = torch.tensor([[1.0], [2.0**30], [-(2.0**30)]])
    places_TK = torch.tensor([[1, 2, 0], [1, 0, 2]])
    assert combine(large_PE, places_TK, torch.ones(2, 3))[:, 0].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("form", [None, *FORMS], ids=str)
@pytest.mark.parametrize("counts", [(1, 0, 2), (0, 33, 16, 0, 1)], ids=str)
def test_rows_are_multiplied_by_their_expert(form: Form | None, counts: tuple[int, ...]) -> None:
    """Those of no expert come last. None is written but by its own expert."""
    num_experts, x_PE = len(counts), random(sum(counts) + 3, NUM_INPUTS, seed=1)
    if form is None:
        weights = [random(NUM_OUTPUTS, NUM_INPUTS, seed=seed) / math.sqrt(NUM_INPUTS) for seed in range(num_experts)]
        packed = stacked([pack(weight) for weight in weights])
    else:
        quantised = [random_weight(form, NUM_OUTPUTS, NUM_INPUTS, seed) for seed in range(num_experts)]
        weights, packed = [dequantise(weight) for weight in quantised], stacked([pack(weight) for weight in quantised])
    y_PF = quantized_matmul(x_PE, packed, starts_Y=starts_of(*counts))
    assert_product(y_PF, x_PE, weights, counts)
    assert y_PF[sum(counts) :].isnan().all()


@pytest.mark.parametrize("form", [None, Form("int4", 32)], ids=str)
def test_each_expert_has_a_bias(form: Form | None) -> None:
    counts = (3, 0, 20)
    weights = [random_weight(form, NUM_OUTPUTS, NUM_INPUTS, seed) if form else random(40, 160) for seed in range(3)]
    biases_XF, x_PE = random(3, NUM_OUTPUTS, seed=5), random(23, NUM_INPUTS, seed=1)
    experts, plain = pack_experts(weights, biases_XF), pack_experts(weights)
    expected = plain(x_PE, starts_of(*counts)) + biases_XF.repeat_interleave(torch.tensor(counts), dim=0)
    torch.testing.assert_close(experts(x_PE, starts_of(*counts)), expected)
    assert experts.num_bytes == plain.num_bytes + biases_XF.nbytes


@pytest.mark.parametrize("counts", [(3, 0, 1, 2), (70, 1, 0, 120)], ids=str)
def test_as_they_are_cut_in_serving(counts: tuple[int, ...]) -> None:
    x_PE = random(sum(counts), NUM_INPUTS, seed=1).bfloat16()
    weights = [(random(NUM_OUTPUTS, NUM_INPUTS, seed=seed) / math.sqrt(NUM_INPUTS)).bfloat16() for seed in range(4)]
    y_PF = quantized_matmul(x_PE, stacked([pack(weight) for weight in weights]), starts_Y=starts_of(*counts))
    assert_product(y_PF, x_PE, weights, counts)


@pytest.mark.parametrize("form", [None, Form("e2m1", 32), Form("int4", 128), Form("int8", None)], ids=str)
@pytest.mark.parametrize("num_inputs", [2880, 1440])
def test_inputs_of_gpt_oss(form: Form | None, num_inputs: int) -> None:
    """No multiple of 128, and on two ranks none of 64; as they are cut in serving."""
    counts, weights = (
        (3, 2),
        [(random(40, num_inputs, seed=seed) / math.sqrt(num_inputs)).bfloat16() for seed in (0, 1)],
    )
    packed = [pack(weight) for weight in weights]
    if form is not None:
        quantised = [random_weight(form, 40, num_inputs, seed) for seed in (0, 1)]
        weights, packed = [dequantise(weight) for weight in quantised], [pack(weight) for weight in quantised]
    x_PE = random(5, num_inputs, seed=1).bfloat16()
    assert_product(quantized_matmul(x_PE, stacked(packed), starts_Y=starts_of(*counts)), x_PE, weights, counts)


def test_inputs_of_experts_out_of_order() -> None:
    counts, form = (5, 0, 2), Form("int4", 64, has_zeros=True)
    permutations = [torch.randperm(NUM_INPUTS, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    quantised = [
        random_weight(form, NUM_OUTPUTS, NUM_INPUTS, seed)._replace(permutation=permutation)
        for seed, permutation in enumerate(permutations)
    ]
    x_PE = random(9, NUM_INPUTS, seed=1)
    y_PF = quantized_matmul(x_PE, stacked([pack(weight) for weight in quantised]), starts_Y=starts_of(*counts))
    assert_product(y_PF, x_PE, [dequantise(weight) for weight in quantised], counts)


def test_a_row_depends_on_no_other() -> None:
    weight = stacked([pack(random(NUM_OUTPUTS, NUM_INPUTS, seed=seed)) for seed in range(3)])
    x_PE = random(40, NUM_INPUTS, seed=1)
    together = quantized_matmul(x_PE, weight, starts_Y=starts_of(20, 0, 20))
    alone = quantized_matmul(x_PE[17:23].contiguous(), weight, starts_Y=starts_of(3, 0, 3))
    assert torch.equal(alone, together[17:23])


def test_bytes_are_those_of_all_experts() -> None:
    quantised = [random_weight(Form("int4", 128, has_zeros=True), 8, 256, seed) for seed in range(3)]
    assert pack_experts(quantised).num_bytes == 3 * (8 * 128 + 8 * 2 * 4 + 8 * 2)


def test_launches_depend_on_shapes_alone() -> None:
    """Of whatever experts; nothing waits for them to be known."""
    experts = pack_experts([random(NUM_OUTPUTS, NUM_INPUTS, seed=seed) for seed in range(3)])
    x_TE, logits_TA = random(5, NUM_INPUTS), random(5, 4)
    recorded = []
    for logits in (logits_TA, logits_TA[:1].expand(5, 4).contiguous()):
        with recorded_launches() as launches:
            routes = torch_experts.route(logits, 2, normalise=True)
            pairs = sort_pairs(routes.experts, range(1, 4))
            combine(experts(x_TE[pairs.tokens], pairs.starts), pairs.places, routes.weights)
        assert not launches.operations() & WAITING_OPERATIONS
        recorded.append(launches.launches)
    assert recorded[0] == recorded[1]
    # Ten rows of three experts fill three tiles of 16 at most.
    assert ("_multiply_kernel", (3, 2, 1)) in {
        (getattr(launch[0], "__name__", ""), launch[1]) for launch in recorded[0]
    }
