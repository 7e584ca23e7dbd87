"""Models that the planner's benchmarks share. KV moves from GPU to GPU."""

from __future__ import annotations

from dataclasses import replace

from pdserve.contracts.precision import Precision
from pdserve.model.config.shape import LatentAttention, ModelShape
from pdserve.planner.layout import PlannedModel


def _opt(name: str, num_layers: int, hidden_size: int, num_heads: int) -> PlannedModel:
    config = {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "ffn_dim": 4 * hidden_size,
        "num_attention_heads": num_heads,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": hidden_size,
        "do_layer_norm_before": True,
        "tie_word_embeddings": True,
    }
    shape = ModelShape.from_hf_config(config)
    return PlannedModel(shape=shape, name=name, precision=Precision(dtype="float16"), max_model_len=2048)


def dense(
    name: str,
    num_layers: int,
    hidden_size: int,
    intermediate_size: int,
    num_heads: int,
    vocab_size: int,
    *,
    qk_norm: bool = False,
    max_model_len: int = 16384,
) -> PlannedModel:
    """A model of eight KV heads of 128."""
    shape = ModelShape(
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=vocab_size,
        qk_norm=qk_norm,
    )
    return PlannedModel(shape=shape, name=name, max_model_len=max_model_len, transport="nccl")


OPT_13B = _opt("OPT-13B", 40, 5120, 40)
OPT_66B = _opt("OPT-66B", 64, 9216, 72)
BLOOM_176B = replace((_bloom := _opt("BLOOM-176B", 70, 14336, 112)), shape=replace(_bloom.shape, vocab_size=250880))
"""As an OPT model, whose products have the same sizes."""
LLAMA_2_70B = dense("Llama-2-70B", 80, 8192, 28672, 64, 32000)
LLAMA_3_8B = dense("Llama-3-8B", 32, 4096, 14336, 32, 128256)
LLAMA_3_70B = dense("Llama-3-70B", 80, 8192, 28672, 64, 128256)
QWEN3_32B = dense("Qwen3-32B", 64, 5120, 25600, 64, 151936, qk_norm=True)
QWEN3_14B = dense("Qwen3-14B", 40, 5120, 17408, 40, 151936, qk_norm=True)
QWEN_25_7B = replace(
    (_qwen := dense("Qwen2.5-7B", 28, 3584, 18944, 28, 152064)), shape=replace(_qwen.shape, num_kv_heads=4)
)
MISTRAL_NEMO = dense("Mistral-Nemo-12B", 40, 5120, 14336, 32, 131072)
MIXTRAL_8X7B = replace(
    (_mistral := dense("Mixtral-8x7B", 32, 4096, 14336, 32, 32000)),
    shape=replace(_mistral.shape, num_experts=8, experts_per_token=2),
)
QWEN3_CODER_30B = replace(
    (_coder := dense("Qwen3-Coder-30B-A3B", 48, 2048, 768, 32, 151936, qk_norm=True, max_model_len=131072)),
    shape=replace(_coder.shape, num_kv_heads=4, num_experts=128, experts_per_token=8),
)
GEMMA_3_27B = PlannedModel(
    shape=ModelShape(
        num_layers=62,
        hidden_size=5376,
        intermediate_size=21504,
        num_heads=32,
        num_kv_heads=16,
        head_dim=128,
        vocab_size=262208,
        tie_word_embeddings=True,
        qk_norm=True,
        post_norms=True,
        windows=tuple(0 if layer % 6 == 5 else 1024 for layer in range(62)),
    ),
    name="Gemma-3-27B",
    max_model_len=16384,
    transport="nccl",
)
DEEPSEEK_V3 = PlannedModel(
    shape=ModelShape(
        num_layers=61,
        hidden_size=7168,
        intermediate_size=2048,
        num_heads=128,
        num_kv_heads=1,
        head_dim=576,
        vocab_size=129280,
        num_experts=256,
        experts_per_token=8,
        shared_intermediate_size=2048,
        shared_gate=False,
        dense_layers=(0, 1, 2),
        dense_intermediate_size=18432,
        latent=LatentAttention(query_rank=1536, kv_rank=512, key_dim=128, rotated_dim=64, value_dim=128),
    ),
    name="DeepSeek-V3",
    precision=Precision(dtype="bfloat16", quantization="fp8"),
    max_model_len=16384,
    transport="nccl",
)
