"""Which rotary embedding a checkpoint asks for, read from its config.json.

Both spellings are understood: ``rope_parameters`` (transformers 5; one object, or one per layer type), and
``rope_theta`` with ``rope_scaling`` before it. Used by `pdserve.model.config.decoder_config`;
`pdserve.model.decoder.rope` computes what is described here. Never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pdserve.model.config.families import FULL, SLIDING
from pdserve.model.config.shape import positive_float, positive_int

_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Positions are divided by ``factor`` (Chen et al. 2023, position interpolation)."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScaling:
    """NTK-aware: the base grows with the length of the sequence.

    transformers takes the length of the sequence at hand, so that keys which are already cached turn out rotated for
    another base. Here one length counts for all sequences, and cached KV is the same whoever computed it.
    """

    factor: float
    trained_length: int
    """In tokens; up to it the base stays as it is."""
    length: int
    """In tokens: what the base is made for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's stretch of the low frequencies."""

    factor: float
    """Frequencies below the low limit are divided by this."""
    low_freq_factor: float
    high_freq_factor: float
    trained_length: int
    """In tokens: the wavelengths are compared with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Peng et al. 2023 (YaRN): low frequencies are interpolated, high ones are not, and attention is sharpened."""

    factor: float
    trained_length: int
    """In tokens."""
    attention_factor: float
    """Cosines and sines are multiplied by this."""
    beta_fast: float
    """Dimensions that turn more often than this within the trained length are left alone."""
    beta_slow: float
    """Those that turn less often are interpolated."""
    truncate: bool
    """The bounds between them are rounded outwards to whole dimensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """One rotary embedding."""

    theta: float
    scaling: LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | None = None
    """``None`` is plain rope."""

    def context_length(self, max_position_embeddings: int) -> int:
        """Tokens of the longest sequence, where the checkpoint counts ``max_position_embeddings`` before scaling."""
        match self.scaling:
            case LinearScaling(factor=factor) | DynamicScaling(factor=factor):
                return int(max_position_embeddings * factor)
            case YarnScaling(factor=factor, trained_length=trained_length):
                return int(trained_length * factor)
        return max_position_embeddings

    def at_length(self, length: int) -> RopeConfig:
        """The same, made for sequences of up to ``length`` tokens: that matters to dynamic scaling only."""
        if not isinstance(self.scaling, DynamicScaling):
            return self
        return replace(self, scaling=replace(self.scaling, length=length))


def parse_ropes(values: Mapping[str, object]) -> dict[str, RopeConfig]:
    """The rotary embedding of each layer type.

    Args:
        values: of config.json, with the family's defaults.

    Raises:
        ValueError: an unsupported type or option, named; a missing or inconsistent number.
    """
    given = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise ValueError("config.json: rope_parameters is not an object; download config.json again")
    if any(layer_type in given for layer_type in (FULL, SLIDING)):
        local = {**values, "rope_theta": values.get("rope_local_base_freq", values.get("rope_theta"))}
        return {FULL: _parse_rope(values, given.get(FULL) or {}), SLIDING: _parse_rope(local, given.get(SLIDING) or {})}
    rope = _parse_rope(values, given)
    if values.get("rope_local_base_freq") is None:
        return {FULL: rope, SLIDING: rope}
    return {FULL: rope, SLIDING: RopeConfig(theta=positive_float(values, "rope_local_base_freq"))}


def _parse_rope(values: Mapping[str, object], given: Mapping[str, object]) -> RopeConfig:
    """One rotary embedding: ``given`` is its own object, ``values`` has what it may leave out."""
    if not isinstance(given, dict):
        raise ValueError("config.json: rope_parameters of a layer type is not an object; download config.json again")
    rope = {**{key: values[key] for key in ("rope_theta", "partial_rotary_factor") if key in values}, **given}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in _TYPES:
        raise ValueError(
            f"config.json: rope type {rope_type!r} is not supported; serve a checkpoint with one of {', '.join(_TYPES)}"
        )
    if rope.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise ValueError(
            "config.json: partial_rotary_factor is not supported; serve a checkpoint that rotates whole heads"
        )
    theta = positive_float(rope, "rope_theta", 10000.0)
    max_positions = positive_int(values, "max_position_embeddings")
    trained_length = positive_int(
        values,
        "original_max_position_embeddings",
        positive_int(rope, "original_max_position_embeddings", max_positions),
    )
    match rope_type:
        case "linear":
            return RopeConfig(theta=theta, scaling=LinearScaling(factor=positive_float(rope, "factor")))
        case "dynamic":
            return RopeConfig(theta=theta, scaling=_parse_dynamic(rope, max_positions))
        case "llama3":
            return RopeConfig(theta=theta, scaling=_parse_llama3(rope, trained_length))
        case "yarn":
            return RopeConfig(theta=theta, scaling=_parse_yarn(rope, trained_length, max_positions))
    return RopeConfig(theta=theta)


def _parse_dynamic(rope: Mapping[str, object], max_positions: int) -> DynamicScaling:
    factor = positive_float(rope, "factor")
    return DynamicScaling(factor=factor, trained_length=max_positions, length=int(max_positions * factor))


def _parse_llama3(rope: Mapping[str, object], trained_length: int) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=positive_float(rope, "factor"),
        low_freq_factor=positive_float(rope, "low_freq_factor"),
        high_freq_factor=positive_float(rope, "high_freq_factor"),
        trained_length=trained_length,
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ValueError("config.json: rope high_freq_factor must be above low_freq_factor; download config.json again")
    return scaling


def _parse_yarn(rope: Mapping[str, object], trained_length: int, max_positions: int) -> YarnScaling:
    factor = positive_float(rope, "factor", max_positions / trained_length)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        numerator = _yarn_sharpening(factor, positive_float(rope, "mscale"))
        sharpening = numerator / _yarn_sharpening(factor, positive_float(rope, "mscale_all_dim"))
    else:
        sharpening = _yarn_sharpening(factor, 1.0)
    return YarnScaling(
        factor=factor,
        trained_length=trained_length,
        attention_factor=positive_float(rope, "attention_factor", sharpening),
        beta_fast=positive_float(rope, "beta_fast", 32.0),
        beta_slow=positive_float(rope, "beta_slow", 1.0),
        truncate=bool(rope.get("truncate", True)),
    )


def _yarn_sharpening(factor: float, mscale: float) -> float:
    """Section 3.4 of the paper, with the weight that DeepSeek's checkpoints give to the logarithm."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
