"""A block pool that counts blocks and knows none of them: for simulated prompts that share nothing.

Every block has the id 0. Taking and returning any number of blocks takes the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pdserve.kv_transfer.block_pool import BlockPool


class CountedBlockPool(BlockPool):
    """A `BlockPool` without identities, contents and prefix cache."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._free.clear()

    @property
    def caches_content(self) -> bool:
        return False

    @property
    def num_free(self) -> int:
        return self.num_blocks - self._num_referenced

    @property
    def num_available(self) -> int:
        return self.num_blocks - self._num_referenced

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= self.num_blocks - self._num_referenced

    def allocate(self, num_blocks: int) -> list[int]:
        assert self.can_allocate(num_blocks), f"{num_blocks} blocks asked, {self.num_available} available"
        self._num_referenced += num_blocks
        return [0] * num_blocks

    def match_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        return []

    def num_unreferenced(self, block_ids: Iterable[int]) -> int:
        return 0

    def num_leading_shared(self, block_ids: Iterable[int]) -> int:
        return 0

    def share(self, block_ids: Iterable[int]) -> None:
        assert not [*block_ids], "counted blocks have no content to share"

    def release(self, block_ids: Sequence[int]) -> None:
        self._num_referenced -= len(block_ids)

    def forget(self, block_ids: Iterable[int]) -> None:
        """Nothing is known of any block."""

    def generations(self, block_ids: Iterable[int]) -> tuple[int, ...]:
        return ()

    def check_integrity(self) -> None:
        assert 0 <= self._num_referenced <= self.num_blocks, f"{self._num_referenced} of {self.num_blocks} referenced"
