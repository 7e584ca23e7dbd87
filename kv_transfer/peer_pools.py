"""Pools of other workers on this host, mapped once each and kept while their owner lives.

Mapping is kept because the first touch of every page costs far more than its copy. A mapping also keeps the memory of
a dead worker alive, so what is gone must be dropped soon: the transfer process calls `PeerPools.drop_gone` regularly.
"""

from __future__ import annotations

import os

from pdserve.contracts.kv_layout import KvLayout
from pdserve.kv_transfer.pool_memory import PoolMemory


class PeerPools:
    """The mapped pools, by path and inode."""

    def __init__(self) -> None:
        self._pools: dict[tuple[str, int], PoolMemory] = {}

    def get(self, path: str, inode: int, layout: KvLayout) -> PoolMemory:
        """The pool at ``path``, mapped now or before.

        Raises:
            ValueError: the path leads to something else.
            OSError: it cannot be opened from here.
        """
        pool = self._pools.get((path, inode))
        if pool is None or pool.layout != layout:
            pool = self._pools[path, inode] = PoolMemory.open_peer(path, inode, layout)
        return pool

    def drop_gone(self) -> None:
        """Forget pools whose owner has closed them or died. A copy still running keeps its mapping to the end."""
        for path, inode in [key for key in self._pools if not _leads_to(*key)]:
            del self._pools[path, inode]


def _leads_to(path: str, inode: int) -> bool:
    try:
        return os.stat(path).st_ino == inode
    except OSError:
        return False
