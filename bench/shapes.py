"""Llama shapes that several benchmarks use: arguments of
`pdserve.model.weights.random_checkpoint.write_random_checkpoint`."""

from __future__ import annotations

from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "num_layers": 4,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_heads": 8,
        "num_kv_heads": 4,
        "vocab_size": 512,
    },
    "half": {
        "num_layers": 24,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_heads": 14,
        "num_kv_heads": 2,
        "vocab_size": 32000,
        "tie_word_embeddings": True,
    },
}
"""Llama shapes; ``half`` has the figures of a 0.5B model."""
LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
}
"""Sizes in config.json of Llama 3 and 3.1 8B."""
LLAMA_3_8B_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **LLAMA_8B,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
"""config.json of meta-llama/Meta-Llama-3-8B, as far as a decoder depends on it."""
