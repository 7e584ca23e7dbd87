"""What an engine tells its transfer process when it starts it: the first frame on their pipe, as JSON.

Not on the command line, where every user of the host could read the cluster token.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

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

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> TransferConfig:
        fields = json.loads(data)
        layout = KvLayout(**fields.pop("layout"))
        return cls(layout=layout, cpu_cores=tuple(fields.pop("cpu_cores")), **fields)
