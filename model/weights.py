"""Reads a checkpoint's safetensors, tensor by tensor.

Files are memory-mapped, so that only what is being read takes memory. That they are there, whole and of the right model
is looked at before, by `pdserve.model.weight_files`. Knows names, not what they mean. Never unpickles.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from pdserve.model.weight_files import shard_paths


class Checkpoint:
    """The tensors of the checkpoint in a folder, readable while this context manager is entered."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        """Open model.safetensors, or the shards that their index names.

        Args:
            dtype: what is read is rounded to this.

        Raises:
            ValueError: no safetensors, or a missing or damaged file.
        """
        self._dtype = dtype
        with ExitStack() as stack:
            shards = [stack.enter_context(_open(path)) for path in shard_paths(folder)]
            self._shard_of = {name: shard for shard in shards for name in shard.keys()}  # noqa: SIM118
            self._open_shards = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open_shards.close()

    def read(self, *names: str) -> torch.Tensor:
        """The tensors of these names, one below the other along their first dimension, in memory of their own."""
        parts = [self._shard_of[name].get_tensor(name) for name in names]
        whole = torch.empty(sum(map(len, parts)), *parts[0].shape[1:], dtype=self._dtype)
        return torch.cat(parts, out=whole)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read as safetensors ({error}); download it again") from error
