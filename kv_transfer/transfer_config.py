"""The configuration of a transfer process: the first frame on the pipe from its engine, as JSON.

Not on the command line, where every user of the host could read the cluster token.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.contracts.kv_layout import KvLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """Settings of one transfer process."""

    layout: KvLayout
    worker_epoch: int
    """Incarnation of the worker; pulls of another one are refused."""
    host: str
    """Address to listen on and to be reached at."""
    cluster_token: str
    transport: str
    """``auto``, ``memfd`` or ``grpc``."""
    cpu_cores: tuple[int, ...]
    """Cores to run on; empty leaves the affinity alone."""
    parent_pid: int
    """The engine's process, with which the transfer process dies."""
