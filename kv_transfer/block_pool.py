"""Bookkeeping of paged KV memory: which blocks are free, cached or referenced, and the content of each.

A block is *referenced* (in some sequence's block table), *cached* (in none, but its content is known by hash and can
be shared) or *free*; ``free + cached + referenced == total`` always. The content index is the prefix cache, keyed by
the chain of `pdserve.contracts.block_hash`. Called by schedulers. Never touches KV memory and never imports torch.
Every operation is O(1) per block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, MutableSequence, Sequence
from collections.abc import Set as AbstractSet
from itertools import takewhile
from typing import NamedTuple


class CacheEvents(NamedTuple):
    """Net change of the prefix cache since the last call. The first two lists share no hash."""

    stored: list[bytes]
    evicted: list[bytes]
    forgotten: Sequence[bytes] = ()
    """All whose content was doubtful: no copy of it may be used."""


class BlockPool:
    """Reference counts, prefix cache with least-recently-used eviction, and a generation per block."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        generations: MutableSequence[int] | None = None,
        *,
        caches_content: bool = True,
        first_block: int = 0,
    ) -> None:
        """
        Args:
            num_blocks: blocks of the KV tensor, ids ``first_block .. first_block + num_blocks - 1``.
            block_size: tokens per block.
            generations: one counter per block, raised whenever the block is about to hold other content. The memory
                is shared with the transfer process, so that a puller detects a reused block.
            caches_content: False if no two prompts share a prefix: nothing is registered and nothing is found.

        Raises:
            ValueError: fewer than one block, or fewer than one token per block.
        """
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens holds nothing: raise kv_memory")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caches_content = caches_content
        end_block = first_block + num_blocks
        self._generations: MutableSequence[int] = [0] * end_block if generations is None else generations
        assert len(self._generations) >= end_block, "one generation per block"
        self._num_references = [0] * end_block
        self._hashes: list[bytes | None] = [None] * end_block
        self._block_by_hash: dict[bytes, int] = {}
        self._free = list(range(end_block - 1, first_block - 1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._num_referenced = 0
        self._stored: dict[bytes, None] = {}
        self._evicted: dict[bytes, None] = {}
        self._forgotten: list[bytes] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks whose content may be shared or evicted."""
        return len(self._cached)

    @property
    def num_referenced(self) -> int:
        return self._num_referenced

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could return: free and cached."""
        return len(self._free) + len(self._cached)

    @property
    def known_hashes(self) -> AbstractSet[bytes]:
        """Hashes of all content that can be found now: a live view of the pool."""
        return self._block_by_hash.keys()

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= len(self._free) + len(self._cached)

    def allocate(self, num_blocks: int) -> list[int]:
        """Allocate blocks of undefined content with one reference each. `can_allocate` must hold.

        Free blocks go first, then the least recently used cached blocks, whose content is evicted.
        """
        assert self.can_allocate(num_blocks), f"{num_blocks} blocks asked, {self.num_available} available"
        num_free = min(num_blocks, len(self._free))
        first = len(self._free) - num_free
        blocks = self._free[first:]
        blocks.reverse()
        del self._free[first:]
        if num_blocks > num_free:
            blocks += self._evict_oldest(num_blocks - num_free)
        references, generations = self._num_references, self._generations
        for block in blocks:
            references[block] = 1
            generations[block] += 1
        self._num_referenced += num_blocks
        return blocks

    def match_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest known leading run of ``hashes``. They are not referenced yet: call `share` before
        any allocation."""
        if not self.caches_content:
            return []
        blocks = map(self._block_by_hash.get, hashes)
        return list(iter(blocks.__next__, None))  # up to the first None

    def num_unreferenced(self, block_ids: Iterable[int]) -> int:
        """Number of ``block_ids`` cached now. Sharing them reduces the available blocks by that number."""
        references = self._num_references
        return [references[block] for block in block_ids].count(0)

    def num_leading_shared(self, block_ids: Iterable[int]) -> int:
        """Number of leading ``block_ids`` that more than one sequence references."""
        return sum(1 for _ in takewhile(lambda block: self._num_references[block] > 1, block_ids))

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block. Blocks must be referenced or cached."""
        references = self._num_references
        for block in block_ids:
            if references[block] == 0:
                assert block in self._cached, f"block {block} is free: it has no content to share"
                del self._cached[block]
                self._num_referenced += 1
            references[block] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each of a sequence's blocks, given in sequence order.

        Without references, a block of known content becomes cached and any other is freed. The deepest block goes
        first, so that the leaf of a chain is evicted before its parent, without which it could not be found.
        """
        references, hashes = self._num_references, self._hashes
        if not self.caches_content:  # no other sequence references them
            for block in block_ids:
                references[block] -= 1
            self._num_referenced -= len(block_ids)
            self._free += block_ids[::-1]
            return
        for block in reversed(block_ids):
            num_left = references[block] - 1
            assert num_left >= 0, f"block {block} is released more often than referenced"
            references[block] = num_left
            if num_left == 0:
                self._num_referenced -= 1
                if hashes[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def evict_first(self, block_ids: Iterable[int]) -> None:
        """Have those that are cached, given in sequence order, evicted before all others, the deepest one first. Where
        others share their beginning, leaves of those may outlast it, found again only once it is."""
        for block in block_ids:
            if block in self._cached:
                self._cached.move_to_end(block, last=False)

    def register(self, block_ids: Iterable[int], block_hashes: Iterable[bytes]) -> None:
        """Register referenced, completely written blocks under their hashes. If two blocks have the same content,
        the first stays registered."""
        known, hashes, stored, evicted = self._block_by_hash, self._hashes, self._stored, self._evicted
        for block, block_hash in zip(block_ids, block_hashes, strict=True):
            assert self._num_references[block] > 0, f"block {block} is registered while nobody owns it"
            if block_hash in known:
                continue
            assert hashes[block] is None, f"block {block} is already registered with other content"
            hashes[block] = block_hash
            known[block_hash] = block
            if block_hash in evicted:
                del evicted[block_hash]
            else:
                stored[block_hash] = None

    def forget(self, block_ids: Iterable[int]) -> None:
        """Remove the blocks from the prefix cache because their content is doubtful. References do not change."""
        for block in block_ids:
            if (block_hash := self._hashes[block]) is not None:
                self._forgotten.append(block_hash)
                self._drop_hashes([block])
                if block in self._cached:
                    del self._cached[block]
                    self._free.append(block)

    def generations(self, block_ids: Iterable[int]) -> tuple[int, ...]:
        """Current generations of the blocks."""
        generations = self._generations
        return tuple([generations[block] for block in block_ids])

    def take_cache_events(self) -> CacheEvents:
        """Return what the prefix cache gained and lost since the last call, for the router's index."""
        events = CacheEvents(list(self._stored), list(self._evicted), self._forgotten)
        self._stored.clear()
        self._evicted.clear()
        self._forgotten = []
        return events

    def check_integrity(self) -> None:
        """Recount everything.

        Raises:
            AssertionError: names the broken invariant.
        """
        free, cached = set(self._free), self._cached.keys()
        references, hashes = self._num_references, self._hashes
        assert len(free) == len(self._free), "a block is twice on the free list"
        assert free.isdisjoint(cached), f"blocks both free and cached: {sorted(free & cached)}"
        assert not any(map(references.__getitem__, free)), "a free block is referenced"
        assert not any(map(references.__getitem__, cached)), "a cached block is referenced"
        assert min(references) >= 0, "a block has a negative reference count"
        num_referenced = len(references) - references.count(0)
        assert num_referenced == self._num_referenced, f"{num_referenced} referenced, {self._num_referenced} counted"
        assert self.num_free + self.num_cached + self.num_referenced == self.num_blocks, "free + cached + referenced"
        indexed = self._block_by_hash
        assert list(map(hashes.__getitem__, indexed.values())) == list(indexed), "hash index"
        assert len(hashes) - hashes.count(None) == len(indexed), "a block's hash is not in the index"
        assert all(map(hashes.__getitem__, cached)), "a cached block is of unknown content"
        assert not any(map(hashes.__getitem__, free)), "a free block is of known content"

    def _evict_oldest(self, num_blocks: int) -> list[int]:
        cached = self._cached
        blocks = [cached.popitem(last=False)[0] for _ in range(num_blocks)]
        self._drop_hashes(blocks)
        return blocks

    def _drop_hashes(self, blocks: Iterable[int]) -> None:
        hashes, stored, evicted = self._hashes, self._stored, self._evicted
        for block in blocks:
            block_hash = hashes[block]
            assert block_hash is not None, f"block {block} has no hash to drop"
            hashes[block] = None
            del self._block_by_hash[block_hash]
            if block_hash in stored:
                del stored[block_hash]
            else:
                evicted[block_hash] = None
