"""What pdserve must know of a checkpoint before any tensor is read: its shape, and what its layers compute.

Reads config.json and generation_config.json of a Hugging Face folder, and refuses by name what the decoder would
compute otherwise than it was trained. Used by workers, the cost model and the planner; never imports torch and never
reads a weight.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.step import ModelLimits
from pdserve.model.config.families import FAMILIES, FULL, SLIDING, Family, find_family
from pdserve.model.config.rope_config import RopeConfig, parse_ropes
from pdserve.model.config.shape import ModelShape, positive_float, positive_int

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Of transformers, and as `pdserve.kernels.operations.Gate` names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """What may differ from layer to layer."""

    window: int
    """A token sees itself and the ``window - 1`` tokens before it; 0 sees all before it."""
    rope: RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder: every family that is supported is one of these."""

    shape: ModelShape
    max_context_length: int
    """Prompt and answer tokens together that the checkpoint was trained for, stretched by its rope scaling."""
    layers: tuple[LayerConfig, ...]
    rms_norm_eps: float
    activation: str
    """Of the MLP's gate; `pdserve.kernels.operations.Gate` lists them."""
    attention_scale: float
    """Attention scores are ``attention_scale * q . k``."""
    attention_softcap: float = 0.0
    """Scores become ``softcap * tanh(score / softcap)``; 0 leaves them."""
    logit_softcap: float = 0.0
    """The same of the logits."""
    embedding_scale: float = 1.0
    """Embeddings are multiplied by this."""
    unit_offset_norms: bool = False
    """The checkpoint stores norm weights as their difference from 1."""
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_folder(cls, folder: Path) -> DecoderConfig:
        """Read the configuration of the checkpoint in ``folder``.

        Raises:
            ValueError: no readable config.json, or a model that this decoder would compute wrongly.
        """
        return parse_config(_read_json(folder / "config.json"), _read_json(folder / "generation_config.json", {}))

    @property
    def num_parameters(self) -> int:
        """Weights of the model; a tied output projection is counted once."""
        return self.shape.num_parameters

    def limits(self, max_model_len: int) -> ModelLimits:
        """What schedulers need of the model; ``max_model_len`` 0 takes the checkpoint's own limit.

        Raises:
            ValueError: ``max_model_len`` is beyond what the checkpoint was trained for.
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
        """The decoder of a deployment whose sequences have up to ``max_model_len`` tokens.

        Dynamic rope scaling is fixed at that length for all sequences; nothing else depends on it.
        """
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


def parse_config(config: Mapping[str, object], generation_config: Mapping[str, object]) -> DecoderConfig:
    """Build a `DecoderConfig` from the contents of config.json and generation_config.json.

    Raises:
        ValueError: an unsupported architecture or option, named; a missing or inconsistent number.
    """
    family = find_family(config)
    if family is None:
        raise ValueError(
            f"config.json: architectures {config.get('architectures')} is not supported; "
            f"serve a checkpoint of one of {', '.join(FAMILIES)}"
        )
    values = {**family.defaults, **config}
    for key in ("quantization_config", *family.refused):
        if values.get(key):
            raise ValueError(f"config.json: {key} is set, and is not supported; serve a checkpoint without it")
    shape = ModelShape.from_hf_config(config)
    _check_heads(shape)
    layers = _parse_layers(values, family, shape.num_layers)
    max_positions = positive_int(values, "max_position_embeddings")
    return DecoderConfig(
        shape=shape,
        max_context_length=min(layer.rope.context_length(max_positions) for layer in layers),
        layers=layers,
        rms_norm_eps=positive_float(values, "rms_norm_eps", 1e-6),
        activation=_parse_activation(values),
        attention_scale=positive_float(values, "query_pre_attn_scalar", shape.head_dim) ** -0.5,
        attention_softcap=_parse_softcap(values, "attn_logit_softcapping"),
        logit_softcap=_parse_softcap(values, "final_logit_softcapping"),
        embedding_scale=shape.hidden_size**0.5 if family.scaled_embeddings else 1.0,
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


def _parse_layers(values: Mapping[str, object], family: Family, num_layers: int) -> tuple[LayerConfig, ...]:
    types = values.get("layer_types") or family.layer_types(values, num_layers)
    if not isinstance(types, list) or len(types) != num_layers:
        raise ValueError(f"config.json: layer_types is no list of {num_layers} types; download config.json again")
    unknown = sorted({str(layer_type) for layer_type in types} - {FULL, SLIDING})
    if unknown:
        raise ValueError(
            f"config.json: layer type {unknown[0]!r} is not supported; "
            f"serve a checkpoint whose layer_types are {FULL} or {SLIDING}"
        )
    windows = {FULL: 0}
    if SLIDING in types:
        if not values.get("use_sliding_window", True):
            raise ValueError(
                f"config.json: layer_types has {SLIDING} and use_sliding_window is false; remove one of the two"
            )
        windows[SLIDING] = positive_int(values, "sliding_window")
    ropes = parse_ropes(values)
    return tuple(LayerConfig(window=windows[layer_type], rope=ropes[layer_type]) for layer_type in types)


def _parse_activation(values: Mapping[str, object]) -> str:
    name = values.get("hidden_activation") or values.get("hidden_act") or "silu"
    if name not in _ACTIVATIONS:
        raise ValueError(
            f"config.json: activation {name!r} is not supported; serve a checkpoint with one of "
            f"{', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[str(name)]


def _parse_softcap(values: Mapping[str, object], key: str) -> float:
    return 0.0 if values.get(key) is None else positive_float(values, key)


def _eos_token_ids(config: Mapping[str, object], generation_config: Mapping[str, object]) -> tuple[int, ...]:
    given = generation_config.get("eos_token_id")
    if given is None:
        given = config.get("eos_token_id")
    if given is None:
        return ()
    token_ids = given if isinstance(given, list) else [given]
    if not all(isinstance(token_id, int) for token_id in token_ids):
        raise ValueError(f"eos_token_id {given!r} is neither a token id nor a list of them")
    return tuple(token_ids)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; name a folder with a Hugging Face model") from error


def _read_json(path: Path, default: Mapping[str, object] | None = None) -> Mapping[str, object]:
    if default is not None and not path.exists():
        return default
    text = _read_bytes(path)
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object; download it again")
    return content
