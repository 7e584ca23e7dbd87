"""Routing as transformers does it, and experts of every implementation against float64."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from pdserve.kernels.operations import DecoderKernels
from pdserve.kernels.selection import CPU_KERNELS, TORCH_KERNELS
from pdserve.kernels.torch.experts import route, sort_pairs
from pdserve.kernels.weight_quantisation import GroupedWeight, quantise
from tests.kernels.random_tensors import random

both_kernels = pytest.mark.parametrize("kernels", [CPU_KERNELS, TORCH_KERNELS], ids=["cpu", "torch"])
NUM_EXPERTS, PER_TOKEN = 12, 3


def routers(normalises: bool) -> Any:
    sizes = {"hidden_size": NUM_EXPERTS, "num_experts_per_tok": PER_TOKEN}
    if normalises:
        yield MixtralTopKRouter(MixtralConfig(num_local_experts=NUM_EXPERTS, **sizes))
    yield Qwen3MoeTopKRouter(Qwen3MoeConfig(num_experts=NUM_EXPERTS, norm_topk_prob=normalises, **sizes))


@pytest.mark.parametrize("normalises", [False, True])
def test_routing_is_that_of_transformers(normalises: bool) -> None:
    """Of rows half of which have ties."""
    logits_TA = random(10**4 if normalises else 10**6, NUM_EXPERTS)
    logits_TA[::2] = (2 * logits_TA[::2]).round()
    experts_TK, weights_TK = route(logits_TA, PER_TOKEN, normalise=normalises)
    for router in routers(normalises):
        router.weight.data = torch.eye(NUM_EXPERTS)
        with torch.inference_mode():
            _, expected_TK, ids_TK = router(logits_TA)
        assert torch.equal(weights_TK, expected_TK)
        # It leaves the order of ties open.
        probabilities_TA = logits_TA.softmax(dim=1)
        assert torch.equal(probabilities_TA.gather(1, experts_TK), probabilities_TA.gather(1, ids_TK))
    lowest_TA = np.argsort(-probabilities_TA.numpy(), axis=1, kind="stable")
    assert np.array_equal(experts_TK.numpy(), lowest_TA[:, :PER_TOKEN])


def test_routing_by_the_softmax_of_the_chosen_is_that_of_transformers() -> None:
    """Of rows half of which have ties."""
    logits_TA = random(10**6, NUM_EXPERTS)
    logits_TA[::2] = (2 * logits_TA[::2]).round()
    config = GptOssConfig(hidden_size=NUM_EXPERTS, num_local_experts=NUM_EXPERTS, num_experts_per_tok=PER_TOKEN)
    router = GptOssTopKRouter(config)
    router.weight.data = torch.eye(NUM_EXPERTS)
    experts_TK, weights_TK = route(logits_TA, PER_TOKEN, of_chosen=True)
    with torch.inference_mode():
        _, expected_TK, ids_TK = router(logits_TA)
    assert torch.equal(weights_TK, expected_TK)
    assert torch.equal(logits_TA.gather(1, experts_TK), logits_TA.gather(1, ids_TK))  # ties in any order
    lowest_TA = np.argsort(-logits_TA.numpy(), axis=1, kind="stable")
    assert np.array_equal(experts_TK.numpy(), lowest_TA[:, :PER_TOKEN])


def test_logits_whose_probabilities_are_one_are_told_apart() -> None:
    logits_TA = torch.tensor([[1.0, 1.0 + 2**-23, 0.0]])
    assert route(logits_TA, 1, of_chosen=True).experts.tolist() == [[1]]
    assert route(torch.tensor([[-200.0, -100.0, 100.0]]), 2, of_chosen=True).experts.tolist() == [[2, 1]]


def test_pairs_are_sorted_by_expert_and_token() -> None:
    experts_TK = torch.tensor([[4, 1], [1, 0], [5, 4]])
    pairs = sort_pairs(experts_TK, range(6))
    assert pairs.tokens.tolist() == [1, 0, 1, 0, 2, 2]
    assert pairs.starts.tolist() == [0, 1, 3, 3, 3, 5, 6]
    assert pairs.places.tolist() == [[3, 1], [2, 0], [5, 4]]
    here = sort_pairs(experts_TK, range(1, 5))
    assert here.tokens[:4].tolist() == [0, 1, 0, 2]
    assert here.starts.tolist() == [0, 2, 2, 2, 4]
    assert here.places.tolist() == [[2, 0], [1, -1], [-1, 3]]


@both_kernels
def test_results_are_summed_in_the_order_of_the_experts_of_a_token(kernels: DecoderKernels) -> None:
    """The first two add up to nothing, in which the third would be lost."""
    y_PE = torch.tensor([[1.0], [torch.nan], [2**30], [-(2**30)]]).repeat(1, 37)
    weights_TK = torch.tensor([[0.5, 0.5, 3.0], [0.5, 3.0, 0.5], [1.0, 1.0, 1.0]])
    places_TK = torch.tensor([[2, 3, 0], [2, 0, 3], [-1, 0, -1]])
    assert kernels.combine(y_PE, places_TK, weights_TK).tolist() == [[value] * 37 for value in (3.0, 0.0, 1.0)]


def experts_of(
    kernels: DecoderKernels, weights_XFE: torch.Tensor, x_TE: torch.Tensor, logits_TA: torch.Tensor, here: range
) -> torch.Tensor:
    """What ``here`` add to the sum of each token's experts."""
    experts_TK, weights_TK = route(logits_TA, PER_TOKEN, normalise=True)
    pairs = kernels.sort_pairs(experts_TK, here)
    experts = kernels.pack_experts(weights_XFE[here.start : here.stop])
    y_TE = kernels.combine(experts(x_TE[pairs.tokens], pairs.starts), pairs.places, weights_TK)
    assert y_TE.is_contiguous()
    return y_TE


