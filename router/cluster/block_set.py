"""Set of block hashes in little memory, for what a router knows of the prefix caches of all workers."""

from __future__ import annotations

from array import array
from collections.abc import Iterable


class BlockSet:
    """A hash table with linear probing (Knuth, The Art of Computer Programming, vol. 3, 6.4, algorithm L) over 64 bits
    of each block hash. Two that agree in these count as one: a hit is then expected that does not come."""

    def __init__(self, max_blocks: int) -> None:
        """``max_blocks``: blocks beyond these are not added, so that the parents of each block stay."""
        self._max_blocks = max_blocks
        num_slots = 1 << (4 * max_blocks // 3).bit_length()
        self._slots = array("q", bytes(8 * num_slots))
        """0 where nothing is."""
        self._mask = num_slots - 1
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    def __contains__(self, block_hash: object) -> bool:
        slots, mask, key = self._slots, self._mask, hash(block_hash) or 1  # as in `_find`, in a third of the time
        slot = key & mask
        while (each := slots[slot]) and each != key:
            slot = slot + 1 & mask
        return each != 0

    def update(self, block_hashes: Iterable[bytes]) -> None:
        for block_hash in block_hashes:
            key = hash(block_hash) or 1
            slot = self._find(key)
            if not self._slots[slot] and self._num_blocks < self._max_blocks:
                self._slots[slot] = key
                self._num_blocks += 1

    def difference_update(self, block_hashes: Iterable[bytes]) -> None:
        slots, mask = self._slots, self._mask
        for block_hash in block_hashes:
            slot = self._find(hash(block_hash) or 1)
            self._num_blocks -= slots[slot] != 0
            slots[slot] = 0
            while key := slots[slot := slot + 1 & mask]:  # it may be there because the slot before was taken
                slots[slot] = 0
                slots[self._find(key)] = key

    def _find(self, key: int) -> int:
        """Slot of ``key``, or the empty one where it would be put."""
        slots, mask = self._slots, self._mask
        slot = key & mask
        while (each := slots[slot]) and each != key:
            slot = slot + 1 & mask
        return slot
