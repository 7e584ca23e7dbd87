"""What is launched while something runs, of Triton's kernels and of torch's operations: all but tensors' values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

WAITING_OPERATIONS = frozenset({"_local_scalar_dense", "nonzero", "item", "is_nonzero", "equal", "masked_select"})
"""The host would wait for a device to know what they return, or how large it is."""


class Launches(TorchDispatchMode):
    """Taken note of within `recorded_launches`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: list[tuple[object, ...]] = []
        self._is_interpreting = False

    def operations(self) -> set[object]:
        """Names of those of torch, and functions of Triton."""
        return {launch[0] for launch in self.launches}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_interpreting:
            name = func._schema.name.removeprefix("aten::")
            self.launches.append((name, _described(args), _described(tuple(kwargs.items()))))
        return func(*args, **kwargs)

    def interpret(self, run: Callable[..., None], kernel: Any, *args: Any, **kwargs: Any) -> None:
        """Note a kernel, and run it."""
        self.launches.append((kernel.fn, kernel.grid, _described(args), _described(tuple(kwargs.items()))))
        self._is_interpreting = True
        try:
            run(kernel, *args, **kwargs)
        finally:
            self._is_interpreting = False


@contextmanager
def recorded_launches() -> Iterator[Launches]:
    launches, run = Launches(), GridExecutor.__call__

    def interpret(kernel: Any, *args: Any, **kwargs: Any) -> None:
        launches.interpret(run, kernel, *args, **kwargs)

    with patch.object(GridExecutor, "__call__", interpret), launches:
        yield launches


def _described(argument: Any) -> object:
    """A tensor by its shape, strides and dtype; another argument by itself."""
    if isinstance(argument, torch.Tensor):
        return tuple(argument.shape), argument.stride(), argument.dtype
    if isinstance(argument, (list, tuple)):
        return tuple(map(_described, argument))
    return argument
