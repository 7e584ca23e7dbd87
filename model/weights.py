"""Reads a checkpoint's safetensors into tensors that the model has laid out, and refuses any mismatch as a whole.

Files are memory-mapped and copied tensor by tensor to their place (which may be part of a fused weight), so that the
model is in memory once. Knows names and shapes, not what they mean. Never unpickles.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

_INDEX_NAME = "model.safetensors.index.json"
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


def load_weights(
    folder: Path, destinations: Mapping[str, torch.Tensor], *, dtype: torch.dtype, ignored_suffixes: tuple[str, ...]
) -> None:
    """Copy every tensor of the checkpoint in ``folder`` to the destination of its name.

    Args:
        folder: holds model.safetensors, or shards and their index.
        destinations: what the model needs, by checkpoint name; views of fused weights are welcome.
        dtype: values are rounded to this before they are stored in the destination's own dtype.
        ignored_suffixes: tensors whose names end so may be in the checkpoint and are not needed.

    Raises:
        ValueError: no safetensors, a missing or damaged file, or a checkpoint that does not match: all missing, extra
            and misshapen tensors are named.
    """
    with ExitStack() as stack:
        shards = [stack.enter_context(_open(path)) for path in shard_paths(folder)]
        shard_of = {name: shard for shard in shards for name in shard.keys()}  # noqa: SIM118
        _check_match(folder, destinations, shard_of, ignored_suffixes)
        for name, destination in destinations.items():
            destination.copy_(shard_of[name].get_tensor(name).to(dtype))


def shard_paths(folder: Path) -> list[Path]:
    """The safetensors files of the checkpoint in ``folder``.

    Raises:
        ValueError: there are none, or the index names one that is not there or lies elsewhere.
    """
    index = folder / _INDEX_NAME
    names = {"model.safetensors"}
    if index.exists():
        names = _indexed_names(index)
    elif not (folder / "model.safetensors").exists():
        raise ValueError(f"{folder} holds no model.safetensors and no {_INDEX_NAME}; {_remedy_without(folder)}")
    missing = sorted(name for name in names if not (folder / name).exists())
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(missing)}, named in {_INDEX_NAME}; download the missing files")
    return [folder / name for name in sorted(names)]


def _indexed_names(index: Path) -> set[str]:
    """File names in the index: of safetensors beside it only, which are the files that the model's hash covers."""
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} names no shards ({error!r}); download it again") from error
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{index} names no shards; download it again")
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{index} names {name!r}, which is no .safetensors file beside it; download it again")
    return names


def _remedy_without(folder: Path) -> str:
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if not pickled:
        return "name a folder written by save_pretrained()"
    return (
        f"{', '.join(pickled)} are pickles, which can run code and are never loaded: convert them with transformers, "
        "from_pretrained(...).save_pretrained(...), on a machine you trust them on"
    )


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read as safetensors ({error}); download it again") from error


def _check_match(
    folder: Path, destinations: Mapping[str, torch.Tensor], shard_of: Mapping[str, Any], ignored: tuple[str, ...]
) -> None:
    problems = [f"missing {name}" for name in destinations if name not in shard_of]
    problems += [
        f"unexpected {name}" for name in sorted(shard_of) if name not in destinations and not name.endswith(ignored)
    ]
    for name, destination in destinations.items():
        if name not in shard_of:
            continue
        stored = shard_of[name].get_slice(name)
        if tuple(stored.get_shape()) != tuple(destination.shape):
            problems.append(f"{name} has shape {stored.get_shape()}, not {list(destination.shape)}")
        elif stored.get_dtype() not in _FLOAT_DTYPES:
            problems.append(f"{name} has dtype {stored.get_dtype()}, not one of {', '.join(_FLOAT_DTYPES)}")
    if problems:
        raise ValueError(
            f"{folder}: weights do not match config.json: {'; '.join(problems)}. "
            "Take config.json and weights from one and the same checkpoint"
        )
