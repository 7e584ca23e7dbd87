"""Small checkpoints in the formats of other tools, packed here in numpy as their documentation describes them, and the
same models in float32 with the weights that the packed ones stand for.

Shape suffixes: F output features, E input features, G groups of inputs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.weights.files import layer_matrices, text_name
from tests.model.checkpoints import write_family

Array = np.ndarray[Any, Any]
Tensors = dict[str, torch.Tensor]
GROUP = 32
SHAPE = {"intermediate_size": 128, "head_dim": 32}
"""Every matrix has several groups, also on each of two ranks."""


class Rounded(NamedTuple):
    """``(values - zeros) * scales`` of each group."""

    values: Array
    """Unsigned ``[F, E]``."""
    scales: Array
    """float32 ``[F, G]``."""
    zeros: Array
    """Unsigned ``[F, G]``."""
    group_of: Array
    """Group of each input: ``[E]``."""

    def weight(self) -> torch.Tensor:
        values = self.values - self.zeros[:, self.group_of]
        return torch.from_numpy((values * self.scales[:, self.group_of]).astype(np.float32))


def rounded(weight: torch.Tensor, bits: int, group: int, *, is_symmetric: bool, act_order: bool = False) -> Rounded:
    """Round ``weight``; with ``act_order``, each group has inputs from everywhere."""
    weight_FE = weight.numpy()
    num_inputs = weight_FE.shape[1]
    group_of = np.arange(num_inputs) // group
    if act_order:
        group_of = np.random.default_rng(5).permutation(group_of)
    largest = 2**bits - 1
    columns = [weight_FE[:, group_of == index] for index in range(group_of.max() + 1)]
    low, high = (np.stack([limit(each, axis=1) for each in columns], axis=1) for limit in (np.min, np.max))
    if is_symmetric:
        scales = np.maximum(-low, high) / (largest // 2)
        zeros = np.full_like(scales, (largest + 1) // 2)
    else:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        scales = (high - low) / largest
        zeros = np.round(-low / scales)
    scales = scales.astype(np.float16).astype(np.float32)  # as they are stored
    values = np.clip(np.round(weight_FE / scales[:, group_of] + zeros[:, group_of]), 0, largest)
    return Rounded(values.astype(np.int64), scales, zeros.astype(np.int64), group_of)


def packed(values: Array, bits: int, axis: int, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> torch.Tensor:
    """Words of 32 bits along ``axis``; the value ``order[i]`` of a word lies in its ``i``-th bits from below."""
    per_word = 32 // bits
    values = np.moveaxis(values, axis, -1)
    values = np.pad(values, ((0, 0), (0, -values.shape[-1] % per_word)))
    words = np.zeros((len(values), values.shape[-1] // per_word), np.uint32)
    for place in range(per_word):
        words |= values[:, order[place] :: per_word].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32))


def _gptq(weight: torch.Tensor, bits: int, *, version: int, is_symmetric: bool, act_order: bool = False) -> Any:
    found = rounded(weight, bits, GROUP, is_symmetric=is_symmetric, act_order=act_order)
    words = packed(found.zeros.T, bits, 1).numpy().view(np.uint32)
    one_each = np.uint32(sum(1 << at for at in range(0, 32, bits)))
    stored = torch.from_numpy((words - one_each if version == 1 else words).view(np.int32))
    return found.weight(), {
        "qweight": packed(found.values.T, bits, 0),
        "qzeros": stored,
        "scales": torch.from_numpy(np.ascontiguousarray(found.scales.T)).half(),
        "g_idx": torch.from_numpy(found.group_of).int(),
    }


def _awq(weight: torch.Tensor) -> Any:
    found, order = rounded(weight, 4, GROUP, is_symmetric=False), (0, 2, 4, 6, 1, 3, 5, 7)
    return found.weight(), {
        "qweight": packed(found.values.T, 4, 1, order),
        "qzeros": packed(found.zeros.T, 4, 1, order),
        "scales": torch.from_numpy(np.ascontiguousarray(found.scales.T)).half(),
    }


def _pack_quantized(
    weight: torch.Tensor, bits: int, group: int, *, is_symmetric: bool = True, act_order: bool = False
) -> Any:
    found = rounded(weight, bits, group, is_symmetric=is_symmetric, act_order=act_order)
    tensors = {
        "weight_packed": packed(found.values, bits, 1),
        "weight_scale": torch.from_numpy(found.scales),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not is_symmetric:
        tensors["weight_zero_point"] = packed(found.zeros, bits, 0)
    if act_order:
        tensors["weight_g_idx"] = torch.from_numpy(found.group_of).int()
    return found.weight(), tensors


def _int8(weight: torch.Tensor, *, is_symmetric: bool) -> Any:
    found = rounded(weight, 8, weight.shape[1], is_symmetric=is_symmetric)
    tensors = {
        "weight": torch.from_numpy((found.values - 128).astype(np.int8)),
        "weight_scale": torch.from_numpy(found.scales),
    }
    if not is_symmetric:
        tensors["weight_zero_point"] = torch.from_numpy((found.zeros - 128).astype(np.int8))
    return found.weight(), tensors


def _fp8(weight: torch.Tensor, block: tuple[int, int], scale_name: str) -> Any:
    """With a scale for each block of (outputs, inputs); one for all is a scalar."""
    (rows, columns), (height, width) = weight.shape, (min(each) for each in zip(block, weight.shape, strict=True))
    scales = torch.stack(
        [
            torch.stack([weight[i : i + height, j : j + width].abs().max() / 448 for j in range(0, columns, width)])
            for i in range(0, rows, height)
        ]
    )
    each = scales.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
    values = (weight / each).to(torch.float8_e4m3fn)
    stored = scales.reshape(()) if scales.numel() == 1 and block[0] >= 1 << 20 else scales
    return values.float() * each, {"weight": values, scale_name: stored, "input_scale": torch.ones(1)}


_ALL = 1 << 20


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _gptq_config(bits: int, **options: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": True, "desc_act": False, **options}


class Form(NamedTuple):
    config: dict[str, Any]
    """``quantization_config``."""
    pack: Callable[[torch.Tensor], tuple[torch.Tensor, Tensors]]
    """Rounds a weight; returns what it stands for, and the tensors by the ends of their names."""


FORMS = {
    "w4a16": Form(
        _compressed("pack-quantized", num_bits=4, strategy="group", group_size=GROUP),
        lambda weight: _pack_quantized(weight, 4, GROUP),
    ),
    "w4a16-asymmetric-act-order": Form(
        _compressed(
            "pack-quantized", num_bits=4, strategy="group", group_size=GROUP, symmetric=False, actorder="group"
        ),
        lambda weight: _pack_quantized(weight, 4, GROUP, is_symmetric=False, act_order=True),
    ),
    "w8a16": Form(
        _compressed("pack-quantized", num_bits=8, strategy="channel"),
        lambda weight: _pack_quantized(weight, 8, weight.shape[1]),
    ),
    "w8a8-int8": Form(
        _compressed("int-quantized", num_bits=8, strategy="channel"), lambda weight: _int8(weight, is_symmetric=True)
    ),
    "w8a8-int8-asymmetric": Form(
        _compressed("int-quantized", num_bits=8, strategy="channel", symmetric=False),
        lambda weight: _int8(weight, is_symmetric=False),
    ),
    "w8a8-fp8": Form(
        _compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        lambda weight: _fp8(weight, (1, _ALL), "weight_scale"),
    ),
    "w8a8-fp8-block": Form(
        _compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[48, GROUP]),
        lambda weight: _fp8(weight, (48, GROUP), "weight_scale"),
    ),
    "fp8-tensor": Form(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        lambda weight: _fp8(weight, (_ALL, _ALL), "weight_scale"),
    ),
    "fp8-block": Form(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [48, GROUP]},
        lambda weight: _fp8(weight, (48, GROUP), "weight_scale_inv"),
    ),
    "gptq": Form(
        _gptq_config(4, sym=False), lambda weight: _gptq(weight, 4, version=1, is_symmetric=False)
    ),
    "gptq-act-order": Form(
        _gptq_config(8, desc_act=True), lambda weight: _gptq(weight, 8, version=1, is_symmetric=True, act_order=True)
    ),
    "gptq-v2": Form(
        _gptq_config(4, sym=False, checkpoint_format="gptq_v2"),
        lambda weight: _gptq(weight, 4, version=2, is_symmetric=False),
    ),
    "gptq-that-is-v2": Form(
        _gptq_config(4, checkpoint_format="gptq"), lambda weight: _gptq(weight, 4, version=2, is_symmetric=True)
    ),
    "awq": Form(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, _awq
    ),
}  # fmt: skip
"""Formats by name."""


MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip
"""``quantization_config`` of gpt-oss."""


def write_mxfp4(folder: Path, **changes: Any) -> tuple[Path, Path]:
    """Write a random gpt-oss whose experts are in mxfp4: of each expert, output and group of 32 inputs 16 bytes, of
    which each holds two inputs, the first in its low bits, and an exponent.

    Returns:
        Its folder, and that of the model in bfloat16, as transformers dequantises it.
    """
    plain = write_family(folder / "plain", "gpt_oss", **{"intermediate_size": 128, **changes})
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(plain / "model.safetensors").items()}
    stored, generator = dict(tensors), torch.Generator().manual_seed(5)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, num_inputs, num_outputs = stored.pop(name).shape
        groups = (num_experts, num_outputs, num_inputs // 32)
        blocks = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 125, groups, dtype=torch.uint8, generator=generator)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
        tensors[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
        assert tensors[name].shape == (num_experts, num_inputs, num_outputs)
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    return _write_beside(plain, stored, MXFP4), plain


def write_quantised(
    folder: Path, family: str, form: str, *, excepted: Sequence[str] = (), **changes: Any
) -> tuple[Path, Path]:
    """Write a random model of one of `tests.model.checkpoints.FAMILIES` in one of `FORMS`.

    Args:
        excepted: modules that stay floats, of a form whose configuration calls them ``modules_to_not_convert``.

    Returns:
        Its folder, and that of the model in float32.
    """
    plain = write_family(folder / "plain", family, **{**SHAPE, **changes})
    tensors = load_file(plain / "model.safetensors")
    config, pack = FORMS[form]
    stored, names = dict(tensors), {text_name(name): name for name in tensors}
    for module in layer_matrices(DecoderConfig.from_folder(plain).shape):
        if module in excepted:
            continue
        name = names[f"{module}.weight"]
        tensors[name], parts = pack(stored.pop(name))
        stored |= {name.removesuffix("weight") + part: tensor for part, tensor in parts.items()}
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    return _write_beside(plain, stored, {**config, "modules_to_not_convert": list(excepted)}), plain


def _write_beside(plain: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    """Write the quantised model of which ``plain`` is the folder in floats."""
    quantised = plain.parent / "quantised"
    quantised.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, quantised / "model.safetensors")
    values = json.loads((plain / "config.json").read_text()) | {"quantization_config": config}
    (quantised / "config.json").write_text(json.dumps(values))
    return quantised
