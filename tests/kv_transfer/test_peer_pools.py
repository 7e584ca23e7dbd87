from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from pdserve.kv_transfer.peer_pools import PeerPools
from pdserve.kv_transfer.pool_memory import PoolMemory
from tests.kv_transfer.peer import LAYOUT


def _num_mappings(inode: int) -> int:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:pdserve-kv" in line and line.split()[4] == str(inode) for line in lines)


def test_a_pool_is_mapped_once() -> None:
    owner = PoolMemory.create(LAYOUT)
    pools = PeerPools()
    first = pools.get(owner.path, owner.inode, LAYOUT)
    assert pools.get(owner.path, owner.inode, LAYOUT) is first
    pools.drop_gone()
    assert pools.get(owner.path, owner.inode, LAYOUT) is first
    owner.close()


def test_a_pool_is_dropped_when_its_owner_is_gone() -> None:
    pools = PeerPools()
    owner = PoolMemory.create(LAYOUT)
    path, inode = owner.path, owner.inode
    owner.block(0, 0, 1)[:2] = b"kv"
    running_copy = pools.get(path, inode, LAYOUT)
    owner.close()
    del owner
    pools.drop_gone()
    assert bytes(running_copy.block(0, 0, 1)[:2]) == b"kv"
    assert _num_mappings(inode) == 1
    with pytest.raises(OSError, match="No such file"):
        pools.get(path, inode, LAYOUT)
    del running_copy
    gc.collect()
    assert _num_mappings(inode) == 0


def test_a_wrong_inode_is_not_kept() -> None:
    owner = PoolMemory.create(LAYOUT)
    pools = PeerPools()
    num_fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="inode"):
        pools.get(owner.path, owner.inode + 1, LAYOUT)
    assert len(os.listdir("/proc/self/fd")) == num_fds
    owner.close()
