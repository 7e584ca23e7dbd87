"""Reads the shape of the model to plan for from a config.json, or from the folder that holds one. Needs no weights.

Called by the command line. Accepts any decoder whose config gives its shape, even if the engine cannot serve it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pdserve.contracts.precision import Precision
from pdserve.model.config.decoder_config import download_hint, parse_config
from pdserve.model.config.families import FAMILIES, PLANNED_FAMILIES, find_family
from pdserve.model.config.quantisation import parse_scheme, served_scheme
from pdserve.model.config.shape import ModelShape, positive_int
from pdserve.planner.layout import BFLOAT16, PlannedModel

MAX_DEFAULT_LENGTH = 8192
"""Default of a plan's limit on the tokens of a sequence: many models support far more than their users need, and every
layout must hold one such sequence."""


def read_planned_model(
    path: Path,
    *,
    precision: Precision = BFLOAT16,
    block_size: int = 16,
    max_model_len: int = 0,
) -> PlannedModel:
    """The model at ``path``, in ``precision``. A checkpoint that is quantised in a way that is not known can be planned
    for, too, if ``precision`` has a quantization of as many bytes.

    Args:
        max_model_len: 0 uses the model's own limit, as `pdserve up` does.

    Raises:
        ValueError: there is no such file, or no known decoder of known precision in it.
    """
    file = path / "config.json" if path.is_dir() else path
    values = _read_object(file)
    try:
        known = _with_architectures(values)
        shape = ModelShape.from_hf_config(_with_known_scheme(known, precision.quantization))
        max_model_len = max_model_len or _own_limit(known)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return PlannedModel(
        shape=shape,
        name=_name(file),
        precision=precision,
        block_size=block_size,
        max_model_len=max_model_len,
        unserved=_unserved(values, precision.quantization),
    )


def _own_limit(values: Mapping[str, object]) -> int:
    """Tokens of the longest sequence; of a decoder that cannot be served, without what scaled rope adds."""
    try:
        return parse_config(values, {}).max_context_length
    except ValueError:
        text = values.get("text_config")
        return positive_int(
            text if isinstance(text, Mapping) else values, "max_position_embeddings", MAX_DEFAULT_LENGTH
        )


def _with_known_scheme(values: Mapping[str, object], quantization: str) -> Mapping[str, object]:
    """``values`` without their quantisation, if ``quantization`` is planned for instead.

    Raises:
        ValueError: it is not known.
    """
    if quantization != "auto":
        none: Mapping[str, object] = {"quantization_config": None, "compression_config": None}
        text = values.get("text_config")
        return {**values, **none} | ({"text_config": {**text, **none}} if isinstance(text, Mapping) else {})
    try:
        parse_scheme(values)
    except ValueError as error:
        raise ValueError(
            f"{error}; or plan with --set model.quantization=fp8, int8 or int4, whichever has as many bytes a weight"
        ) from error
    return values


def _with_architectures(values: Mapping[str, object]) -> Mapping[str, object]:
    """``values`` with the architecture that ``model_type`` names, if they have none.

    Raises:
        ValueError: the config would be planned as another model.
    """
    families = {**FAMILIES, **PLANNED_FAMILIES}
    architectures, kind = values.get("architectures"), str(values.get("model_type", ""))
    if not architectures:
        start = f"{kind.removesuffix('_text').replace('_', '')}for"
        names = [name for name in families if name.lower().startswith(start)]
        values = {**values, "architectures": names[-1:] if "text_config" in values else names[:1]}
    if find_family(values, families) is None:
        found = f"architectures {architectures} are" if architectures else f"model_type {kind} is"
        raise ValueError(
            f"{found} not known; plan for one of {', '.join(sorted(families))}, or write LlamaForCausalLM as "
            "architectures of a copy of the file if the layers are Llama's"
        )
    num_heads, num_kv_heads = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if isinstance(num_heads, int) and isinstance(num_kv_heads, int) and num_kv_heads > 0 and num_heads % num_kv_heads:
        raise ValueError(
            f"num_key_value_heads {num_kv_heads} does not divide num_attention_heads {num_heads}: download it again"
        )
    return values


def _unserved(values: Mapping[str, object], quantization: str) -> str:
    if find_family(values, FAMILIES) is None:
        return f"{values.get('architectures') or 'a config.json without architectures'} cannot be served yet"
    try:
        served_scheme(quantization, parse_scheme(values))
    except ValueError as error:
        return str(error)
    return ""


def _name(file: Path) -> str:
    """Display name: the folder of a config.json, or the file's own name."""
    resolved = file.resolve()
    return resolved.parent.name if resolved.name == "config.json" else resolved.stem


def _read_object(file: Path) -> Mapping[str, object]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        remedy = f"give --model a folder with a config.json, or the file itself{download_hint(file)}"
        raise ValueError(f"no model at {file}; {remedy}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(values, Mapping):
        raise ValueError(f"{file} is not a JSON object; give --model a Hugging Face config.json")
    return values
