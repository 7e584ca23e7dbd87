"""A tier below the prefix cache: copies of its blocks in slots of a file, found by hash, which outlives the worker.

The step loop tells `FileTier.follow` what the cache gained and lost. A thread copies new blocks, so that eviction
copies nothing, and restores those that a prompt waits for, through a buffer of its own: the step loop never waits for
the disk, and after `FileTier.end_restore` nothing writes to a restore's blocks. Any OSError switches the tier off.

File: a header that names its content, an entry per slot (hash, digest), then the slots, page-aligned. The digest covers
hash and block and is keyed by model, layout and cluster token: what is torn, truncated or foreign fails it and is not
used. Nothing is synced to the disk; what a crash of the host leaves is checked like everything else.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice, takewhile
from pathlib import Path

from pdserve.contracts.block_hash import BLOCK_HASH_BYTES
from pdserve.contracts.kv_layout import KV_LAYOUT_VERSION
from pdserve.kv_transfer.block_pool import BlockPool, CacheEvents
from pdserve.kv_transfer.pool_memory import PoolMemory

_DIGEST_BYTES = 32
_ENTRY_BYTES = BLOCK_HASH_BYTES + _DIGEST_BYTES
_PAGE_BYTES = 4096
_STOP_TIMEOUT_S = 2.0
TOLD_AT_ONCE = 8192
"""Most hashes found in the file that `FileTier.follow` tells in one call: routers read a frame as a whole."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Slot:
    """Content of a slot. A slot that gets other content gets another object."""

    index: int
    digest: bytes = b""
    """Empty until the block is in the file; written by the thread."""


@dataclass(slots=True, eq=False)
class _Copy:
    block_hash: bytes
    slot: _Slot
    block: int
    """-1 to clear the slot's entry."""
    generation: int = 0


@dataclass(slots=True, eq=False)
class _Restore:
    restore_id: int
    sources: list[tuple[bytes, _Slot]]
    blocks: Sequence[int]
    num_done: int = 0
    begun_s: float = 0.0
    ended_s: float = 0.0
    """0 before, as `begun_s`."""
    is_over: bool = False


