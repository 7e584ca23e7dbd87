"""Writes a checkpoint of random weights, drawn on the benchmarked device, one shard per layer.

Called by `pdserve.bench.gpu_model.run`. Has no tokenizer. The scale of the matrices keeps the size of a layer's output
constant at any width.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pdserve.model.config.shape import ModelShape
from pdserve.model.weights.files import tensor_shapes

TINY: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 211,
}
_COMMON: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}


def write_weights(folder: Path, sizes: Mapping[str, Any], dtype: str, device: torch.device) -> Path:
    """Write config.json, shards and their index to ``folder``, and return it.

    Args:
        sizes: `pdserve.bench.shapes.LLAMA_8B` or `TINY`.
    """
    config = {**_COMMON, **sizes, "torch_dtype": dtype}
    _write_json(folder / "config.json", config)
    random = torch.Generator(device).manual_seed(0)
    shard_of: dict[str, str] = {}
    shapes = tensor_shapes(ModelShape.from_hf_config(config))
    for layer, names in groupby(shapes, key=_shard):
        shard = f"model-{layer}.safetensors"
        tensors = {name: _draw(shapes[name], random, getattr(torch, dtype)).cpu() for name in names}
        save_file(tensors, folder / shard, metadata={"format": "pt"})
        shard_of |= dict.fromkeys(tensors, shard)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": shard_of})
    return folder


def _shard(name: str) -> str:
    """A tensor's layer number, or ``tables`` for tensors outside layers."""
    return name.split(".")[2] if name.startswith("model.layers.") else "tables"


def _draw(shape: tuple[int, ...], random: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype)
    return torch.randn(shape, generator=random, device=random.device, dtype=dtype).mul_(shape[1] ** -0.5)


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
