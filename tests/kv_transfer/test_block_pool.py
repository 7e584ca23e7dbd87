from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdserve.contracts.block_hash import block_hashes
from pdserve.kv_transfer.block_pool import BlockPool

BLOCK_SIZE = 2


def hashes_of(num_blocks: int, first_token: int = 0) -> list[bytes]:
    return block_hashes(range(first_token, first_token + num_blocks * BLOCK_SIZE), BLOCK_SIZE)


def cache_chain(pool: BlockPool, hashes: list[bytes]) -> list[int]:
    """Unreferenced blocks that hold the chain."""
    blocks = pool.allocate(len(hashes))
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.register([block], [block_hash])
    pool.release(blocks)
    return blocks


def test_a_pool_of_nothing_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="kv_memory"):
        BlockPool(0, BLOCK_SIZE)


def test_allocated_blocks_are_distinct_and_counted() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    blocks = pool.allocate(3)
    assert len(set(blocks)) == 3
    assert (pool.num_free, pool.num_cached, pool.num_referenced) == (1, 0, 3)
    assert pool.can_allocate(1)
    assert not pool.can_allocate(2)


def test_unknown_content_is_freed_and_known_content_is_cached() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    blocks = pool.allocate(2)
    pool.register([blocks[0]], [hashes_of(1)[0]])
    pool.release(blocks)
    assert (pool.num_free, pool.num_cached, pool.num_referenced) == (3, 1, 0)


def test_the_longest_known_run_is_matched_from_the_start() -> None:
    pool = BlockPool(8, BLOCK_SIZE)
    hashes = hashes_of(4)
    blocks = cache_chain(pool, hashes[:3])
    assert pool.match_prefix(hashes) == blocks
    assert pool.match_prefix(hashes[1:]) == blocks[1:]
    pool.forget(blocks[1:2])
    assert pool.match_prefix(hashes) == blocks[:1]


def test_sharing_revives_cached_blocks_and_counts_references() -> None:
    pool = BlockPool(2, BLOCK_SIZE)
    blocks = cache_chain(pool, hashes_of(2))
    assert pool.num_unreferenced(blocks) == 2
    pool.share(blocks)
    pool.share(blocks)
    assert pool.num_unreferenced(blocks) == 0
    assert not pool.can_allocate(1)
    pool.release(blocks)
    assert pool.num_referenced == 2
    pool.release(blocks)
    assert pool.num_cached == 2


def test_leading_shared_blocks_are_those_with_a_second_reference() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    blocks = pool.allocate(4)
    pool.share([blocks[0], blocks[1], blocks[3]])
    assert pool.num_leading_shared(blocks) == 2
    pool.release(blocks[:1])
    assert pool.num_leading_shared(blocks) == 0


def test_leaves_are_evicted_before_their_parents() -> None:
    pool = BlockPool(3, BLOCK_SIZE)
    hashes = hashes_of(3)
    blocks = cache_chain(pool, hashes)
    assert pool.allocate(1) == blocks[2:]
    assert pool.match_prefix(hashes) == blocks[:2]


def test_the_least_recently_used_chain_is_evicted_first() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    old, new = hashes_of(2), hashes_of(2, first_token=100)
    old_blocks, new_blocks = cache_chain(pool, old), cache_chain(pool, new)
    pool.share(old_blocks)
    pool.release(old_blocks)
    pool.allocate(2)
    assert pool.match_prefix(old) == old_blocks
    assert pool.match_prefix(new) == []
    assert set(new_blocks).isdisjoint(old_blocks)


def test_of_two_blocks_with_the_same_content_the_first_stays_known() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    [block_hash] = hashes_of(1)
    first, second = pool.allocate(2)
    pool.register([first], [block_hash])
    pool.register([second], [block_hash])
    pool.release([second])
    assert pool.match_prefix([block_hash]) == [first]
    assert pool.num_free == 3


def test_forgotten_content_is_never_found_again() -> None:
    pool = BlockPool(2, BLOCK_SIZE)
    hashes = hashes_of(2)
    blocks = cache_chain(pool, hashes)
    pool.share(blocks[:1])
    pool.forget(blocks)
    assert pool.match_prefix(hashes) == []
    assert (pool.num_free, pool.num_cached, pool.num_referenced) == (1, 0, 1)
    pool.release(blocks[:1])
    assert pool.num_free == 2


def test_a_generation_rises_whenever_a_block_gets_a_new_owner_only() -> None:
    generations = [5, 5]
    pool = BlockPool(2, BLOCK_SIZE, generations)
    blocks = cache_chain(pool, hashes_of(2))
    assert pool.generations(blocks) == (6, 6)
    pool.share(blocks)
    pool.release(blocks)
    assert generations == [6, 6]
    [evicted] = pool.allocate(1)
    assert generations[evicted] == 7


def test_cache_events_are_net() -> None:
    pool = BlockPool(1, BLOCK_SIZE)
    first, second = hashes_of(2)
    cache_chain(pool, [first])
    assert pool.take_cache_events()[:2] == ([first], [])
    cache_chain(pool, [second])
    cache_chain(pool, [first])
    assert pool.take_cache_events()[:2] == ([], [])
    cache_chain(pool, [second])
    assert pool.take_cache_events()[:2] == ([second], [first])
    assert pool.take_cache_events()[:2] == ([], [])


