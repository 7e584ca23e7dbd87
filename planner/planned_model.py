"""Reads the shape of the model to plan for from a config.json, or from the folder that holds one. Needs no weights.

Called by the command line. Accepts any decoder whose config gives its shape, even if the engine cannot serve it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pdserve.contracts.precision import Precision
from pdserve.model.config.families import FAMILIES, PLANNED_FAMILIES, find_family
from pdserve.model.config.shape import ModelShape, positive_int
from pdserve.planner.layout import BFLOAT16, PlannedModel

MAX_DEFAULT_LENGTH = 8192
"""Default limit on the tokens of a sequence: many models support far more than their users need, and every layout must
hold one such sequence."""


def read_planned_model(
    path: Path,
    *,
    precision: Precision = BFLOAT16,
    block_size: int = 16,
    max_model_len: int = 0,
) -> PlannedModel:
    """The model at ``path``, in ``precision`` or, if that leaves weights as they are, in the checkpoint's quantisation.

    Args:
        max_model_len: 0 uses the model's own limit, or `MAX_DEFAULT_LENGTH` if that is less.

    Raises:
        ValueError: there is no such file, or no known decoder of known precision in it.
    """
    file = path / "config.json" if path.is_dir() else path
    values = _read_object(file)
    try:
        known = _with_architectures(values)
        if precision.quantization == "none":
            precision = replace(precision, quantization=_checkpoint_quantization(values))
        shape = ModelShape.from_hf_config(known)
        own_limit = positive_int(values, "max_position_embeddings", MAX_DEFAULT_LENGTH)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return PlannedModel(
        shape=shape,
        name=_name(file),
        precision=precision,
        block_size=block_size,
        max_model_len=max_model_len or min(own_limit, MAX_DEFAULT_LENGTH),
        unserved=_unserved(values),
    )


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


def _unserved(values: Mapping[str, object]) -> str:
    if find_family(values, FAMILIES) is None:
        return f"{values.get('architectures') or 'a config.json without architectures'} cannot be served yet"
    return "quantised checkpoints cannot be served yet" if values.get("quantization_config") else ""


def _checkpoint_quantization(values: Mapping[str, object]) -> str:
    """Setting of the same bytes per weight as the ``quantization_config`` of a checkpoint, as transformers and vLLM
    read it; ``none`` without one.

    Raises:
        ValueError: a method that is not known.
    """
    config = values.get("quantization_config")
    if not config:
        return "none"
    if not isinstance(config, Mapping):
        raise ValueError(f"quantization_config must be an object, not {config!r}; download it again")
    method = config.get("quant_method")
    kind: tuple[object, object] = "int", config.get("bits")  # gptq, awq
    if method in ("fp8", "fbgemm_fp8"):
        kind = "float", 8
    elif method == "bitsandbytes":
        kind = "int", 4 if config.get("load_in_4bit") else 8
    elif method == "compressed-tensors" and isinstance(groups := config.get("config_groups"), Mapping):
        weights = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
        kinds = {(each.get("type"), each.get("num_bits")) for each in weights if isinstance(each, Mapping)}
        kind = kinds.pop() if len(kinds) == 1 else ("mixed", None)
    known = {("float", 8): "fp8", ("int", 8): "int8", ("int", 4): "int4"}
    if kind not in known:
        raise ValueError(
            f"its weights are quantised in a way that is not known ({method or 'no method'}): give --quantization fp8, "
            "int8 or int4, whichever has as many bytes a weight"
        )
    return known[kind]


def _name(file: Path) -> str:
    """Display name: the folder of a config.json, or the file's own name."""
    resolved = file.resolve()
    return resolved.parent.name if resolved.name == "config.json" else resolved.stem


def _read_object(file: Path) -> Mapping[str, object]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"no model at {file}; give --model a folder with a config.json, or the file itself") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(values, Mapping):
        raise ValueError(f"{file} is not a JSON object; give --model a Hugging Face config.json")
    return values
