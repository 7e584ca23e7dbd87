from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdserve.model.config.decoder_config import DecoderConfig, LayerConfig, parse_config
from pdserve.model.config.rope_config import RopeConfig
from tests.model.published_configs import (
    GEMMA_2_9B,
    GEMMA_3_1B,
    GPT_OSS_20B,
    GPT_OSS_120B,
    LLAMA_31_8B,
    MISTRAL_7B,
    PRUNED_AND_DISTILLED,
    QWEN2_7B,
    QWEN3_8B,
)


def windows(config: dict[str, Any]) -> list[int]:
    return [layer.window for layer in parse_config(config, {}).layers]


def test_llama() -> None:
    config = parse_config(LLAMA_31_8B, {"eos_token_id": [128001, 128008, 128009]})
    rope = RopeConfig(
        theta=500000.0, type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, trained_length=8192
    )
    assert config.layers == (LayerConfig(window=0, rope=rope),) * 32
    assert config.shape.head_dim == 128
    assert config.attention_scale == pytest.approx(128**-0.5)
    assert (config.activation, config.embedding_scale, config.unit_offset_norms) == ("silu", 1.0, False)
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert config.shape.num_parameters == 8_030_261_248


@pytest.mark.parametrize(("values", "num_parameters"), PRUNED_AND_DISTILLED, ids=lambda value: str(value)[:9])
def test_pruned_and_distilled_checkpoints_are_of_known_families(values: dict[str, Any], num_parameters: int) -> None:
    """Pruning leaves dense matrices of other sizes, and heads wider than the hidden size divided by their number."""
    config = parse_config(values, {})
    assert config.shape.num_parameters == num_parameters
    assert config.limits(0).max_model_len == 131072
    assert not config.shape.windows


def test_the_oldest_configs_leave_defaults_out() -> None:
    later = ("num_key_value_heads", "rms_norm_eps", "rope_theta", "eos_token_id")
    oldest = {key: value for key, value in LLAMA_31_8B.items() if key not in later}
    config = parse_config({**oldest, "rope_scaling": None}, {})
    assert config.shape.num_kv_heads == 32
    assert config.layers[0].rope == RopeConfig(theta=10000.0)
    assert config.rms_norm_eps == 1e-6
    assert config.eos_token_ids == ()
    assert not config.shape.tie_word_embeddings


def test_a_call_ends_answers_of_the_harmony_format_whatever_is_listed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_31_8B, "eos_token_id": 5}))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|return|>"}')
    ids = {"<|return|>": 5, "<|channel|>": 6, "<|call|>": 7, "<|end|>": 8}
    for vocab, expected in ((ids, (5, 7)), ({"<|return|>": 5, "<|call|>": 7}, (5,)), ({}, (5,))):
        (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
        assert DecoderConfig.from_folder(tmp_path).eos_token_ids == expected


def test_mistral() -> None:
    assert windows(MISTRAL_7B) == [4096] * 32
    assert windows({**MISTRAL_7B, "sliding_window": None}) == [0] * 32
    unsaid = {key: value for key, value in MISTRAL_7B.items() if key != "sliding_window"}
    assert windows(unsaid) == [4096] * 32


@pytest.mark.parametrize("config", [QWEN2_7B, QWEN3_8B])
def test_qwen(config: dict[str, Any]) -> None:
    num_layers = config["num_hidden_layers"]
    assert windows(config) == [0] * num_layers
    windowed = {**config, "use_sliding_window": True, "sliding_window": 1024}
    assert windows({**windowed, "max_window_layers": 20}) == [0] * 20 + [1024] * (num_layers - 20)
    types = ["sliding_attention", *["full_attention"] * (num_layers - 1)]
    assert windows({**windowed, "layer_types": types}) == [1024] + [0] * (num_layers - 1)
    with pytest.raises(ValueError, match="use_sliding_window is false"):
        parse_config({**config, "layer_types": types}, {})


def test_only_queries_keys_and_values_of_qwen2_have_a_bias() -> None:
    shape = parse_config({**QWEN2_7B, "attention_bias": True}, {}).shape
    assert (shape.qkv_bias, shape.output_bias, shape.qk_norm) == (True, False, False)
    shape = parse_config(QWEN3_8B, {}).shape
    assert (shape.qkv_bias, shape.output_bias, shape.qk_norm) == (False, False, True)


def test_qwen3_has_heads_of_its_own_width() -> None:
    unsaid = {key: value for key, value in QWEN3_8B.items() if key != "head_dim"}
    assert parse_config({**unsaid, "hidden_size": 2048}, {}).shape.head_dim == 128


def test_gemma_2() -> None:
    config = parse_config({**GEMMA_2_9B, "query_pre_attn_scalar": 224}, {})
    assert windows(GEMMA_2_9B) == [4096, 0] * 21
    assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)
    assert config.attention_scale == pytest.approx(224**-0.5)
    assert config.embedding_scale == pytest.approx(3584**0.5)
    assert (config.activation, config.unit_offset_norms) == ("gelu_tanh", True)
    assert config.shape.tie_word_embeddings
    uncapped = parse_config({**GEMMA_2_9B, "attn_logit_softcapping": None, "final_logit_softcapping": None}, {})
    assert (uncapped.attention_softcap, uncapped.logit_softcap) == (0.0, 0.0)


