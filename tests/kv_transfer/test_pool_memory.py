from __future__ import annotations

import gc
import mmap
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pdserve.kv_transfer.pool_memory import PeerPools, PoolMemory
from tests.kv_transfer.peer import LAYOUT


def test_blocks_follow_the_layout() -> None:
    memory = PoolMemory.create(LAYOUT)
    pool = np.frombuffer(memory.blocks, dtype=np.float32).reshape(LAYOUT.shape)
    pool[5, 1] = 3.5
    assert len(memory.blocks) == LAYOUT.pool_bytes
    assert set(np.frombuffer(memory.block(5, 1, 2), dtype=np.float32)) == {3.5}
    assert not any(memory.block(5, 0, 1))
    assert not any(memory.block(4, 0, 2))
    del pool
    memory.close()


def test_generations_do_not_overlap_blocks() -> None:
    memory = PoolMemory.create(LAYOUT)
    for block_id in range(LAYOUT.num_blocks):
        memory.generations[block_id] = 2**64 - 1
    assert len(memory.generations) == LAYOUT.num_blocks
    assert not any(memory.blocks)
    memory.close()


def test_inherited_descriptor_maps_the_same_memory() -> None:
    owner = PoolMemory.create(LAYOUT)
    inherited = PoolMemory.from_fd(os.dup(owner.fd), LAYOUT)
    inherited.block(63, 0, 2)[:] = bytes([9]) * LAYOUT.block_bytes
    owner.generations[63] = 17
    assert set(owner.block(63, 0, 2)) == {9}
    assert inherited.generations[63] == 17
    inherited.close()
    owner.close()


@pytest.mark.parametrize("block_size", [4, 64], ids=["blocks share pages", "blocks of pages"])
def test_released_blocks_take_no_memory_and_their_neighbours_stay(block_size: int) -> None:
    layout = replace(LAYOUT, block_size=block_size)
    memory = PoolMemory.create(layout)
    memory.blocks[:] = bytes([9]) * layout.pool_bytes
    taken = os.fstat(memory.fd).st_blocks
    released = [*range(8, 40), 3]
    memory.release(released)
    pages = len(released) * layout.block_bytes // mmap.PAGESIZE
    freed = (taken - os.fstat(memory.fd).st_blocks) * 512 // mmap.PAGESIZE
    assert max(1, pages - 4) <= freed <= pages
    for block_id in set(range(layout.num_blocks)) - {*released}:
        assert set(memory.block(block_id, 0, 2)) == {9}
    assert not any(memory.block(20, 0, 2))
    memory.close()


def test_peer_sees_the_pool_and_cannot_write() -> None:
    owner = PoolMemory.create(LAYOUT)
    owner.block(2, 0, 1)[:3] = b"abc"
    owner.generations[2] = 5
    peer = PoolMemory.open_peer(owner.path, owner.inode, LAYOUT)
    assert bytes(peer.block(2, 0, 1)[:3]) == b"abc"
    assert peer.generations[2] == 5
    with pytest.raises(TypeError, match="read-only"):
        peer.block(2, 0, 1)[:3] = b"xyz"
    with pytest.raises(TypeError, match="read-only"):
        peer.generations[2] = 6
    peer.close()
    owner.close()


def test_peer_is_refused_when_the_path_leads_elsewhere() -> None:
    owner = PoolMemory.create(LAYOUT)
    with pytest.raises(ValueError, match="inode"):
        PoolMemory.open_peer(owner.path, owner.inode + 1, LAYOUT)
    with pytest.raises(ValueError, match="bytes"):
        PoolMemory.open_peer(owner.path, owner.inode, replace(LAYOUT, num_blocks=65))
    with pytest.raises(ValueError, match="path"):
        PoolMemory.open_peer("/etc/passwd", os.stat("/etc/passwd").st_ino, LAYOUT)
    path, inode = owner.path, owner.inode
    owner.close()
    with pytest.raises(OSError, match="No such file"):
        PoolMemory.open_peer(path, inode, LAYOUT)


def test_peer_refuses_a_file_that_could_shrink() -> None:
    owner = PoolMemory.create(LAYOUT)
    size = os.fstat(owner.fd).st_size
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(owner.fd, size - 1)
    owner.close()
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, size)
    with pytest.raises(ValueError, match="sealed"):
        PoolMemory.open_peer(f"/proc/{os.getpid()}/fd/{fd}", os.fstat(fd).st_ino, LAYOUT)
    os.close(fd)


def test_size_of_an_inherited_descriptor_is_checked() -> None:
    owner = PoolMemory.create(LAYOUT)
    with pytest.raises(ValueError, match="bytes"):
        PoolMemory.from_fd(owner.fd, replace(LAYOUT, block_size=8))
    owner.close()


@pytest.mark.parametrize("num_blocks", [0, 1 << 40])
def test_impossible_sizes_name_the_setting(num_blocks: int) -> None:
    with pytest.raises(ValueError, match="kv_memory"):
        PoolMemory.create(replace(LAYOUT, num_blocks=num_blocks))


def test_close_leaves_no_descriptor_and_tolerates_live_views() -> None:
    before = set(os.listdir("/proc/self/fd"))
    memory = PoolMemory.create(LAYOUT)
    view = np.frombuffer(memory.blocks, dtype=np.uint8)
    view[0] = 1
    memory.close()
    assert view[0] == 1
    memory.close()
    del view, memory
    assert set(os.listdir("/proc/self/fd")) <= before


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
    with pytest.raises(ValueError, match="bytes"):
        pools.get(owner.path, owner.inode, replace(LAYOUT, num_blocks=65))
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
    fds = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="inode"):
        pools.get(owner.path, owner.inode + 1, LAYOUT)
    assert set(os.listdir("/proc/self/fd")) <= fds
    owner.close()
