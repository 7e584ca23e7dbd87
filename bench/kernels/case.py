"""Types of a kernel benchmark: a case is a kernel at a shape, with its work and the implementations to compare.

The case modules build them; `pdserve.bench.kernels.measure` measures them. Touches no device.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

OWN = "pdserve"
REACHED_BANDWIDTH = 0.9
"""Share of a device's bandwidth that the best streaming kernels reach: the 0.9 of every kernel's formula."""


class Limits(NamedTuple):
    """A device's data sheet."""

    flops: float
    """bfloat16 FLOP/s of the tensor cores, without sparsity."""
    bandwidth: float
    """Bytes/s of its memory."""


class Work(NamedTuple):
    """Work that every implementation must do: the formula in the kernel's docstring, for one shape."""

    num_bytes: float
    """Read and written."""
    flops: float = 0.0
    flops_share: float = 1.0
    """Share of the peak that the formula asks for."""

    def limit_s(self, limits: Limits) -> float:
        """Seconds that the formula allows."""
        bytes_s = self.num_bytes / (REACHED_BANDWIDTH * limits.bandwidth)
        return max(bytes_s, self.flops / (self.flops_share * limits.flops))


def _unchanged(outcome: torch.Tensor) -> torch.Tensor:
    return outcome


class Implementation(NamedTuple):
    """A kernel with its inputs."""

    run: Callable[[], Any]
    """The timed call."""
    read: Callable[[Any], torch.Tensor] = _unchanged
    """Converts the result of ``run`` to the tensor that is compared."""


Make = Callable[[], Implementation]
"""Prepares an implementation. Raises `AbsentError`, or any exception of its library."""


class Case(NamedTuple):
    kernel: str
    shape: str
    work: Work
    make: Callable[[torch.device], Mapping[str, Make]]
    """Draws inputs on a device and returns the implementations by name, `OWN` among them."""
    tolerance: float = 0.0
    """Largest difference between results, as a share of the largest magnitude."""

    def own(self, device: torch.device) -> Implementation:
        return self.make(device)[OWN]()


class AbsentError(Exception):
    """An implementation cannot run here; the message gives the reason."""


def import_peer(name: str) -> Any:
    """Import the package of a peer.

    Raises:
        AbsentError: it cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise AbsentError(f"cannot be imported: {error}") from error