def _double_release(pool: BlockPool) -> None:
    blocks = pool.allocate(1)
    pool.release(blocks)
    pool.release(blocks)


@pytest.mark.parametrize(
    "misuse",
    [
        _double_release,
        lambda pool: pool.allocate(9),
        lambda pool: pool.share([0]),
        lambda pool: pool.register([0], [b"hash"]),
    ],
)
def test_misuse_is_caught(misuse: Callable[[BlockPool], object]) -> None:
    with pytest.raises(AssertionError):
        misuse(BlockPool(2, BLOCK_SIZE))


def _leak(pool: BlockPool) -> None:
    pool._free.pop()


def _free_twice(pool: BlockPool) -> None:
    pool._free[0] = pool._free[1]


def _stale_index(pool: BlockPool) -> None:
    pool._block_by_hash[b"hash"] = 0


def _hash_outside_the_index(pool: BlockPool) -> None:
    pool._hashes[pool._num_references.index(1)] = b"hash"


def _known_free_block(pool: BlockPool) -> None:
    pool._hashes[pool._free[0]] = b"hash"
    pool._block_by_hash[b"hash"] = pool._free[0]


def _cached_block_of_unknown_content(pool: BlockPool) -> None:
    pool._cached[pool._free.pop()] = None


def _free_a_referenced_block(pool: BlockPool) -> None:
    pool._free[0] = pool._num_references.index(1)


def _cache_a_referenced_block(pool: BlockPool) -> None:
    block = pool._num_references.index(1)
    pool._hashes[block] = b"hash"
    pool._block_by_hash[b"hash"] = block
    pool._cached[block] = None
    pool._free.pop()


@pytest.mark.parametrize(
    ("damage", "broken"),
    [
        (_leak, "free [+] cached"),
        (_free_twice, "twice"),
        (_stale_index, "hash index"),
        (_hash_outside_the_index, "not in the index"),
        (_known_free_block, "free block is of known content"),
        (_cached_block_of_unknown_content, "unknown content"),
        (_free_a_referenced_block, "free block is referenced"),
        (_cache_a_referenced_block, "cached block is referenced"),
    ],
)
def test_the_integrity_check_sees_damage(damage: Callable[[BlockPool], None], broken: str) -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    pool.allocate(1)
    pool.check_integrity()
    damage(pool)
    with pytest.raises(AssertionError, match=broken):
        pool.check_integrity()


class PoolMachine(RuleBasedStateMachine):
    """Random owners of random chains, checked against the last known content of each block."""

    @initialize(num_blocks=st.integers(1, 12), first_block=st.integers(0, 3))
    def start(self, num_blocks: int, first_block: int) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE, first_block=first_block)
        self.ids = range(first_block, first_block + num_blocks)
        self.owners: list[list[int]] = []
        self.content: dict[int, bytes] = {}
        self.reported: set[bytes] = set()

    @rule(family=st.integers(0, 2), num_blocks=st.integers(1, 6))
    def own_a_chain(self, family: int, num_blocks: int) -> None:
        hashes = hashes_of(num_blocks, first_token=100 * family)
        matched = self.pool.match_prefix(hashes)
        for block, block_hash in zip(matched, hashes, strict=False):
            assert self.content[block] == block_hash
        num_new = num_blocks - len(matched)
        if not self.pool.can_allocate(num_new + self.pool.num_unreferenced(matched)):
            return
        self.pool.share(matched)
        new = self.pool.allocate(num_new)
        assert set(new).isdisjoint(block for owned in self.owners for block in owned)
        assert set(new) <= set(self.ids)
        for block, block_hash in zip(new, hashes[len(matched) :], strict=True):
            self.content[block] = block_hash
            self.pool.register([block], [block_hash])
        self.owners.append(matched + new)

    @rule(data=st.data())
    def release_one(self, data: st.DataObject) -> None:
        if self.owners:
            self.pool.release(self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1))))

    @rule(data=st.data())
    def forget_one(self, data: st.DataObject) -> None:
        if self.owners:
            self.pool.forget(data.draw(st.sampled_from(self.owners)))

    @rule(family=st.integers(0, 2))
    def evict_a_chain_first(self, family: int) -> None:
        self.pool.evict_first(self.pool.match_prefix(hashes_of(6, first_token=100 * family)))

    @rule()
    def look_at_the_cache(self) -> None:
        stored, evicted, _ = self.pool.take_cache_events()
        assert self.reported.issuperset(evicted)
        assert self.reported.isdisjoint(stored)
        self.reported = self.reported.difference(evicted).union(stored)
        assert self.reported == set(self.pool._block_by_hash)

    @invariant()
    def integrity(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_referenced == len({block for owned in self.owners for block in owned})


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestPool = PoolMachine.TestCase


def test_a_pool_without_a_cache_finds_nothing_again() -> None:
    pool = BlockPool(4, 16, caches_content=False)
    assert not pool.caches_content
    blocks = pool.allocate(2)
    pool.release(blocks)
    assert pool.match_prefix([b"a", b"b"]) == []
    assert (pool.num_free, pool.num_cached) == (4, 0)
    pool.check_integrity()
