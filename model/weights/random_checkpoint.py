"""Writes a small random Llama or Qwen3-MoE with a tokenizer and a chat template, for tests and benchmarks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pdserve.model.config.shape import ModelShape
from pdserve.model.weights.files import tensor_shapes

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
BOS, EOS, END = "<|bos|>", "<|eos|>", "<|end|>"
_TRAINING_TEXT = """Prefill computes the key and value cache of a prompt; decode generates tokens from it.
A router assigns each request to a prefill worker and a decode worker so that both latency objectives are met.
Größe, naïve café, 東京 and 你好, emoji 🙂🚀: text is bytes, and a character may take several tokens.
What is the time to first token? How many requests per second does one machine serve? 0 1 2 3 4 5 6 7 8 9
"""


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Train a byte-level BPE tokenizer of ``vocab_size`` tokens on a fixed text and save it to ``folder``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [BOS, EOS, END, "<|system|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TRAINING_TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": END}
    _write_json(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def write_random_checkpoint(
    folder: Path,
    *,
    hidden_size: int = 128,
    intermediate_size: int = 352,
    num_layers: int = 4,
    num_heads: int = 8,
    num_kv_heads: int = 4,
    vocab_size: int = 512,
    max_position_embeddings: int = 4096,
    rope_parameters: Mapping[str, object] | None = None,
    tie_word_embeddings: bool = False,
    num_experts: int = 0,
    experts_per_token: int = 2,
    dtype: str = "float32",
    seed: int = 0,
) -> Path:
    """Write config.json, safetensors, tokenizer and chat template to ``folder`` and return it.

    A Llama, or with experts, of ``intermediate_size`` each, a Qwen3-MoE. Weights have a standard deviation of 0.1, so
    that greedy answers vary with the prompt.
    """
    import torch
    from safetensors.torch import save_file

    write_tokenizer(folder, vocab_size)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": 0,
        "dtype": dtype,
        "eos_token_id": 2,
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "max_position_embeddings": max_position_embeddings,
        "mlp_bias": False,
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": num_kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_parameters": dict(rope_parameters or {"rope_type": "default", "rope_theta": 10000.0}),
        "tie_word_embeddings": tie_word_embeddings,
        "vocab_size": vocab_size,
    }
    if num_experts:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "moe_intermediate_size": intermediate_size,
            "norm_topk_prob": True,
            "num_experts": num_experts,
            "num_experts_per_tok": experts_per_token,
        }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 2})
    random = torch.Generator().manual_seed(seed)
    weights = {
        name: (torch.randn(shape, generator=random) * 0.1 if len(shape) == 2 else torch.ones(shape)).to(
            getattr(torch, dtype)
        )
        for name, shape in tensor_shapes(ModelShape.from_hf_config(config)).items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
