"""Configuration of a checkpoint: its shape, and what its layers compute.

Reads config.json and generation_config.json of a Hugging Face folder, and refuses by name every option that the decoder
would compute wrongly. Used by workers, the router and the planner. Never imports torch, never reads a weight.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.step import ModelLimits
from pdserve.model.config.families import FAMILIES, FULL, SLIDING, Family, find_family, text_values
from pdserve.model.config.rope_config import RopeConfig, parse_ropes
from pdserve.model.config.shape import ModelShape, layer_types, positive_float, positive_int
from pdserve.model.config.tokenizer_config import eos_token_ids, read_json

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Names in config.json, and in `pdserve.kernels.operations.Gate`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """Options that may differ from layer to layer."""

    window: int
    """A token attends to itself and the ``window - 1`` tokens before it; 0 means no limit."""
    rope: RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder of any supported family."""

    shape: ModelShape
    max_context_length: int
    """Prompt and answer tokens together that the checkpoint supports with its rope scaling."""
    layers: tuple[LayerConfig, ...]
    rms_norm_eps: float
    activation: str
    """Activation of the MLP's gate, as in `pdserve.kernels.operations.Gate`."""
    attention_scale: float
    """Attention scores are ``attention_scale * q . k``."""
    attention_softcap: float = 0.0
    """Scores become ``softcap * tanh(score / softcap)``; 0 disables it."""
    logit_softcap: float = 0.0
    """The same for logits."""
    embedding_scale: float = 1.0
    normalise_experts: bool = False
    """Weights of a token's experts are divided by their sum."""
    softmax_of_chosen: bool = False
    """Weights of a token's experts are the softmax of their scores alone."""
    unit_offset_norms: bool = False
    """Norm weights are stored as their difference from 1."""
    eos_token_ids: tuple[int, ...] = ()
    """All that end an answer: of generation_config.json, config.json and the tokenizer."""

    @classmethod
    def from_folder(cls, folder: Path) -> DecoderConfig:
        """Read the configuration of the checkpoint in ``folder``.

        Raises:
            ValueError: no readable config.json, or an unsupported model.
        """
        if not (folder / "config.json").is_file():
            raise ValueError(f"cannot read {folder / 'config.json'}: no such file; {_remedy_without_config(folder)}")
        config = parse_config(read_json(folder / "config.json"), read_json(folder / "generation_config.json"))
        ids = dict.fromkeys([*config.eos_token_ids, *eos_token_ids(folder)])
        return replace(config, eos_token_ids=tuple(i for i in ids if 0 <= i < config.shape.vocab_size))

    def limits(self, max_model_len: int) -> ModelLimits:
        """Limits for schedulers; ``max_model_len`` 0 takes the checkpoint's own limit.

        Raises:
            ValueError: ``max_model_len`` exceeds the checkpoint's limit.
        """
        if not 0 <= max_model_len <= self.max_context_length:
            raise ValueError(
                f"max_model_len {max_model_len} is outside 0..{self.max_context_length}, which the checkpoint's "
                f"max_position_embeddings and rope scaling allow; set it to {self.max_context_length} or less"
            )
        return ModelLimits(
            max_model_len=max_model_len or self.max_context_length,
            vocab_size=self.shape.vocab_size,
            eos_token_ids=self.eos_token_ids,
        )

    def at_length(self, max_model_len: int) -> DecoderConfig:
        """Return the decoder with dynamic rope scaling fixed for sequences of up to ``max_model_len`` tokens."""
        layers = tuple(replace(layer, rope=layer.rope.at_length(max_model_len)) for layer in self.layers)
        return replace(self, layers=layers)

    def kv_layout(self, num_blocks: int, block_size: int, dtype: str, model_hash: str) -> KvLayout:
        """Geometry of a pool of ``num_blocks`` blocks of ``block_size`` tokens for this model."""
        return KvLayout(
            num_blocks=num_blocks,
            num_kv_heads=self.shape.num_kv_heads,
            num_layers=self.shape.num_layers,
            block_size=block_size,
            head_dim=self.shape.head_dim,
            dtype=dtype,
            model_hash=model_hash,
        )


