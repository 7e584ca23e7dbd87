"""The identity of a KV block: a chained hash of (tenant salt, parent, tokens).

Two blocks with the same hash hold the same tokens after the same tokens, for the same tenant, so their KV is the same.
A cryptographic hash, because a collision would serve one user's KV to another. Workers and the router compute it alike.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

BLOCK_HASH_BYTES = 16


@lru_cache(maxsize=1024)
def root_hash(cache_salt: bytes) -> bytes:
    """The parent of a sequence's first block."""
    return blake2b(cache_salt, digest_size=BLOCK_HASH_BYTES, person=b"pdserve-root").digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Hash of a full block of ``tokens`` that follows the block hashed ``parent``."""
    return blake2b(parent + array("I", tokens).tobytes(), digest_size=BLOCK_HASH_BYTES).digest()


def block_hashes(tokens: Sequence[int], block_size: int, cache_salt: bytes = b"") -> list[bytes]:
    """Hashes of every full block of ``tokens``, in order."""
    parent = root_hash(cache_salt)
    hashes = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = block_hash(parent, tokens[start : start + block_size])
        hashes.append(parent)
    return hashes
