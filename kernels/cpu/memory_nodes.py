"""Memory nodes (NUMA) of a host's cores. Never imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_CORES = Path("/sys/devices/system/cpu")


def memory_nodes(cores: Iterable[int]) -> frozenset[str]:
    """Nodes whose memory is the nearest for some of ``cores``, such as ``node0``; none where the kernel names none."""
    return frozenset(link.name for core in cores for link in (_CORES / f"cpu{core}").glob("node[0-9]*"))