class FileTier:
    """Slots by hash, the least recently used first. One step loop owns it; only `work` runs in a thread."""

    def __init__(
        self,
        path: Path,
        memory: PoolMemory,
        pool: BlockPool,
        *,
        size_bytes: int,
        max_model_len: int,
        secret: str,
        on_restored: Callable[[int], None],
    ) -> None:
        """Open the file, and find what an earlier worker left in it. If it cannot be opened, the tier is off.

        Args:
            memory: of the blocks of ``pool``.
            size_bytes: of the file, at most.
            max_model_len: some models rotate keys by it.
            secret: the cluster token. Files of clusters with other ones are begun anew.
            on_restored: called in the thread with the number of a restore that is done, or that failed.

        Raises:
            ValueError: the file would not be larger than the pool.
        """
        self._memory, self._pool = memory, pool
        self._block_bytes = memory.layout.block_bytes
        self._slot_bytes = -(-self._block_bytes // _PAGE_BYTES) * _PAGE_BYTES
        self.num_slots = max(0, size_bytes - 2 * _PAGE_BYTES) // (self._slot_bytes + _ENTRY_BYTES)
        if self.num_slots <= pool.num_blocks:
            least = (pool.num_blocks + 1) * (self._slot_bytes + _ENTRY_BYTES) + 2 * _PAGE_BYTES
            raise ValueError(
                f"kv_tier.size of {size_bytes / 2**20:.0f}MiB holds {self.num_slots} KV blocks, no more than the "
                f"pool's {pool.num_blocks}: raise it to {-(-least // 2**20)}MiB at least, or lower kv_memory"
            )
        layout = memory.layout
        shape = (KV_LAYOUT_VERSION, layout.model_hash, layout.shape[1:], layout.dtype, max_model_len, self.num_slots)
        self._key = blake2b(repr(shape).encode(), key=secret.encode()[:64]).digest()
        self._first_slot = -(-(_PAGE_BYTES + self.num_slots * _ENTRY_BYTES) // _PAGE_BYTES) * _PAGE_BYTES
        self._path = path
        self._on_restored = on_restored
        self._slots: OrderedDict[bytes, _Slot] = OrderedDict()
        self._free: list[int] = []
        self._copies: deque[_Copy] = deque()
        self._restores: deque[_Restore] = deque()
        self._in_order: dict[int, _Restore] = {}
        self._is_written = threading.Lock()
        """Held while a block of the pool is written."""
        self._news = threading.Event()
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._has_damage = False
        self.failure = ""
        """Why the tier is off; empty while it works."""
        self._untold: dict[bytes, None] = {}
        """Hashes found in the file."""
        self._fd = -1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fchmod(self._fd, 0o600)  # it may be a copy that others can read
            self._read_entries()
        except OSError as error:
            self._fail(error.strerror or str(error))

    def start(self, cores: Iterable[int] = ()) -> None:
        """Start the thread, on ``cores`` if there are any."""
        self._thread = threading.Thread(target=self._run, args=(tuple(cores),), name="kv-tier", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and close the file. A thread that waits for the disk keeps it open."""
        self._is_closed = True
        self._news.set()
        if self._thread is not None:
            self._thread.join(_STOP_TIMEOUT_S)
        if self._fd >= 0 and (self._thread is None or not self._thread.is_alive()):
            os.close(self._fd)
            self._fd = -1

    @property
    def num_waiting(self) -> int:
        """Copies that are ordered and not begun."""
        return 0 if self.failure else len(self._copies)

    # The step loop's side

    def follow(self, events: CacheEvents) -> CacheEvents:
        """Take the changes of the prefix cache: order copies of what is new. Returns the changes of cache and tier
        together, for routers."""
        if self.failure:
            return self._switch_off(events)
        stored, evicted = dict.fromkeys(islice(self._untold, TOLD_AT_ONCE)), dict[bytes, None]()
        for block_hash in stored:
            del self._untold[block_hash]
        for block_hash in events.forgotten:
            self._untold.pop(block_hash, None)
            if (slot := self._slots.pop(block_hash, None)) is not None:
                self._order(_Copy(bytes(BLOCK_HASH_BYTES), slot, -1))
                self._free.append(slot.index)
        for block_hash in events.evicted:
            slot = self._slots.get(block_hash)
            if slot is not None and slot.digest:
                self._slots.move_to_end(block_hash)
                continue
            if slot is not None:  # it was evicted before it was copied
                self._free.append(self._slots.pop(block_hash).index)
            evicted[block_hash] = None
        for block_hash in events.stored:
            slot = self._slots.get(block_hash)
            if slot is not None and slot.digest:
                self._slots.move_to_end(block_hash)
                continue
            if slot is not None:  # damaged
                self._free.append(self._slots.pop(block_hash).index)
            stored[block_hash] = None
            block = self._pool.match_prefix([block_hash])
            if not block or len(self._copies) >= self._pool.num_blocks:
                continue
            if not self._free:
                lost = self._drop_oldest()
                if lost in stored:
                    del stored[lost]
                elif lost in self._untold:
                    del self._untold[lost]
                else:
                    evicted[lost] = None
            self._slots[block_hash] = slot = _Slot(self._free.pop())
            self._order(_Copy(block_hash, slot, block[0], self._pool.generations(block)[0]))
        return CacheEvents([*stored], [*evicted])

    def match(self, hashes: Iterable[bytes]) -> list[bytes]:
        """The longest leading run of ``hashes`` that can be restored."""
        return [] if self.failure else list(takewhile(self._has, hashes))

    def restore(self, restore_id: int, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Begin to write the content of matched ``hashes`` to ``blocks``, which must stay the caller's until
        `end_restore`."""
        for block_hash in reversed(hashes):
            self._slots.move_to_end(block_hash)
        restore = _Restore(restore_id, [(block_hash, self._slots[block_hash]) for block_hash in hashes], blocks)
        self._in_order[restore_id] = restore
        self._restores.append(restore)
        self._news.set()

    def end_restore(self, restore_id: int) -> tuple[int, float]:
        """End a restore, done or not: nothing writes to its blocks from now on. Returns how many of them, from the
        first on, have their content, and the seconds that the disk took for it."""
        restore = self._in_order.pop(restore_id)
        with self._is_written:  # for the copy of one block
            restore.is_over = True
            return restore.num_done, max(0.0, restore.ended_s - restore.begun_s)

    def _has(self, block_hash: bytes) -> bool:
        slot = self._slots.get(block_hash)
        return slot is not None and slot.digest != b""

    def _order(self, copy: _Copy) -> None:
        self._copies.append(copy)
        self._news.set()

    def _drop_oldest(self) -> bytes:
        """Free the slot of the least recently used block that the pool lacks, which there is: there are more slots than
        blocks of the pool. Returns its hash."""
        known = self._pool.known_hashes
        while (block_hash := next(iter(self._slots))) in known:
            self._slots.move_to_end(block_hash)
        self._free.append(self._slots.pop(block_hash).index)
        return block_hash

    def _switch_off(self, events: CacheEvents) -> CacheEvents:
        """Have routers forget, once, what only the tier has had."""
        lost = dict.fromkeys(events.evicted)
        lost.update(dict.fromkeys(self._slots.keys() - self._pool.known_hashes - self._untold.keys()))
        self._slots.clear()
        self._untold.clear()
        self._copies.clear()
        return CacheEvents(events.stored, [*lost])

    # The thread's side

    def _run(self, cores: tuple[int, ...]) -> None:
        if cores:
            os.sched_setaffinity(0, cores)
        while not self._is_closed:
            self._news.clear()
            while not self._is_closed and self.work():
                pass
            self._news.wait()

    def work(self) -> bool:
        """Carry out the next order, a restore before any copy; returns whether there was one."""
        try:
            if self._restores:
                self._carry_out(self._restores.popleft())
            elif self._copies and not self.failure:
                self._copy(self._copies.popleft())
            else:
                return False
        except OSError as error:
            self._fail(error.strerror or str(error))
        except IndexError:  # `_switch_off` emptied the queue
            return False
        return True

    def _fail(self, reason: str) -> None:
        self.failure = reason
        _log.error("the KV tier in %s is off until the worker starts again: %s", self._path, reason)

    def _copy(self, copy: _Copy) -> None:
        """Copy a block to its slot, unless it has other content by now."""
        slot, entry = copy.slot, self._entry_at(copy.slot.index)
        if copy.block < 0:
            _write(self._fd, bytes(_ENTRY_BYTES), entry)
            return
        if os.fstat(self._fd).st_nlink == 0:
            raise OSError(0, "the file was deleted")
        data = bytes(self._block(copy.block))
        if self._memory.generations[copy.block] != copy.generation:
            return
        digest = self._digest(copy.block_hash, data)
        _write(self._fd, data, self._first_slot + slot.index * self._slot_bytes)
        _write(self._fd, copy.block_hash + digest, entry)
        slot.digest = digest

    def _carry_out(self, restore: _Restore) -> None:
        restore.begun_s = restore.ended_s = time.perf_counter()
        try:
            for (block_hash, slot), block in zip(restore.sources, restore.blocks, strict=True):
                if self.failure:
                    return
                data = os.pread(self._fd, self._block_bytes, self._first_slot + slot.index * self._slot_bytes)
                if self._digest(block_hash, data) != slot.digest:
                    if not self._has_damage:
                        _log.warning("%s is damaged in places; what was there is computed again", self._path)
                    self._has_damage = True
                    slot.digest = b""
                    return
                with self._is_written:
                    if restore.is_over:
                        return
                    self._block(block)[:] = data
                    restore.num_done += 1
                    restore.ended_s = time.perf_counter()
        finally:
            self._on_restored(restore.restore_id)

    def _block(self, block: int) -> memoryview[int]:
        return self._memory.block(block, 0, self._memory.layout.num_kv_heads)

    def _digest(self, block_hash: bytes, data: bytes) -> bytes:
        digest = blake2b(block_hash, digest_size=_DIGEST_BYTES, key=self._key)
        digest.update(data)
        return digest.digest()

    def _entry_at(self, slot: int) -> int:
        return _PAGE_BYTES + slot * _ENTRY_BYTES

    def _read_entries(self) -> None:
        """Find the slots of an earlier worker with this model, layout and cluster, or begin the file anew."""
        name = b"pdserve KV tier " + blake2b(self._key, digest_size=16).hexdigest().encode()
        is_same = os.pread(self._fd, len(name), 0) == name
        if not is_same:
            if os.fstat(self._fd).st_size:
                _log.warning("%s is of another model, layout, size or cluster: it is begun anew", self._path)
            os.ftruncate(self._fd, 0)
            _write(self._fd, name, 0)
        os.ftruncate(self._fd, self._first_slot + self.num_slots * self._slot_bytes)
        entries = os.pread(self._fd, self.num_slots * _ENTRY_BYTES, _PAGE_BYTES)
        for index in reversed(range(self.num_slots)):
            entry = entries[index * _ENTRY_BYTES : (index + 1) * _ENTRY_BYTES]
            block_hash, digest = entry[:BLOCK_HASH_BYTES], entry[BLOCK_HASH_BYTES:]
            if any(block_hash) and block_hash not in self._slots:
                self._slots[block_hash] = _Slot(index, digest)
            else:
                self._free.append(index)
        self._untold.update(dict.fromkeys(self._slots))


def _write(fd: int, data: bytes, offset: int) -> None:
    """Write all of ``data``. Raises OSError if the disk takes less."""
    if os.pwrite(fd, data, offset) != len(data):
        raise OSError(0, "the disk took a part of a block only")