def _remedy_without_config(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return "it has an adapter (LoRA): merge it into its base model by merge_and_unload() of peft"
    if snapshots := sorted(folder.glob("snapshots/*/config.json")):  # as the hub's cache has them
        return f"name {snapshots[-1].parent}"
    return "name a folder with a Hugging Face model"


def parse_config(config: Mapping[str, object], generation_config: Mapping[str, object]) -> DecoderConfig:
    """Parse the contents of config.json and generation_config.json.

    Raises:
        ValueError: an unsupported architecture or option, named; a missing or inconsistent number.
    """
    family = find_family(config, FAMILIES)
    if family is None:
        raise ValueError(
            f"config.json: architectures {config.get('architectures')} is not supported; "
            f"serve a checkpoint of one of {', '.join(FAMILIES)}"
        )
    values = text_values(config, family)
    text_type = values.get("model_type") if "text_config" in config else family.text_type
    if family.text_type and text_type not in (None, family.text_type):
        raise ValueError(
            f"config.json: model_type {text_type!r} of text_config is not supported; "
            f"serve a checkpoint with {family.text_type!r}"
        )
    for key in family.refused:
        if values.get(key) or config.get(key):
            raise ValueError(f"config.json: {key} is set, and is not supported; serve a checkpoint without it")
    for key, value in family.fixed.items():
        if values.get(key) not in (None, value):
            raise ValueError(
                f"config.json: {key} {values[key]!r} is not supported; serve a checkpoint in which it is {value!r}"
            )
    shape = ModelShape.from_hf_config(config)
    _check_heads(shape)
    layers = _parse_layers(values, family, shape)
    max_positions = positive_int(values, "max_position_embeddings")
    return DecoderConfig(
        shape=shape,
        max_context_length=min(layer.rope.context_length(max_positions) for layer in layers),
        layers=layers,
        rms_norm_eps=positive_float(values, "rms_norm_eps", 1e-6),
        activation=family.activation or _parse_activation(values),
        attention_scale=positive_float(values, "query_pre_attn_scalar", shape.head_dim) ** -0.5,
        attention_softcap=_parse_softcap(values, "attn_logit_softcapping"),
        logit_softcap=_parse_softcap(values, "final_logit_softcapping"),
        embedding_scale=shape.hidden_size**0.5 if family.scaled_embeddings else 1.0,
        normalise_experts=bool(values.get("norm_topk_prob")),
        softmax_of_chosen=family.stacked_experts,
        unit_offset_norms=family.unit_offset_norms,
        eos_token_ids=_eos_token_ids(config, generation_config),
    )


def _check_heads(shape: ModelShape) -> None:
    if shape.num_heads % shape.num_kv_heads:
        raise ValueError(
            f"config.json: num_attention_heads {shape.num_heads} is not a multiple of num_key_value_heads "
            f"{shape.num_kv_heads}; download config.json again"
        )
    if shape.head_dim % 2:
        raise ValueError(
            f"config.json: head_dim {shape.head_dim} is odd, and rope rotates pairs of elements; "
            "serve a checkpoint of an even one"
        )


def _parse_layers(values: Mapping[str, object], family: Family, shape: ModelShape) -> tuple[LayerConfig, ...]:
    types = layer_types(values, family, shape.num_layers)
    unknown = sorted({str(layer_type) for layer_type in types} - {FULL, SLIDING})
    if unknown:
        raise ValueError(
            f"config.json: layer type {unknown[0]!r} is not supported; "
            f"serve a checkpoint whose layer_types are {FULL} or {SLIDING}"
        )
    ropes, windows = parse_ropes(values), shape.windows or (0,) * shape.num_layers
    layers = zip(windows, types, strict=True)
    return tuple(LayerConfig(window=window, rope=ropes[layer_type]) for window, layer_type in layers)


def _parse_activation(values: Mapping[str, object]) -> str:
    name = values.get("hidden_activation") or values.get("hidden_act") or "silu"
    if str(name) not in _ACTIVATIONS:
        raise ValueError(
            f"config.json: activation {name!r} is not supported; serve a checkpoint with one of "
            f"{', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[str(name)]


def _parse_softcap(values: Mapping[str, object], key: str) -> float:
    return 0.0 if values.get(key) is None else positive_float(values, key)


def _eos_token_ids(config: Mapping[str, object], generation_config: Mapping[str, object]) -> tuple[int, ...]:
    token_ids: list[int] = []
    text_config = config.get("text_config")
    for each in (generation_config, config, text_config if isinstance(text_config, Mapping) else {}):
        given = each.get("eos_token_id")
        for end in given if isinstance(given, list) else () if given is None else (given,):
            if not isinstance(end, int):
                raise ValueError(f"eos_token_id {given!r} is neither a token id nor a list of them; download it again")
            token_ids.append(end)
    return tuple(dict.fromkeys(token_ids))


def download_hint(path: Path) -> str:
    """End of a message that there is no model at ``path``, if it could be a name of Hugging Face's hub."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) or path.parent.exists():
        return ""
    return f"; for one of the hub, first hf download {path} --local-dir {path.name}"
