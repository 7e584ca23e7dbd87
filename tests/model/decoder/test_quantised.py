"""Checkpoints that others have quantised, against transformers with the weights that theirs stand for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pdserve.kernels.selection import CPU_KERNELS, TORCH_KERNELS
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.weights.files import layer_matrices
from tests.model.checkpoints import reference_logits, write_family
from tests.model.decoder.test_decoder import TABLE, TOKENS, PagedDecoder, assert_close
from tests.model.quantised_checkpoints import FORMS, SHAPE, write_mxfp4, write_quantised

PROMPT = TOKENS[:40]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "mixtral", "qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_transformers(tmp_path: Path, family: str, form: str) -> None:
    quantised, plain = write_quantised(tmp_path, family, form, num_hidden_layers=2)
    expected = reference_logits(plain, PROMPT)
    for kernels in (CPU_KERNELS, TORCH_KERNELS):
        assert_close(PagedDecoder(quantised, torch.float32, kernels).logits((PROMPT, 0, TABLE)), expected)


@pytest.mark.parametrize("hidden_size", [64, 96])
def test_experts_in_mxfp4(tmp_path: Path, hidden_size: int) -> None:
    """Also where the inputs are no whole pairs of groups. transformers dequantises its weights to bfloat16."""
    quantised, plain = write_mxfp4(tmp_path, hidden_size=hidden_size)
    expected = reference_logits(plain, TOKENS)
    for kernels in (CPU_KERNELS, TORCH_KERNELS):
        assert_close(PagedDecoder(quantised, torch.float32, kernels).logits((TOKENS, 0, TABLE)), expected)
    decoder = PagedDecoder(quantised, torch.bfloat16)
    whole = decoder.logits((TOKENS, 0, TABLE))
    chunks = [decoder.logits((TOKENS[start : start + 33], start, TABLE)) for start in range(0, len(TOKENS), 33)]
    assert torch.equal(torch.cat(chunks), whole)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_inputs_in_another_order_in_each_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Those of one input cannot be joined as they are stored, and experts have an order each, their gate and up one."""
    modules = layer_matrices(DecoderConfig.from_folder(write_family(tmp_path, family, **SHAPE)).shape)
    is_experts_up = [".experts." in module and module.endswith("up_proj") for module in modules]
    default_rng, seeds = np.random.default_rng, iter([i - is_up for i, is_up in enumerate(is_experts_up)])
    monkeypatch.setattr(np.random, "default_rng", lambda seed: default_rng(next(seeds)))
    quantised, plain = write_quantised(tmp_path, family, "gptq-act-order")
    logits = PagedDecoder(quantised, torch.float32).logits((PROMPT, 0, TABLE))
    assert_close(logits, reference_logits(plain, PROMPT))


def test_matrices_that_are_excepted_are_multiplied_beside_others_of_their_input(tmp_path: Path) -> None:
    excepted = ["model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj"]
    quantised, plain = write_quantised(tmp_path, "llama", "awq", excepted=excepted)
    logits = PagedDecoder(quantised, torch.float32).logits((PROMPT, 0, TABLE))
    assert_close(logits, reference_logits(plain, PROMPT))
