"""Reads a checkpoint's safetensors, tensor by tensor, and refuses any mismatch as a whole before the first is read.

Files are memory-mapped, so that only what is being read takes memory. Knows names and shapes, not what they mean (that
is `pdserve.model.decoder_weights`). Never unpickles.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

_INDEX_NAME = "model.safetensors.index.json"
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


class Checkpoint:
    """The tensors of the checkpoint in a folder, readable while this context manager is entered."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        """Open model.safetensors, or the shards that their index names.

        Args:
            dtype: what is read is rounded to this.

        Raises:
            ValueError: no safetensors, or a missing or damaged file.
        """
        self._folder = folder
        self._dtype = dtype
        with ExitStack() as stack:
            shards = [stack.enter_context(_open(path)) for path in shard_paths(folder)]
            self._shard_of = {name: shard for shard in shards for name in shard.keys()}  # noqa: SIM118
            self._open_shards = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open_shards.close()

    def check(self, shapes: Mapping[str, tuple[int, ...]], ignored_suffixes: tuple[str, ...]) -> None:
        """Look at names, shapes and dtypes of all tensors, reading none.

        Args:
            shapes: of everything that the model needs.
            ignored_suffixes: tensors whose names end so may be there and are not needed.

        Raises:
            ValueError: the checkpoint does not match; all missing, extra and misshapen tensors are named.
        """
        problems = [f"missing {name}" for name in shapes if name not in self._shard_of]
        problems += [
            f"unexpected {name}"
            for name in sorted(self._shard_of)
            if name not in shapes and not name.endswith(ignored_suffixes)
        ]
        for name in shapes.keys() & self._shard_of.keys():
            problems += self._problems_of(name, shapes[name])
        if problems:
            raise ValueError(
                f"{self._folder}: weights do not match config.json: {'; '.join(problems)}. "
                "Take config.json and weights from one and the same checkpoint"
            )

    def _problems_of(self, name: str, shape: tuple[int, ...]) -> list[str]:
        stored = self._shard_of[name].get_slice(name)
        if tuple(stored.get_shape()) != shape:
            return [f"{name} has shape {stored.get_shape()}, not {list(shape)}"]
        if stored.get_dtype() not in _FLOAT_DTYPES:
            return [f"{name} has dtype {stored.get_dtype()}, not one of {', '.join(_FLOAT_DTYPES)}"]
        return []

    def read(self, *names: str) -> torch.Tensor:
        """The tensors of these names, one below the other along their first dimension, in memory of their own."""
        parts = [self._shard_of[name].get_tensor(name) for name in names]
        whole = torch.empty(sum(map(len, parts)), *parts[0].shape[1:], dtype=self._dtype)
        return torch.cat(parts, out=whole)


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
