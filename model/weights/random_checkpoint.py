"""Writes random weights of a model of any shape, as `pdserve profile` needs them; and a small random Llama or Qwen3-MoE
with a tokenizer and a chat template, for tests and benchmarks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from pdserve.model.config.shape import ModelShape
from pdserve.model.weights.files import stored_tensors, tensor_shapes

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
BOS, EOS, END = "<|bos|>", "<|eos|>", "<|end|>"
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_NUM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1}
_TILE_BYTES = 2**22
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


def write_random_weights(path: Path, shape: ModelShape, dtype: str) -> None:
    """Write every tensor of the model as its scheme stores it, floats in ``dtype``, to a safetensors file. Values
    repeat, which does not change multiply time.

    Raises:
        OSError: no space left on the device.
        ValueError: the scheme quantises some of a layer's experts alone.
    """
    tensors = {name: each for name, each in stored_tensors(shape).items() if not each.is_optional}
    header: dict[str, Any] = {}
    tiles, end = _tiles(shape, dtype), 0
    kinds = {name: _DTYPES[dtype] if "F32" in each.dtypes else each.dtypes[0] for name, each in tensors.items()}
    for name, each in tensors.items():
        begin, end = end, end + prod(each.shapes[0]) * _NUM_BYTES[kinds[name]]
        header[name] = {"dtype": kinds[name], "shape": each.shapes[0], "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # as the library aligns tensors
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in tensors:
            tile = tiles.get(name.rpartition(".")[2], tiles[kinds[name]])
            begin, end = header[name]["data_offsets"]
            at = 0 if name.endswith("g_idx") else begin // 8 * 8 % len(tile)
            turned = tile[at:] + tile[:at]
            for start in range(begin, end, len(tile)):
                file.write(turned[: end - start])


def _tiles(shape: ModelShape, dtype: str) -> dict[str, bytes]:
    """Bytes to repeat, by the dtype or by the end of the name of a tensor: any values, but zero points in the middle
    where config.json says so, groups in order, no exponents of large numbers, and no NaN."""
    import torch

    random = torch.Generator().manual_seed(0)
    floats = (torch.randn(_TILE_BYTES // 4, generator=random) * 0.02).to(getattr(torch, dtype))
    some = torch.randint(256, (_TILE_BYTES,), generator=random, dtype=torch.uint8)
    tiles = {_DTYPES[dtype]: floats.view(torch.uint8), "F8_E4M3": some & 0xF7}
    tiles |= dict.fromkeys(("I32", "I8", "U8"), some)
    if (scheme := shape.scheme) is not None:
        middle = torch.full((8,), 0x88 if scheme.bits == 4 else 0x80, dtype=torch.uint8)
        groups = torch.arange(_TILE_BYTES // 4, dtype=torch.int32) // (scheme.group_inputs or _TILE_BYTES)
        tiles |= dict.fromkeys(("g_idx", "weight_g_idx"), groups.view(torch.uint8))
        tiles |= dict.fromkeys(("gate_up_proj_scales", "down_proj_scales"), torch.full_like(middle, 120))
        if not scheme.has_zeros:
            tiles["qzeros"] = middle
    return {name: tile.numpy().tobytes() for name, tile in tiles.items()}


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
