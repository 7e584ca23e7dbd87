from __future__ import annotations

from pathlib import Path
from sys import maxsize
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from pdserve.model.config.decoder_config import DecoderConfig, parse_config
from pdserve.model.config.shape import ModelShape
from tests.model.checkpoints import FAMILIES, VARIANTS, write_checkpoint
from tests.model.planned_configs import MIXTRAL_8X7B, PUBLISHED, QWEN3_30B_A3B, QWEN_15_MOE
from tests.model.published_configs import LLAMA_31_8B, NUM_PARAMETERS


@pytest.mark.parametrize(("config", "num_parameters"), NUM_PARAMETERS, ids=lambda value: str(value)[:40])
def test_parameters_of_published_models(config: dict[str, Any], num_parameters: int) -> None:
    assert ModelShape.from_hf_config(config).num_parameters == num_parameters


@pytest.mark.parametrize(
    "changes", [{"model_type": name, **FAMILIES[name]} for name in FAMILIES] + [*VARIANTS.values()]
)
def test_parameters_are_those_of_the_checkpoint(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = write_checkpoint(tmp_path, **changes)
    with safe_open(folder / "model.safetensors", framework="np") as file:
        stored = sum(file.get_tensor(name).size for name in file.keys())  # noqa: SIM118
    assert DecoderConfig.from_folder(folder).shape.num_parameters == stored


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_kv_of_models_that_are_planned_for(name: str) -> None:
    config, num_parameters, kv_bytes_per_token = PUBLISHED[name]
    shape = ModelShape.from_hf_config(config)
    assert shape.num_parameters == num_parameters
    assert 2 * shape.kv_vectors_per_token * shape.head_dim == kv_bytes_per_token


_TINY = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 211,
    "pad_token_id": 0,
}
_GROUPED = {**_TINY, "num_key_value_heads": 2, "head_dim": 24}


_LATENT = {
    **_TINY,
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 36,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("opt", {**_TINY, "ffn_dim": 130, "max_position_embeddings": 100, "word_embed_proj_dim": 64}),
        ("opt", {**_TINY, "ffn_dim": 130, "word_embed_proj_dim": 64, "do_layer_norm_before": False}),
        ("gemma", _GROUPED),
        ("phi3", {**_GROUPED, "head_dim": 16}),
        ("deepseek_v2", {**_LATENT, "q_lora_rank": None}),
        ("deepseek_v3", _LATENT),
    ],
)
def test_parameters_are_those_that_transformers_builds(model_type: str, changes: dict[str, Any]) -> None:
    config = AutoConfig.for_model(model_type, **changes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    values = {**config.to_dict(), "architectures": [type(model).__name__]}
    assert ModelShape.from_hf_config(values).num_parameters == model.num_parameters()
    with pytest.raises(ValueError, match="is not supported; serve a checkpoint of one of"):
        parse_config(values, {})


def test_all_experts_are_held() -> None:
    shape = ModelShape.from_hf_config(MIXTRAL_8X7B)
    attention, expert, router = 2 * 4096**2 + 2 * 4096 * 1024, 3 * 4096 * 14336, 8 * 4096
    assert shape.layer_parameters == attention + router + 8 * expert
    assert shape.layer_groups(maxsize) == 4096 + 2 * 1024 + 4096 + 8 * (2 * 14336 + 4096)
    assert shape.layer_groups(128) == (shape.layer_parameters - router) / 128


def test_an_expert_for_all_tokens_has_a_gate() -> None:
    shape = ModelShape.from_hf_config(QWEN_15_MOE)
    attention, expert, shared = 4 * 2048**2, 3 * 2048 * 1408, 3 * 2048 * 5632
    assert shape.common_layer_parameters == attention + shared + 2048 + 60 * 2048
    assert shape.layer_parameters == shape.common_layer_parameters + 60 * expert
    assert shape.layer_groups(maxsize) == 4 * 2048 + 60 * (2 * 1408 + 2048) + 2 * 5632 + 2048
    assert shape.layer_groups(128) == (shape.layer_parameters - 61 * 2048) / 128
    assert shape.layer_groups(1) == shape.layer_parameters - 61 * 2048


def test_experts_have_no_biases() -> None:
    """Nor has transformers: a file with some is refused."""
    assert not ModelShape.from_hf_config({**MIXTRAL_8X7B, "mlp_bias": True}).mlp_bias


def test_layers_without_experts_are_counted_apart() -> None:
    config = {**QWEN3_30B_A3B, "decoder_sparse_step": 3, "mlp_only_layers": [2, 8]}
    shape = ModelShape.from_hf_config(config)
    assert [index for index in range(12) if index not in shape.dense_layers] == [5, 11]
    attention = shape.layer_parameters - 128 * 3 * 2048 * 768 - 128 * 2048
    assert shape.dense_layer_parameters == attention + 3 * 2048 * 6144


def test_the_last_group_of_inputs_may_be_smaller() -> None:
    shape = ModelShape(
        num_layers=1,
        hidden_size=96,
        intermediate_size=130,
        num_heads=3,
        num_kv_heads=1,
        head_dim=64,
        vocab_size=100,
    )
    assert shape.layer_groups(128) == 5 * 64 * 1 + 96 * 2 + 2 * 130 * 1 + 96 * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": 512}, "qk_nope_head_dim must be a positive integer"),
        (
            {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": 3},
            "mlp_only_layers must be a list of layers",
        ),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok 5 is more than its 4 experts"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is not 1"),
        ({"word_embed_proj_dim": 512}, "word_embed_proj_dim 512 is not hidden_size 4096"),
    ],
)
def test_layers_that_no_formula_counts_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelShape.from_hf_config({**LLAMA_31_8B, **changes})


def test_an_unknown_architecture_counts_as_llamas() -> None:
    stranger = {**LLAMA_31_8B, "architectures": ["StrangerForCausalLM"]}
    assert ModelShape.from_hf_config(stranger) == ModelShape.from_hf_config(LLAMA_31_8B)


def test_a_count_may_be_written_as_a_float() -> None:
    written = {**LLAMA_31_8B, "num_hidden_layers": 32.0}
    assert ModelShape.from_hf_config(written) == ModelShape.from_hf_config(LLAMA_31_8B)


@pytest.mark.parametrize("value", [None, 0, "32", -1, True, 32.5, float("inf")])
def test_a_config_without_a_count_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="num_hidden_layers must be a positive integer"):
        ModelShape.from_hf_config({**LLAMA_31_8B, "num_hidden_layers": value})
