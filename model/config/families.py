"""Differences of each architecture from Llama that its config.json does not state.

A table for `pdserve.model.config.shape` and `pdserve.model.config.decoder_config`; no other module asks for an
architecture by name. Never imports torch.

Sources: Touvron et al. 2023 (LLaMA); Jiang et al. 2023 (Mistral 7B); Qwen team 2024, 2025 (Qwen2, Qwen3); Gemma team
2024, 2025 (Gemma to Gemma 3); Zhang et al. 2022 (OPT); Jiang et al. 2024 (Mixtral); OpenAI 2025 (gpt-oss); the
configuration classes of transformers for defaults.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

FULL, SLIDING = "full_attention", "sliding_attention"
"""Layer types, as config.json names them."""


def _all_full(values: Mapping[str, object], num_layers: int) -> list[str]:
    return [FULL] * num_layers


def _all_sliding(values: Mapping[str, object], num_layers: int) -> list[str]:
    has_windows = values.get("use_sliding_window", True) and values.get("sliding_window")
    return [SLIDING if has_windows else FULL] * num_layers


def _upper_sliding(values: Mapping[str, object], num_layers: int) -> list[str]:
    """Layers from ``max_window_layers`` on have a window if ``use_sliding_window`` is set."""
    first = values.get("max_window_layers")
    has_windows = values.get("use_sliding_window") and values.get("sliding_window")
    return [SLIDING if has_windows and isinstance(first, int) and i >= first else FULL for i in range(num_layers)]


def _lower_alternating(values: Mapping[str, object], num_layers: int) -> list[str]:
    """Every other layer below ``max_window_layers`` has a window if ``use_sliding_window`` is set."""
    num_lower = values.get("max_window_layers") if values.get("use_sliding_window") else 0
    return [SLIDING if isinstance(num_lower, int) and i < num_lower and not i % 2 else FULL for i in range(num_layers)]


def _alternating(values: Mapping[str, object], num_layers: int) -> list[str]:
    """The last of every ``sliding_window_pattern`` layers has full attention."""
    pattern = values.get("sliding_window_pattern")
    if not isinstance(pattern, int) or pattern <= 0:
        raise ValueError(f"config.json: sliding_window_pattern must be a positive integer, not {pattern!r}")
    return [SLIDING if (i + 1) % pattern else FULL for i in range(num_layers)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture. The default is Llama."""

    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values of keys that config.json may omit."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Values of keys that can be served; config.json may omit them."""
    refused: tuple[str, ...] = ()
    """Keys that must not be set: their meaning is unclear in this family."""
    layer_types: Callable[[Mapping[str, object], int], list[str]] = _all_full
    """Default of ``layer_types``, from the values of config.json and the number of layers."""
    qkv_bias: bool = False
    """Queries, keys and values have a bias and the output has none, regardless of ``attention_bias``."""
    qk_norm: bool = False
    """Query and key heads are normalised before rotation."""
    post_norms: bool = False
    """Outputs of attention and MLP are normalised before they are added to the residual stream."""
    unit_offset_norms: bool = False
    """Norm weights are stored as their difference from 1."""
    scaled_embeddings: bool = False
    """Embeddings are scaled by the square root of the hidden size."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Llama's keys, and this family's names for them in config.json."""
    gated_mlp: bool = True
    """The MLP has a gate; otherwise it has two matrices."""
    has_biases: bool = False
    """Every projection and norm has a bias."""
    text_type: str = ""
    """``model_type`` of the language model of a multimodal one, in its ``text_config``; other ones are refused."""
    sinks: bool = False
    """The softmax of each query head has one more score, a weight of the model, that belongs to no token."""
    stacked_experts: bool = False
    """A layer's experts are stacked in one tensor, transposed, their gates and ups in turns; they and the router have
    biases, and weights of a token's experts are the softmax of their scores alone."""
    activation: str = ""
    """Activation of the gate, where it is not that of ``hidden_act``."""
    extra_positions: int | None = None
    """Rows of the learned position table beyond ``max_position_embeddings``; None without such a table."""


_QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA_2 = Family(
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
    },
    refused=("use_bidirectional_attention",),
    layer_types=_alternating,
    post_norms=True,
    unit_offset_norms=True,
    scaled_embeddings=True,
)
_GEMMA_3 = replace(
    _GEMMA_2,
    defaults={
        **_GEMMA_2.defaults,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    # transformers reads attn_logit_softcapping and does not use it; no published checkpoint sets it.
    refused=(*_GEMMA_2.refused, "attn_logit_softcapping"),
    qk_norm=True,
)
_GEMMA_3_TEXT = {"num_attention_heads": 8, "vocab_size": 262208, "max_position_embeddings": 131072}
_MISTRAL = Family(
    defaults={"num_key_value_heads": 8, "sliding_window": 4096}, refused=("layer_types",), layer_types=_all_sliding
)
_QWEN_2 = Family(defaults=_QWEN_DEFAULTS, layer_types=_upper_sliding, qkv_bias=True)
_QWEN_3 = Family(defaults={**_QWEN_DEFAULTS, "head_dim": 128}, layer_types=_upper_sliding, qk_norm=True)
_ROUTED = {"intermediate_size": "moe_intermediate_size", "dense_intermediate_size": "intermediate_size"}
FAMILIES = {
    "LlamaForCausalLM": Family(refused=("layer_types",)),
    "MistralForCausalLM": _MISTRAL,
    "Qwen2ForCausalLM": _QWEN_2,
    "Qwen3ForCausalLM": _QWEN_3,
    "MixtralForCausalLM": replace(
        _MISTRAL,
        defaults={
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
        },
    ),
    "Qwen2MoeForCausalLM": Family(
        defaults={
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        layer_types=_lower_alternating,
        renamed=_ROUTED,
        qkv_bias=True,
    ),
    "Qwen3MoeForCausalLM": Family(
        defaults={
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "use_sliding_window": False,
            "sliding_window": 4096,
        },
        refused=("layer_types",),
        layer_types=_all_sliding,
        renamed=_ROUTED,
        qk_norm=True,
    ),
    "GptOssForCausalLM": Family(
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "attention_bias": True,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "default_rope": {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        layer_types=_alternating,
        fixed={"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        sinks=True,
        stacked_experts=True,
        activation="swiglu_oai",
    ),
    "Gemma2ForCausalLM": _GEMMA_2,
    "Gemma3ForCausalLM": _GEMMA_3,
    "Gemma3ForConditionalGeneration": replace(
        _GEMMA_3, defaults={**_GEMMA_3.defaults, **_GEMMA_3_TEXT}, text_type="gemma3_text"
    ),
    "Mistral3ForConditionalGeneration": replace(_MISTRAL, text_type="mistral"),
    # Of text alone, the three positions of a token are one, and mrope is plain rope (Wang et al. 2024, Qwen2-VL).
    "Qwen2VLForConditionalGeneration": replace(_QWEN_2, text_type="qwen2_vl_text"),
    "Qwen2_5_VLForConditionalGeneration": replace(_QWEN_2, text_type="qwen2_5_vl_text"),
    "Qwen3VLForConditionalGeneration": replace(_QWEN_3, text_type="qwen3_vl_text"),
}
"""Architectures that can be served, by their name in config.json; of multimodal ones, the language model."""

_DEEPSEEK = Family(renamed=_ROUTED)
PLANNED_FAMILIES = {
    "OPTForCausalLM": Family(
        defaults={"tie_word_embeddings": True, "do_layer_norm_before": True},
        renamed={"intermediate_size": "ffn_dim"},
        gated_mlp=False,
        has_biases=True,
        extra_positions=2,
    ),
    "GemmaForCausalLM": Family(defaults={"head_dim": 256, "tie_word_embeddings": True}),
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "Phi3ForCausalLM": Family(layer_types=_all_sliding),
}
"""Architectures that can be planned for but not served yet."""

MIXTRAL_PROJECTIONS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
"""Names of an expert's matrices in checkpoints of Mixtral, under ``block_sparse_moe``."""
_ROUTER_OR_EXPERT = re.compile(r"\.mlp\.(gate(?=\.|$)|experts\.\d+)(?:\.(\w+_proj))?")


def mixtral_name(name: str) -> str:
    """Name in checkpoints of Mixtral of a tensor or module that Qwen's have under ``mlp``: of routers and experts."""

    def renamed(found: re.Match[str]) -> str:
        return f".block_sparse_moe.{found[1]}" + (f".{MIXTRAL_PROJECTIONS[found[2]]}" if found[2] else "")

    return _ROUTER_OR_EXPERT.sub(renamed, name)


def text_values(config: Mapping[str, object], family: Family) -> dict[str, object]:
    """Values of config.json over the family's defaults; of a multimodal model, those of its language model."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return {**family.defaults, **config}
    return {**family.defaults, **text, **{key: config[key] for key in ("tie_word_embeddings",) if key in config}}


def find_family(config: Mapping[str, object], families: Mapping[str, Family]) -> Family | None:
    """Return the family of the first of config.json's architectures that is in ``families``."""
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    return next((families[name] for name in names if isinstance(name, str) and name in families), None)
