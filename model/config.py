"""What pdserve must know of a Llama checkpoint before any tensor is read: shapes, rope, limits.

Reads config.json and generation_config.json of a Hugging Face folder. Used by workers, the cost model and the planner;
never imports torch and never reads a weight.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pdserve.contracts.kv_layout import DTYPE_BYTES, KvLayout
from pdserve.contracts.step import ModelLimits
from pdserve.model.shape import ModelShape

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3RopeScaling:
    """Llama 3.1's stretch of the low rope frequencies (the ``llama3`` rope type of transformers)."""

    factor: float
    """Frequencies below the low limit are divided by this."""
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    """Context length of pre-training, in tokens: the wavelengths are compared with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Shape of a Llama decoder. Counts are of the whole model, before any sharding."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    """Prompt and answer tokens together that the checkpoint was trained for."""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None
    """``None`` is plain rope."""
    tie_word_embeddings: bool
    """The output projection is the embedding table."""
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_folder(cls, folder: Path) -> DecoderConfig:
        """Read the configuration of the checkpoint in ``folder``.

        Raises:
            ValueError: no readable config.json, or a model that this decoder would compute wrongly.
        """
        return parse_config(_read_json(folder / "config.json"), _read_json(folder / "generation_config.json", {}))

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def shape(self) -> ModelShape:
        """What decides the cost of running it."""
        return ModelShape(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            tie_word_embeddings=self.tie_word_embeddings,
        )

    @property
    def num_parameters(self) -> int:
        """Weights of the model; a tied output projection is counted once."""
        return self.shape.num_parameters

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of all weights held in ``dtype``."""
        return self.num_parameters * DTYPE_BYTES[dtype]

    def limits(self, max_model_len: int) -> ModelLimits:
        """What schedulers need of the model; ``max_model_len`` 0 takes the checkpoint's own limit.

        Raises:
            ValueError: ``max_model_len`` is beyond what the checkpoint was trained for.
        """
        if not 0 <= max_model_len <= self.max_position_embeddings:
            raise ValueError(
                f"max_model_len {max_model_len} is outside 0..{self.max_position_embeddings}, the checkpoint's "
                f"max_position_embeddings; set it to {self.max_position_embeddings} or less"
            )
        return ModelLimits(
            max_model_len=max_model_len or self.max_position_embeddings,
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
        )

    def kv_layout(self, num_blocks: int, block_size: int, dtype: str, model_hash: str) -> KvLayout:
        """Geometry of a pool of ``num_blocks`` blocks of ``block_size`` tokens for this model."""
        return KvLayout(
            num_blocks=num_blocks,
            num_kv_heads=self.num_kv_heads,
            num_layers=self.num_layers,
            block_size=block_size,
            head_dim=self.head_dim,
            dtype=dtype,
            model_hash=model_hash,
        )


def parse_config(config: Mapping[str, object], generation_config: Mapping[str, object]) -> DecoderConfig:
    """Build a `DecoderConfig` from the contents of config.json and generation_config.json.

    Raises:
        ValueError: an unsupported architecture or option, named; a missing or inconsistent number.
    """
    _check_supported(config)
    num_heads = _positive_int(config, "num_attention_heads")
    num_kv_heads = _positive_int(config, "num_key_value_heads", num_heads)
    hidden_size = _positive_int(config, "hidden_size")
    head_dim = _positive_int(config, "head_dim", hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"config.json: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    if head_dim % 2:
        raise ValueError(f"config.json: head_dim {head_dim} is odd; rope rotates pairs of elements")
    rope_theta, rope_scaling = _parse_rope(config)
    return DecoderConfig(
        vocab_size=_positive_int(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive_int(config, "intermediate_size"),
        num_layers=_positive_int(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_positive_int(config, "max_position_embeddings"),
        rms_norm_eps=_positive_float(config, "rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=_eos_token_ids(config, generation_config),
    )


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


def _check_supported(config: Mapping[str, object]) -> None:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not set(architectures) & set(SUPPORTED_ARCHITECTURES):
        raise ValueError(
            f"config.json: architectures {architectures} is not supported; "
            f"serve a checkpoint of {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    for key in ("attention_bias", "mlp_bias", "quantization_config"):
        if config.get(key):
            raise ValueError(f"config.json: {key} is set, and is not supported; serve a checkpoint without it")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"config.json: hidden_act {config['hidden_act']!r} is not supported; only 'silu' is")


def _parse_rope(config: Mapping[str, object]) -> tuple[float, Llama3RopeScaling | None]:
    """Rope base and scaling, from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``."""
    top_level: Mapping[str, object] = {"rope_theta": config["rope_theta"]} if "rope_theta" in config else {}
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise ValueError("config.json: rope_parameters is not an object; download config.json again")
    rope = {**top_level, **given}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "llama3"):
        raise ValueError(f"config.json: rope type {rope_type!r} is not supported; 'default' and 'llama3' are")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("config.json: partial_rotary_factor is not supported; only whole heads are rotated")
    theta = _positive_float(rope, "rope_theta", 10000.0)
    if rope_type == "default":
        return theta, None
    scaling = Llama3RopeScaling(
        factor=_positive_float(rope, "factor"),
        low_freq_factor=_positive_float(rope, "low_freq_factor"),
        high_freq_factor=_positive_float(rope, "high_freq_factor"),
        original_max_position_embeddings=_positive_int(rope, "original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ValueError("config.json: rope high_freq_factor must be above low_freq_factor")
    return theta, scaling


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


def _positive_int(values: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = values.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"config.json: {key} must be a positive integer, not {value!r}")
    return value


def _positive_float(values: Mapping[str, object], key: str, default: float | None = None) -> float:
    value = values.get(key)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"config.json: {key} must be a positive number, not {value!r}")
    return float(value)
