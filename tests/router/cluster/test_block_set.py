"""Set of block hashes against a set of Python's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.cluster.block_set import BlockSet

HASHES = [index.to_bytes(16, "big") for index in range(24)]
"""Few, in 32 slots, so that many are not where they belong."""
batches = st.lists(st.sampled_from(HASHES), max_size=12)


@given(st.lists(st.tuples(st.booleans(), batches), max_size=20))
def test_it_holds_what_was_stored_and_not_evicted(changes: list[tuple[bool, list[bytes]]]) -> None:
    blocks, expected = BlockSet(len(HASHES)), set[bytes]()
    for is_stored, hashes in changes:
        if is_stored:
            blocks.update(hashes)
            expected.update(hashes)
        else:
            blocks.difference_update(hashes)
            expected.difference_update(hashes)
        assert len(blocks) == len(expected)
        assert {block_hash for block_hash in HASHES if block_hash in blocks} == expected


@pytest.mark.parametrize("max_blocks", [0, 1, 2, 3, 7])
def test_blocks_beyond_the_pool_are_not_added(max_blocks: int) -> None:
    blocks = BlockSet(max_blocks)
    blocks.update(HASHES)
    assert [block_hash in blocks for block_hash in HASHES] == [index < max_blocks for index in range(len(HASHES))]
    blocks.difference_update(HASHES)
    assert not blocks