@both_kernels
@pytest.mark.parametrize("num_tokens", [1, 2, 70])
def test_experts_compute_what_dense_products_do(kernels: DecoderKernels, num_tokens: int) -> None:
    weights_XFE, x_TE = random(NUM_EXPERTS, 40, 64) / 8, random(num_tokens, 64)
    logits_TA = random(num_tokens, NUM_EXPERTS, seed=1)
    top = logits_TA.double().softmax(dim=1).topk(PER_TOKEN)
    every_TAF = torch.einsum("te,afe->taf", x_TE.double(), weights_XFE.double())
    for here in (range(NUM_EXPERTS), range(3, 7)):
        weights_TK = top.values / top.values.sum(dim=1, keepdim=True)
        weights_TK = weights_TK * ((top.indices >= here.start) & (top.indices < here.stop))
        expected = torch.einsum("tk,tkf->tf", weights_TK, every_TAF[torch.arange(num_tokens)[:, None], top.indices])
        actual = experts_of(kernels, weights_XFE, x_TE, logits_TA, here)
        torch.testing.assert_close(actual.double(), expected, atol=2e-5, rtol=2e-5)


@both_kernels
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_each_expert_has_a_bias(kernels: DecoderKernels, quantization: str | None) -> None:
    weights_XFE, biases_XF, x_PE = random(3, 40, 64) / 8, random(3, 40, seed=1), random(70, 64, seed=2)
    weights = [quantise(weight, quantization) if quantization else weight for weight in weights_XFE]
    experts, plain = kernels.pack_experts(weights, biases_XF), kernels.pack_experts(weights)
    starts_Y = torch.tensor([0, 5, 5, 70])
    expected = plain(x_PE, starts_Y) + biases_XF.repeat_interleave(starts_Y.diff(), dim=0)
    torch.testing.assert_close(experts(x_PE, starts_Y), expected, atol=1e-6, rtol=1e-5)
    assert experts.num_bytes == plain.num_bytes + biases_XF.nbytes


def test_a_token_depends_on_no_other() -> None:
    weights_XFE, x_TE = (random(NUM_EXPERTS, 40, 64) / 8).bfloat16(), random(90, 64)
    logits_TA = random(90, NUM_EXPERTS, seed=1)
    together = experts_of(CPU_KERNELS, weights_XFE, x_TE, logits_TA, range(NUM_EXPERTS))
    for part in (slice(0, 1), slice(1, 3), slice(2, 9), slice(9, 90)):
        alone = experts_of(CPU_KERNELS, weights_XFE, x_TE[part], logits_TA[part], range(NUM_EXPERTS))
        assert torch.equal(alone, together[part])


@both_kernels
def test_an_expert_is_packed_before_the_next_is_read(kernels: DecoderKernels) -> None:
    taken: list[weakref.ref[torch.Tensor]] = []

    def weights() -> Iterator[GroupedWeight]:
        for seed in range(4):
            assert sum(values() is not None for values in taken) <= 1  # the last one
            weight = quantise(random(20, 16, seed=seed), "int8")
            taken.append(weakref.ref(weight.values))
            yield weight
            del weight

    assert kernels.pack_experts(weights()).num_bytes >= 4 * 20 * 16
    assert len(taken) == 4


def test_experts_have_one_form() -> None:
    """C++ takes that of the first for all."""
    weight = quantise(random(20, 16), "int8")
    permuted = weight._replace(permutation=torch.arange(16))
    for other in (random(20, 16), quantise(random(20, 16), "int4"), random(24, 16), permuted):
        with pytest.raises(AssertionError):
            CPU_KERNELS.pack_experts([weight, other])
