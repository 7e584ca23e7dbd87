"""The identity of a KV block: chained, salted, and the same in every process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.contracts.block_hash import BLOCK_HASH_BYTES, block_hash, block_hashes, root_hash

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_hashes_are_the_same_in_every_process_and_release() -> None:
    # Workers of two releases may share a prefix cache only while these values stand.
    assert root_hash(b"").hex() == "a59a6f5d882075957435c7cd842c3d9b"
    assert [value.hex() for value in block_hashes([1, 2, 3, 4, 5], 2, b"tenant")] == [
        "7318a27d1f17a4b3b2f453f21cc7418f",
        "4b64aa4cf7743b92b8a333f2d3801618",
    ]


@given(tokens=TOKENS, block_size=st.integers(1, 8), salt=st.binary(max_size=4))
def test_full_blocks_are_chained(tokens: list[int], block_size: int, salt: bytes) -> None:
    hashes = block_hashes(tokens, block_size, salt)
    assert len(hashes) == len(tokens) // block_size
    parent = root_hash(salt)
    for index, value in enumerate(hashes):
        assert value == block_hash(parent, tokens[index * block_size : (index + 1) * block_size])
        assert len(value) == BLOCK_HASH_BYTES
        parent = value


@given(tokens=TOKENS, changed=st.integers(0, 39), block_size=st.integers(1, 8))
def test_a_token_changes_its_block_and_all_after_it(tokens: list[int], changed: int, block_size: int) -> None:
    tokens = [*tokens, 1]
    changed %= len(tokens)
    other = [*tokens[:changed], tokens[changed] ^ 1, *tokens[changed + 1 :]]
    first_changed = changed // block_size
    before, after = block_hashes(tokens, block_size), block_hashes(other, block_size)
    assert before[:first_changed] == after[:first_changed]
    assert not set(before[first_changed:]) & set(after[first_changed:])


def test_the_salt_separates_tenants() -> None:
    assert not set(block_hashes([1] * 8, 2, b"a")) & set(block_hashes([1] * 8, 2, b"b"))
    assert block_hashes([1] * 8, 2) == block_hashes([1] * 8, 2, b"")


def test_equal_blocks_at_different_places_differ() -> None:
    assert len(set(block_hashes([1] * 8, 2))) == 4


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_that_is_no_unsigned_32_bit_number_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        block_hash(root_hash(b""), [token])
