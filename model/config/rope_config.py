"""The rotary embedding of a checkpoint, read from config.json.

Reads both spellings: ``rope_parameters`` (transformers 5; one object, or one per layer type), and ``rope_theta`` with
``rope_scaling`` (before it); beside each other they are merged, unless they contradict each other. Used by
`pdserve.model.config.decoder_config`; `pdserve.model.decoder.rope` computes the frequencies. Never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pdserve.model.config.families import FULL, SLIDING
from pdserve.model.config.shape import positive_float, positive_int

_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """One rotary embedding. Fields that its ``type`` does not use keep their defaults.

    The types are transformers': ``default`` scales nothing; ``linear`` divides positions by ``factor`` (Chen et al.
    2023, position interpolation); ``dynamic`` is NTK-aware: the base grows with ``length``; ``llama3`` stretches the
    low frequencies; ``yarn`` interpolates low frequencies, keeps high ones, and sharpens attention (Peng et al. 2023).
    """

    theta: float
    type: str = "default"
    factor: float = 1.0
    trained_length: int = 0
    """``dynamic``, ``llama3``, ``yarn``: tokens of the sequences that the checkpoint was trained on."""
    length: int = 0
    """``dynamic``: tokens that the base is computed for. transformers uses the length of the current sequence, which
    leaves cached keys rotated for another base; one length for all sequences makes cached KV the same everywhere."""
    low_freq_factor: float = 0.0
    """``llama3``: frequencies that turn less often than this within the trained length are divided by ``factor``."""
    high_freq_factor: float = 0.0
    """``llama3``: frequencies that turn more often than this are kept."""
    attention_factor: float = 1.0
    """``yarn``: factor on cosines and sines."""
    beta_fast: float = 0.0
    """``yarn``: dimensions that turn more often than this within the trained length are kept."""
    beta_slow: float = 0.0
    """``yarn``: dimensions that turn less often than this are interpolated."""
    truncate: bool = True
    """``yarn``: round the bounds between them outwards to whole dimensions."""

    def context_length(self, max_position_embeddings: int) -> int:
        """Tokens of the longest sequence of a checkpoint whose config.json has ``max_position_embeddings``."""
        match self.type:
            case "linear" | "dynamic":
                return int(max_position_embeddings * self.factor)
            case "yarn":
                return int(self.trained_length * self.factor)
        return max_position_embeddings

    def at_length(self, length: int) -> RopeConfig:
        """Return the embedding for sequences of up to ``length`` tokens; only dynamic scaling depends on it."""
        return replace(self, length=length) if self.type == "dynamic" else self


def parse_ropes(values: Mapping[str, object]) -> dict[str, RopeConfig]:
    """Parse the rotary embedding of each layer type.

    Args:
        values: config.json over the family's defaults.

    Raises:
        ValueError: an unsupported type or option, named; a missing or inconsistent number.
    """
    given = _merged(values)
    if any(layer_type in given for layer_type in (FULL, SLIDING)):
        local = {**values, "rope_theta": values.get("rope_local_base_freq", values.get("rope_theta"))}
        return {FULL: _parse_rope(values, given.get(FULL) or {}), SLIDING: _parse_rope(local, given.get(SLIDING) or {})}
    rope = _parse_rope(values, given)
    if values.get("rope_local_base_freq") is None:
        return {FULL: rope, SLIDING: rope}
    return {FULL: rope, SLIDING: RopeConfig(theta=positive_float(values, "rope_local_base_freq"))}


def _merged(values: Mapping[str, object]) -> dict[str, Any]:
    """Merge ``rope_scaling``, often pasted from a model card, into ``rope_parameters``; transformers would lose the
    latter's ``rope_theta``."""
    newer, older = values.get("rope_parameters") or {}, values.get("rope_scaling") or {}
    if not newer and not older:
        newer = values.get("default_rope", newer)
    if not isinstance(newer, dict) or not isinstance(older, dict):
        raise ValueError("config.json: rope_parameters is not an object; download config.json again")
    if "type" in older:
        older = {"rope_type": older["type"], **{key: value for key, value in older.items() if key != "type"}}
    for key in older.keys() & newer.keys():
        if older[key] != newer[key] and newer[key] != "default":
            raise ValueError(
                f"config.json: rope_scaling has {key} {older[key]!r} and rope_parameters {newer[key]!r}; "
                "remove one of them"
            )
    if older and any(layer_type in newer for layer_type in (FULL, SLIDING)) and older != newer:
        raise ValueError(
            "config.json: rope_scaling is set beside rope_parameters of each layer type; remove it, or write it there"
        )
    return {**newer, **older}


def _parse_rope(values: Mapping[str, object], given: Mapping[str, object]) -> RopeConfig:
    """Parse the object ``given``; ``values`` are its defaults."""
    if not isinstance(given, dict):
        raise ValueError("config.json: rope_parameters of a layer type is not an object; download config.json again")
    rope = {**{key: values[key] for key in ("rope_theta", "partial_rotary_factor") if key in values}, **given}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    rope_type = "default" if rope_type == "mrope" else rope_type  # of text alone they are the same
    if rope_type not in _TYPES:
        raise ValueError(
            f"config.json: rope type {rope_type!r} is not supported; serve a checkpoint with one of {', '.join(_TYPES)}"
        )
    if rope.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise ValueError(
            "config.json: partial_rotary_factor is not supported; serve a checkpoint that rotates whole heads"
        )
    max_positions = positive_int(values, "max_position_embeddings")
    trained_length = positive_int(
        values,
        "original_max_position_embeddings",
        positive_int(rope, "original_max_position_embeddings", max_positions),
    )
    config = RopeConfig(theta=positive_float(rope, "rope_theta", 10000.0), type=rope_type)
    if rope_type == "yarn":
        return _with_yarn(config, rope, trained_length, max_positions)
    if rope_type != "default":
        config = replace(config, factor=positive_float(rope, "factor"))
    if rope_type == "dynamic":
        return replace(config, trained_length=max_positions, length=int(max_positions * config.factor))
    if rope_type == "llama3":
        low, high = positive_float(rope, "low_freq_factor"), positive_float(rope, "high_freq_factor")
        if high <= low:
            raise ValueError(
                "config.json: rope high_freq_factor must be above low_freq_factor; download config.json again"
            )
        return replace(config, low_freq_factor=low, high_freq_factor=high, trained_length=trained_length)
    return config


def _with_yarn(config: RopeConfig, rope: Mapping[str, object], trained_length: int, max_positions: int) -> RopeConfig:
    factor = positive_float(rope, "factor", max_positions / trained_length)
    sharpening = _yarn_sharpening(factor, 1.0)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        sharpening = _yarn_sharpening(factor, positive_float(rope, "mscale"))
        sharpening /= _yarn_sharpening(factor, positive_float(rope, "mscale_all_dim"))
    return replace(
        config,
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
