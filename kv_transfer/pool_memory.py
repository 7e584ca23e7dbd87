"""Memory of one rank's KV pool: an anonymous file (memfd) that processes of this host map.

The file is a page-aligned header with a 64-bit generation per block, followed by the blocks as described by
`KvLayout`. The engine creates it, its transfer process maps the inherited descriptor, and peers map it read-only
through ``/proc``. Only the block pool knows the owners of blocks.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise

from pdserve.contracts.kv_layout import KvLayout
from pdserve.kv_transfer.host_limits import available_memory_bytes

GENERATION_BYTES = 8
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_FD_PATH = re.compile(r"/proc/\d+/fd/\d+")


class PoolMemory:
    """A mapped pool. Build it with `create`, `from_fd` or `open_peer`."""

    def __init__(self, layout: KvLayout, fd: int, mapping: mmap.mmap, inode: int) -> None:
        self.layout = layout
        self.fd = fd
        """Descriptor of the file; -1 for a peer's pool and after `close`."""
        self.inode = inode
        header_bytes = _header_bytes(layout)
        self.generations: memoryview[int] = memoryview(mapping)[: layout.num_blocks * GENERATION_BYTES].cast("Q")
        """``[num_blocks]``. The owner's block pool raises an entry whenever it gives the block to a new owner."""
        self.blocks: memoryview[int] = memoryview(mapping)[header_bytes : header_bytes + layout.pool_bytes]
        """``[pool_bytes]`` bytes, with shape `KvLayout.shape`."""
        self._mapping = mapping

    @classmethod
    def create(cls, layout: KvLayout) -> PoolMemory:
        """Allocate a zeroed pool, readable and writable.

        Raises:
            ValueError: the pool holds no block, or the host lacks memory for it.
            OSError: the kernel refuses the memory.
        """
        if layout.num_blocks < 1:
            raise ValueError(f"the KV pool holds no block: raise kv_memory to {layout.block_bytes} bytes at least")
        size = _file_bytes(layout)
        available = available_memory_bytes()
        if size > available:
            raise ValueError(f"the KV pool needs {size} bytes and {available} are available: lower kv_memory")
        fd = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            # Sealed: a peer that has the file mapped would die of SIGBUS if the file shrank.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls._map(layout, fd)
        except OSError as error:
            os.close(fd)
            raise OSError(error.errno, f"no {size} bytes for the KV pool, lower kv_memory: {error.strerror}") from error

    @classmethod
    def from_fd(cls, fd: int, layout: KvLayout) -> PoolMemory:
        """Map an inherited descriptor, readable and writable. The result owns ``fd``.

        Raises:
            ValueError: the file size does not match the layout.
        """
        _check_size(os.fstat(fd).st_size, layout)
        return cls._map(layout, fd)

    @classmethod
    def open_peer(cls, path: str, inode: int, layout: KvLayout) -> PoolMemory:
        """Map another process's pool read-only.

        Args:
            path: ``/proc/<pid>/fd/<n>``.
            inode: inode expected at the path, which detects a reused process id.
            layout: the peer's.

        Raises:
            ValueError: the path leads to another file.
            OSError: this process cannot open it.
        """
        if not _FD_PATH.fullmatch(path):
            raise ValueError(f"{path!r} is not a /proc/<pid>/fd/<n> path")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if status.st_ino != inode:
                raise ValueError(f"{path} leads to inode {status.st_ino}, not {inode}")
            _check_size(status.st_size, layout)
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise ValueError(f"{path} is not sealed against a change of size")
            mapping = mmap.mmap(fd, status.st_size, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(fd)
        return cls(layout, -1, mapping, inode)

    @classmethod
    def _map(cls, layout: KvLayout, fd: int) -> PoolMemory:
        return cls(layout, fd, mmap.mmap(fd, _file_bytes(layout)), os.fstat(fd).st_ino)

    @property
    def path(self) -> str:
        """Path of the file for other processes of this host, valid while this process keeps it open."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def block(self, block_id: int, head_start: int, head_end: int) -> memoryview[int]:
        """Bytes of KV heads ``[head_start, head_end)`` of a block: one contiguous run."""
        assert 0 <= block_id < self.layout.num_blocks, block_id
        assert 0 <= head_start < head_end <= self.layout.num_kv_heads, (head_start, head_end)
        start = block_id * self.layout.block_bytes
        head_bytes = self.layout.head_bytes
        return self.blocks[start + head_start * head_bytes : start + head_end * head_bytes]

    def release(self, block_ids: Iterable[int]) -> None:
        """Give the host memory of blocks back: they read as zeros until they are written again.

        Pages that other blocks share stay. For a file that stages a pool in GPU memory.
        """
        header_bytes, block_bytes = _header_bytes(self.layout), self.layout.block_bytes
        for first, last in _runs(sorted(block_ids)):
            start = _whole_pages(header_bytes + first * block_bytes)
            end = (header_bytes + (last + 1) * block_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if start < end:
                self._mapping.madvise(mmap.MADV_REMOVE, start, end - start)

    def close(self) -> None:
        """Unmap the memory. A view still in use, such as a tensor's, keeps it mapped until it is dropped."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        with suppress(BufferError):
            self.generations.release()
            self.blocks.release()
            self._mapping.close()


class PeerPools:
    """Pools of other workers on this host, each mapped once and kept while its owner lives.

    Mappings are kept because the first touch of every page costs far more than its copy. A mapping also keeps the
    memory of a dead worker alive, so the transfer process calls `drop_gone` regularly.
    """

    def __init__(self) -> None:
        self._pools: dict[tuple[str, int], PoolMemory] = {}

    def get(self, path: str, inode: int, layout: KvLayout) -> PoolMemory:
        """Return the pool at ``path``, mapping it if needed.

        Raises:
            ValueError: the path leads to another file.
            OSError: this process cannot open it.
        """
        pool = self._pools.get((path, inode))
        if pool is None or pool.layout != layout:
            pool = self._pools[path, inode] = PoolMemory.open_peer(path, inode, layout)
        return pool

    def drop_gone(self) -> None:
        """Forget pools whose owner has closed them or died. A running copy keeps its mapping until it ends."""
        for path, inode in [key for key in self._pools if not leads_to(*key)]:
            del self._pools[path, inode]


def leads_to(path: str, inode: int) -> bool:
    """Whether a ``/proc/<pid>/fd/<n>`` path leads to this file: its process runs, and keeps it open."""
    try:
        return os.stat(path).st_ino == inode
    except OSError:
        return False


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last of each run of consecutive numbers, which ascend."""
    starts = [i for i, number in enumerate(numbers) if not i or number != numbers[i - 1] + 1]
    for start, end in pairwise([*starts, len(numbers)]):
        yield numbers[start], numbers[end - 1]


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _header_bytes(layout: KvLayout) -> int:
    return _whole_pages(layout.num_blocks * GENERATION_BYTES)


def _file_bytes(layout: KvLayout) -> int:
    return _header_bytes(layout) + layout.pool_bytes


def _check_size(size: int, layout: KvLayout) -> None:
    if size != _file_bytes(layout):
        raise ValueError(
            f"the file of a pool of {layout.num_blocks} blocks has {_file_bytes(layout)} bytes, not {size}"
        )
