"""Sampling that a checkpoint's generation_config.json recommends, for requests that do not say.

As vLLM reads it: ``do_sample`` is not regarded. Read by the router. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pdserve.contracts.request import REPETITION_PENALTIES
from pdserve.model.config.tokenizer_config import read_json

_LIMITS: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_k": (-1, 2**31 - 1),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": REPETITION_PENALTIES,
    "max_new_tokens": (1, 2**31 - 1),
}


def sampling_defaults(folder: Path) -> dict[str, float]:
    """Parameters of generation_config.json by name; those that it lacks, or has as null, are left out.

    Raises:
        ValueError: one is out of range.
    """
    given = read_json(folder / "generation_config.json")
    defaults = {name: given[name] for name in _LIMITS if given.get(name) is not None}
    for name, value in defaults.items():
        least, most = _LIMITS[name]
        if type(value) not in (int, float) or not least <= value <= most:
            raise ValueError(
                f"generation_config.json: {name} {value!r} is not a number from {least:g} to {most:g}; correct it, or "
                "set model.generation_config to none"
            )
        defaults[name] = int(value) if name in ("top_k", "max_new_tokens") else value
    return defaults
