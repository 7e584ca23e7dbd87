"""What config.json of published checkpoints says that can be planned for, as far as a shape depends on it."""

from __future__ import annotations

from typing import Any, NamedTuple


def _llama(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
    }


def _opt(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "architectures": ["OPTForCausalLM"],
        "hidden_size": hidden,
        "ffn_dim": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": hidden,
        "do_layer_norm_before": True,
    }


class Published(NamedTuple):
    config: dict[str, Any]
    num_parameters: int
    kv_bytes_per_token: int
    """In half precision."""


LLAMA_2_7B = _llama(4096, 11008, 32, 32, 32, 32000)
LLAMA_2_70B = _llama(8192, 28672, 80, 64, 8, 32000)
LLAMA_3_8B = _llama(4096, 14336, 32, 32, 8, 128256)
LLAMA_3_70B = _llama(8192, 28672, 80, 64, 8, 128256)
OPT_13B, OPT_66B, OPT_175B = _opt(5120, 40, 40), _opt(9216, 64, 72), _opt(12288, 96, 96)
MIXTRAL_8X7B = {
    **_llama(4096, 14336, 32, 32, 8, 32000),
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN3_32B = {**_llama(5120, 25600, 64, 64, 8, 151936), "architectures": ["Qwen3ForCausalLM"], "head_dim": 128}
QWEN3_30B_A3B = {
    **_llama(2048, 6144, 48, 32, 4, 151936),
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 128,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
QWEN_15_MOE = {
    **_llama(2048, 5632, 24, 16, 16, 151936),
    "architectures": ["Qwen2MoeForCausalLM"],
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts": 60,
    "num_experts_per_tok": 4,
}
PHI_3_MINI = {**_llama(3072, 8192, 32, 32, 32, 32064), "architectures": ["Phi3ForCausalLM"]}
GEMMA_7B = {**_llama(3072, 24576, 28, 16, 16, 256000), "architectures": ["GemmaForCausalLM"], "head_dim": 256}
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
}
DEEPSEEK_V3 = {
    **_llama(7168, 18432, 61, 128, 128, 129280),
    "architectures": ["DeepseekV3ForCausalLM"],
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
}
DEEPSEEK_V2_LITE = {
    **DEEPSEEK_V3,
    **_llama(2048, 10944, 27, 16, 16, 102400),
    "architectures": ["DeepseekV2ForCausalLM"],
    "q_lora_rank": None,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
}
GEMMA_3_27B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
    },
}
PUBLISHED = {
    "llama-2-7b": Published(LLAMA_2_7B, 6_738_415_616, 524_288),
    "llama-2-70b": Published(LLAMA_2_70B, 68_976_648_192, 327_680),
    "llama-3-8b": Published(LLAMA_3_8B, 8_030_261_248, 131_072),
    "llama-3-70b": Published(LLAMA_3_70B, 70_553_706_496, 327_680),
    "opt-13b": Published(OPT_13B, 12_853_473_280, 819_200),
    "opt-66b": Published(OPT_66B, 65_719_701_504, 2_359_296),
    "opt-175b": Published(OPT_175B, 174_604_468_224, 4_718_592),
    "mixtral-8x7b": Published(MIXTRAL_8X7B, 46_702_792_704, 131_072),
    "qwen3-32b": Published(QWEN3_32B, 32_762_123_264, 262_144),
    "qwen3-30b-a3b": Published(QWEN3_30B_A3B, 30_532_122_624, 98_304),
    "qwen1.5-moe-a2.7b": Published(QWEN_15_MOE, 14_315_784_192, 196_608),
    "phi-3-mini": Published(PHI_3_MINI, 3_821_079_552, 393_216),
    "gemma-7b": Published(GEMMA_7B, 8_537_680_896, 458_752),
    "gemma-3-4b": Published(GEMMA_3_4B, 3_880_263_168, 139_264),
    "deepseek-v2-lite": Published(DEEPSEEK_V2_LITE, 15_706_484_224, 31_104),
    "deepseek-v3": Published(DEEPSEEK_V3, 671_026_404_352, 70_272),
}
"""Parameters as transformers counts them when it builds the model; of gemma-3-4b, those of the language model."""
