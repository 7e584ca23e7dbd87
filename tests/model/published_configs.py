"""What config.json of published checkpoints says, as far as a decoder depends on it."""

from __future__ import annotations

from typing import Any

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
MISTRAL_7B: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
QWEN2_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "eos_token_id": 151645,
}
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "vocab_size": 151936,
    "hidden_size": 4096,
    "head_dim": 128,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "eos_token_id": 151645,
}
GEMMA_2_9B: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "vocab_size": 256000,
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "eos_token_id": 1,
}
GEMMA_3_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "vocab_size": 262144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32768,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "eos_token_id": [1, 106],
}
_LLAMA_32_ROPE = {**LLAMA_31_8B["rope_scaling"], "factor": 32.0}
LLAMA_32_1B: dict[str, Any] = {
    **LLAMA_31_8B,
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "rope_scaling": _LLAMA_32_ROPE,
    "tie_word_embeddings": True,
}
LLAMA_32_3B: dict[str, Any] = {
    **LLAMA_32_1B,
    "head_dim": 128,
    "hidden_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
}
MINITRON_4B_WIDTH: dict[str, Any] = {
    **LLAMA_31_8B,
    "head_dim": 128,
    "hidden_size": 3072,
    "intermediate_size": 9216,
    "tie_word_embeddings": False,
}
R1_DISTILL_LLAMA_8B: dict[str, Any] = {**LLAMA_31_8B, "tie_word_embeddings": False}
R1_DISTILL_QWEN_1_5B: dict[str, Any] = {
    **QWEN2_7B,
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
    "max_window_layers": 21,
    "rope_theta": 10000,
    "sliding_window": 4096,
    "use_mrope": False,
    "eos_token_id": 151643,
}
R1_DISTILL_QWEN_7B: dict[str, Any] = {
    **R1_DISTILL_QWEN_1_5B,
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_window_layers": 28,
}
PRUNED_AND_DISTILLED = [
    (LLAMA_32_1B, 1_235_814_400),
    (LLAMA_32_3B, 3_212_749_824),
    (MINITRON_4B_WIDTH, 4_512_746_496),
    (R1_DISTILL_LLAMA_8B, 8_030_261_248),
    (R1_DISTILL_QWEN_1_5B, 1_777_088_000),
    (R1_DISTILL_QWEN_7B, 7_615_616_512),
]
"""Llama 3.2 and Llama-3.1-Minitron-4B-Width, pruned from Llama 3.1 8B and trained on its logits, and DeepSeek's
distillations of R1, each with the number of its parameters; that of Minitron is of its card to three digits."""
NUM_PARAMETERS = [
    (LLAMA_31_8B, 8_030_261_248),
    (MISTRAL_7B, 7_241_732_096),
    (QWEN2_7B, 7_615_616_512),
    (QWEN3_8B, 8_190_735_360),
    (GEMMA_2_9B, 9_241_705_984),
    (GEMMA_3_1B, 999_885_952),
]
"""Each with the number of parameters that its model card states."""