def test_gemma_3() -> None:
    config = parse_config(GEMMA_3_1B, {})
    period = [512] * 5 + [0]
    assert [layer.window for layer in config.layers] == period * 4 + [512] * 2
    assert {layer.rope.theta for layer in config.layers if layer.window} == {10000.0}
    assert {layer.rope.theta for layer in config.layers if not layer.window} == {1000000.0}
    assert (config.attention_softcap, config.logit_softcap) == (0.0, 0.0)
    scaled = parse_config({**GEMMA_3_1B, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, {})
    assert scaled.max_context_length == 32768


@pytest.mark.parametrize("config", [GPT_OSS_20B, GPT_OSS_120B], ids=["20b", "120b"])
def test_gpt_oss(config: dict[str, Any]) -> None:
    parsed = parse_config(config, {"eos_token_id": [200002, 199999, 200012]})
    assert windows(config) == [128, 0] * (config["num_hidden_layers"] // 2)
    assert windows({**config, "layer_types": None}) == windows(config)
    rope = RopeConfig(
        theta=150000.0,
        type="yarn",
        factor=32.0,
        trained_length=4096,
        attention_factor=0.1 * math.log(32) + 1,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=False,
    )
    assert {layer.rope for layer in parsed.layers} == {parsed.layers[0].rope}
    assert parsed.layers[0].rope == rope
    unsaid = {key: value for key, value in config.items() if not key.startswith("rope")}
    assert parse_config(unsaid, {}).layers == parsed.layers
    assert parsed.max_context_length == 131072
    assert (parsed.activation, parsed.softmax_of_chosen, parsed.normalise_experts) == ("swiglu_oai", True, False)
    shape = parsed.shape
    assert (shape.sinks, shape.stacked_experts, shape.qkv_bias, shape.output_bias) == (True, True, True, True)
    assert (shape.num_experts, shape.experts_per_token) == (config["num_local_experts"], 4)
    assert parsed.eos_token_ids == (200002, 199999, 200012)


def test_limits_and_layout() -> None:
    config = parse_config(LLAMA_31_8B, {})
    assert config.limits(0).max_model_len == 131072
    limits = config.limits(4096)
    assert (limits.max_model_len, limits.vocab_size, limits.eos_token_ids) == (4096, 128256, (128001,))
    with pytest.raises(ValueError, match="131072 or less"):
        config.limits(131073)
    layout = config.kv_layout(10, 16, "bfloat16", "abc")
    assert layout.shape == (10, 8, 32, 2, 16, 128)
    assert (layout.dtype, layout.model_hash) == ("bfloat16", "abc")


def test_rope_scaling_extends_what_is_allowed() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = parse_config({**QWEN2_7B, "rope_scaling": yarn}, {})
    assert config.limits(0).max_model_len == 131072
    with pytest.raises(ValueError, match=r"max_model_len 131073.*rope scaling"):
        config.limits(131073)


def test_dynamic_rope_is_of_the_deployments_length() -> None:
    config = parse_config({**LLAMA_31_8B, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, {})
    short, long = config.at_length(131072), config.at_length(200000)
    assert short.layers != long.layers
    assert config.at_length(262144) == config
    plain = parse_config(LLAMA_31_8B, {})
    assert plain.at_length(1000) == plain


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (
            LLAMA_31_8B,
            {"architectures": ["Phi3ForCausalLM"]},
            "Phi3.*LlamaForCausalLM, Mistral.*Gemma3ForCausalLM",
        ),
        (LLAMA_31_8B, {"architectures": None}, "LlamaForCausalLM"),
        (LLAMA_31_8B, {"quantization_config": {"quant_method": "gguf"}}, "quantization_config.quant_method"),
        (LLAMA_31_8B, {"layer_types": ["sliding_attention"] * 32}, "layer_types is set"),
        (LLAMA_31_8B, {"hidden_act": "gelu"}, "'gelu' is not supported.*silu, gelu_pytorch_tanh"),
        (LLAMA_31_8B, {"rope_scaling": {"type": "longrope"}}, "longrope"),
        (LLAMA_31_8B, {"hidden_size": None}, "hidden_size"),
        (
            LLAMA_31_8B,
            {"quantization_config": {"quant_method": "mxfp4"}},
            "MXFP4.*Llama.*of another format, or one in 16",
        ),
        (GPT_OSS_20B, {"quantization_config": {"quant_method": "fp8"}}, "FP8.*GptOss.*in mxfp4, or one in 16 bits"),
        (GPT_OSS_20B, {"hidden_size": 2888}, "hidden_size 2888 is no multiple of the 32 .* serve a checkpoint in 16"),
        (
            GPT_OSS_20B,
            {"swiglu_limit": 5.0},
            "swiglu_limit 5.0 is not supported; serve a checkpoint in which it is 7.0",
        ),
        (GPT_OSS_20B, {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        (LLAMA_31_8B, {"num_hidden_layers": -1}, "num_hidden_layers"),
        (LLAMA_31_8B, {"num_key_value_heads": 5}, "num_key_value_heads 5"),
        (LLAMA_31_8B, {"head_dim": 15}, "head_dim 15"),
        (LLAMA_31_8B, {"rms_norm_eps": 0}, "rms_norm_eps"),
        (LLAMA_31_8B, {"eos_token_id": "</s>"}, "eos_token_id"),
        (MISTRAL_7B, {"layer_types": ["full_attention"] * 32}, "layer_types is set"),
        (MISTRAL_7B, {"sliding_window": -1}, "sliding_window"),
        (QWEN2_7B, {"layer_types": ["full_attention"] * 27}, "not a list of 28 types"),
        (QWEN2_7B, {"layer_types": "full_attention"}, "not a list of 28 types"),
        (QWEN3_8B, {"layer_types": ["full_attention"] * 35 + ["chunked_attention"]}, "'chunked_attention'.*sliding"),
        (GEMMA_2_9B, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA_2_9B, {"sliding_window": None}, "sliding_window"),
        (GEMMA_2_9B, {"final_logit_softcapping": "30"}, "final_logit_softcapping"),
        (GEMMA_3_1B, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (GEMMA_3_1B, {"sliding_window_pattern": 0}, "sliding_window_pattern"),
    ],
)
def test_what_is_not_supported_is_named(config: dict[str, Any], change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config({**config, **change}, {})


def test_a_folder_without_a_readable_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json.*Hugging Face"):
        DecoderConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        DecoderConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="not a JSON object"):
        DecoderConfig.from_folder(tmp_path)


def test_reading_a_configuration_imports_no_torch() -> None:
    program = "import sys, pdserve.model.config.decoder_config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
