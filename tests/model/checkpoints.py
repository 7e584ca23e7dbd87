"""Small random Llama checkpoints of every supported shape, and what transformers computes from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "llama3-rope": {"rope_parameters": LLAMA3_ROPE},
    "tied": {"tie_word_embeddings": True},
    "no-groups": {"num_key_value_heads": 4},
    "group-of-four": {"num_key_value_heads": 1},
    "wide-heads": {"head_dim": 24},
}
"""Changes to the configuration of `write_checkpoint`, whose group size is 2 and head_dim 16."""


def write_checkpoint(folder: Path, *, max_shard_size: str = "5GB", **changes: Any) -> Path:
    """Write config.json and safetensors of a random model whose answers vary with the prompt."""
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 211,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "eos_token_id": 2,
    }
    torch.manual_seed(7)
    LlamaForCausalLM(LlamaConfig(**{**shape, **changes})).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def reference_logits(folder: Path, tokens: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What transformers computes for a whole sequence: float32 ``[len(tokens), vocab_size]``."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0].float()
    return logits


class GreedyAnswer(NamedTuple):
    """A greedy answer of transformers."""

    tokens: list[int]
    margins: list[float]
    """At each position, by how much the best logit beats the second."""
    logprobs: list[float]


def reference_answer(folder: Path, prompt: list[int], num_tokens: int) -> GreedyAnswer:
    """``transformers.generate`` without end-of-sequence tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    settings = GenerationConfig(
        max_new_tokens=num_tokens, do_sample=False, return_dict_in_generate=True, output_logits=True, pad_token_id=0
    )
    inputs = torch.tensor([prompt])
    answer = model.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=settings)
    logits = torch.cat(answer.logits).float()
    best = logits.topk(2, dim=-1).values
    return GreedyAnswer(
        answer.sequences[0, len(prompt) :].tolist(),
        (best[:, 0] - best[:, 1]).tolist(),
        logits.log_softmax(dim=-1).max(dim=-1).values.tolist(),
    )
