"""Where these tests run: on a GPU, with the shapes of serving, or rehearsed on a CPU, with few and small ones.

Kernels are called as if they computed on the host, so that inputs and references are those of the tests on a CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch

from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.metadata import AttentionMetadata

IS_REHEARSED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter stands in for the GPU."""
DEVICE = torch.device("cpu") if IS_REHEARSED else torch.device("cuda", 0)

_P = ParamSpec("_P")
_R = TypeVar("_R")


def some(cases: Sequence[_R], num_rehearsed: int = 2) -> Sequence[_R]:
    """All of them on a GPU, and the first ones in a rehearsal."""
    return cases[:num_rehearsed] if IS_REHEARSED else cases


def sized(of_serving: _R, rehearsed: _R) -> _R:
    return rehearsed if IS_REHEARSED else of_serving


def on_device(operation: Callable[_P, _R]) -> Callable[_P, _R]:
    """``operation`` of tensors and pools that lie on the host: they go to the device, and come back as it leaves them.

    What it takes from `torch.empty` is NaN.
    """

    @wraps(operation)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        moved: list[tuple[torch.Tensor, torch.Tensor]] = []
        there = [_to_device(argument, moved) for argument in args]
        named = {name: _to_device(argument, moved) for name, argument in kwargs.items()}
        was_deterministic = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            result = cast(Callable[..., _R], operation)(*there, **named)
        finally:
            torch.use_deterministic_algorithms(was_deterministic)
        for host, device in moved:
            host.copy_(device)
        return cast(_R, _to_host(result, moved))

    return run


def _to_device(value: Any, moved: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    if isinstance(value, torch.Tensor):
        moved.append((value, value.to(DEVICE)))
        return moved[-1][1]
    if isinstance(value, KvPool):
        there = KvPool(value.blocks.flatten().to(DEVICE), value.shape, value.dtype)
        moved.append((value.blocks, there.blocks))
        return there
    if isinstance(value, AttentionMetadata):
        return value.to(DEVICE)
    if isinstance(value, tuple) and any(isinstance(part, torch.Tensor) for part in value):
        return type(value)(*(_to_device(part, moved) for part in value))
    return value


def _to_host(value: Any, moved: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    if isinstance(value, torch.Tensor):
        return next((host for host, device in moved if device is value), value.cpu())
    if isinstance(value, tuple):
        return type(value)(*(_to_host(part, moved) for part in value))
    return value
