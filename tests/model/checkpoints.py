"""Small random checkpoints of every supported family and option, and what transformers computes from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pdserve.kernels.weight_quantisation import dequantise, quantise

WINDOW = 21
"""Shorter than the prompts of tests, and no multiple of a block."""

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}

_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 211,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GEMMA: dict[str, Any] = {"num_hidden_layers": 3, "sliding_window": WINDOW, "query_pre_attn_scalar": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {"head_dim": 24},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    "gemma3_text": {**_GEMMA, "sliding_window_pattern": 3, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }},
    "mixtral": {"sliding_window": WINDOW, "num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "num_experts": 5,
        "num_experts_per_tok": 3, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80,
    },
    "qwen3_moe": {
        "head_dim": 24, "num_experts": 10, "num_experts_per_tok": 4, "moe_intermediate_size": 48,
        "num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": True,
    },
    "gpt_oss": {
        "sliding_window": WINDOW, "num_local_experts": 6, "num_experts_per_tok": 3,
        "rope_parameters": {**YARN_ROPE, "factor": 16.0, "truncate": False}, "max_position_embeddings": 1024,
    },
}  # fmt: skip
"""Each family's ``model_type``, with options by which it differs from the others."""

VARIANTS: dict[str, dict[str, Any]] = {
    "llama3-rope": {"rope_parameters": LLAMA3_ROPE},
    "linear-rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    "yarn-rope": {"rope_parameters": YARN_ROPE},
    "yarn-rope-with-options": {"rope_parameters": {
        **YARN_ROPE, "mscale": 1.5, "mscale_all_dim": 0.5, "beta_fast": 16, "beta_slow": 2, "truncate": False,
    }},
    "yarn-rope-with-a-factor": {"rope_parameters": {**YARN_ROPE, "attention_factor": 1.5}},
    "dynamic-rope-unstretched": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0}},
    "tied": {"tie_word_embeddings": True},
    "no-groups": {"num_key_value_heads": 4},
    "one-kv-head": {"num_key_value_heads": 1},
    "wide-heads": {"head_dim": 24},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "gelu": {"hidden_act": "gelu_pytorch_tanh"},
    "mistral-without-window": {"model_type": "mistral", "sliding_window": None},
    "qwen2-without-window": {"model_type": "qwen2"},
    "qwen2-layer-types": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3-biases": {"model_type": "qwen3", "attention_bias": True},
    "gemma2-uncapped": {
        "model_type": "gemma2", **_GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "tie_word_embeddings": False,
    },
    "mixtral-without-window": {"model_type": "mixtral", "num_local_experts": 4, "sliding_window": None},
    "qwen2-moe-some-layers": {
        "model_type": "qwen2_moe", **FAMILIES["qwen2_moe"], "num_hidden_layers": 4, "max_window_layers": 3,
        "decoder_sparse_step": 2, "norm_topk_prob": True, "qkv_bias": False,
    },
    "qwen3-moe-window": {
        "model_type": "qwen3_moe", **FAMILIES["qwen3_moe"], "use_sliding_window": True, "sliding_window": WINDOW,
        "norm_topk_prob": False, "attention_bias": True,
    },
    "gemma3-plain": {"model_type": "gemma3_text", **_GEMMA, "final_logit_softcapping": 5.0},
}  # fmt: skip
"""Changes to the configuration of `write_checkpoint`, whose group size is 2 and head_dim 16."""


def write_checkpoint(folder: Path, *, model_type: str = "llama", max_shard_size: str = "5GB", **changes: Any) -> Path:
    """Write config.json and safetensors of a random model whose answers vary with the prompt.

    Norms, biases and sinks are random too: as transformers makes them, they would change little.
    """
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**_SHAPE, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("bias"):
                parameter += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def write_family(folder: Path, family: str, **changes: Any) -> Path:
    """Write the checkpoint of one of `FAMILIES`, with changes to its configuration."""
    return write_checkpoint(folder, model_type=family, **{**FAMILIES[family], **changes})


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The checkpoint as transformers runs it; only its plain attention knows softcaps."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model


def rounded_reference_logits(folder: Path, tokens: list[int], quantization: str) -> torch.Tensor:
    """As `reference_logits`, of layers whose matrices are rounded as ``quantization`` rounds them."""
    model = load_reference(folder)
    for name, weight in model.named_parameters():
        if ".layers." in name and weight.dim() >= 2 and not name.endswith(("gate.weight", "router.weight", "bias")):
            is_transposed = model.config.model_type == "gpt_oss" and weight.dim() == 3
            outputs = weight.data.mT if is_transposed else weight.data
            rounded = dequantise(quantise(outputs.flatten(0, -2), quantization)).view(outputs.shape)
            weight.data = rounded.mT if is_transposed else rounded
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def reference_logits(folder: Path, tokens: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What transformers computes for a whole sequence: float32 ``[len(tokens), vocab_size]``."""
    with torch.inference_mode():
        logits: torch.Tensor = load_reference(folder, dtype)(torch.tensor([tokens])).logits[0].float()
    return logits


class Choices(NamedTuple):
    """The best token at each position of an answer."""

    tokens: list[int]
    margins: list[float]
    """By how much its logit beats the second."""
    logprobs: list[float]


def reference_choices(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> Choices:
    """What `load_reference` would choose in the place of each token of an answer, after those before it."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :].float()
    best = logits.topk(2, dim=-1)
    return Choices(
        best.indices[:, 0].tolist(),
        (best.values[:, 0] - best.values[:, 1]).tolist(),
        logits.log_softmax(dim=-1).max(dim=-1).values.tolist(),
    )
