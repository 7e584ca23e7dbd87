"""Types of a kernel benchmark: a case with its work, our kernel, and its peers.

The case modules fill them in; `pdserve.bench.kernels.measure` measures them. Touches no device.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

REACHED_BANDWIDTH = 0.9
"""Share of a device's bandwidth that the best streaming kernels reach: the 0.9 of every kernel's formula."""


class Limits(NamedTuple):
    """What a device can do, by its data sheet."""

    flops: float
    """Of its tensor cores in bfloat16, a second, without sparsity."""
    bandwidth: float
    """Of its memory, bytes a second."""
    link_bandwidth: float
    """Between its memory and the host's, one direction, bytes a second."""


class Work(NamedTuple):
    """What has to be done whoever does it: the formula in the docstring of a kernel, for one shape."""

    num_bytes: float
    """That are read and written, or that cross the link."""
    flops: float = 0.0
    flops_share: float = 1.0
    """Of the peak, that the formula asks for."""
    crosses_link: bool = False
    """The bytes go to the host's memory or come from there."""

    def limit_s(self, limits: Limits) -> float:
        """The seconds that the formula allows."""
        bandwidth = limits.link_bandwidth if self.crosses_link else REACHED_BANDWIDTH * limits.bandwidth
        return max(self.num_bytes / bandwidth, self.flops / (self.flops_share * limits.flops))


def _as_it_is(outcome: torch.Tensor) -> torch.Tensor:
    return outcome


class Contender(NamedTuple):
    """A kernel with its inputs."""

    run: Callable[[], Any]
    """What is timed."""
    read: Callable[[Any], torch.Tensor] = _as_it_is
    """Makes what a run returned into what is compared."""


class PeerAbsentError(Exception):
    """A peer cannot take part, and the message says why."""


def import_peer(name: str) -> Any:
    """The package of a peer.

    Raises:
        PeerAbsentError: it cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PeerAbsentError(f"cannot be imported: {error}") from error


MakePeer = Callable[[], Contender]
"""Prepares a peer. Raises `PeerAbsentError`, or whatever the peer itself raises."""


class Contest(NamedTuple):
    """One shape on one device."""

    own: Contender
    peers: Mapping[str, MakePeer]
    tolerance: float
    """Largest difference of what a peer computes, as a share of its largest magnitude."""


class Case(Protocol):
    """A kernel and a shape."""

    @property
    def kernel(self) -> str: ...

    @property
    def shape(self) -> str:
        """In words."""
        ...

    @property
    def work(self) -> Work: ...

    def contest(self, device: torch.device) -> Contest:
        """With inputs on ``device``."""
        ...
