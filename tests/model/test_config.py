from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from pdserve.model.config import DecoderConfig, Llama3RopeScaling, parse_config
from tests.model.checkpoints import LLAMA3_ROPE, VARIANTS, write_checkpoint

LLAMA_31_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "eos_token_id": 128001,
}


def test_a_config_of_older_transformers() -> None:
    config = parse_config(LLAMA_31_8B, {"eos_token_id": [128001, 128008, 128009]})
    assert config.head_dim == 128
    assert config.group_size == 4
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == Llama3RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert config.num_parameters == 8_030_261_248
    assert config.weight_bytes("bfloat16") == 2 * 8_030_261_248


def test_a_config_of_newer_transformers_says_the_same() -> None:
    newer = {key: value for key, value in LLAMA_31_8B.items() if key not in ("rope_theta", "rope_scaling")}
    newer["rope_parameters"] = {**LLAMA_31_8B["rope_scaling"], "rope_theta": 500000.0}
    assert parse_config(newer, {}) == parse_config(LLAMA_31_8B, {})


def test_the_oldest_configs_leave_defaults_out() -> None:
    later = ("num_key_value_heads", "rms_norm_eps", "rope_theta", "eos_token_id")
    oldest = {key: value for key, value in LLAMA_31_8B.items() if key not in later}
    config = parse_config({**oldest, "rope_scaling": None}, {})
    assert config.num_kv_heads == 32
    assert (config.rope_theta, config.rope_scaling) == (10000.0, None)
    assert config.rms_norm_eps == 1e-6
    assert config.eos_token_ids == ()
    assert not config.tie_word_embeddings


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_are_those_of_the_checkpoint(tmp_path: Path, variant: str) -> None:
    folder = write_checkpoint(tmp_path, **VARIANTS[variant])
    with safe_open(folder / "model.safetensors", framework="np") as file:
        stored = sum(file.get_tensor(name).size for name in file.keys())  # noqa: SIM118
    config = DecoderConfig.from_folder(folder)
    assert config.num_parameters == stored
    assert config.eos_token_ids == (2,)
    assert (config.rope_scaling is not None) == (variant == "llama3-rope")


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM.*LlamaForCausalLM"),
        ({"architectures": None}, "LlamaForCausalLM"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "'yarn'.*'default' and 'llama3'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {**LLAMA3_ROPE, "factor": None}}, "factor"),
        ({"rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_parameters": ["llama3"]}, "rope_parameters"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_key_value_heads": 5}, "num_key_value_heads 5"),
        ({"head_dim": 15}, "head_dim 15"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config({**LLAMA_31_8B, **change}, {})


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
    program = "import sys, pdserve.model.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
