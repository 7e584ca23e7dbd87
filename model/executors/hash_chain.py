"""A stand-in for a language model whose memory is one 64-bit number: the hash of all tokens so far.

`pdserve.model.executors.emulated` keeps these numbers in a real KV pool; tests compute expected answers from the
functions here without a pool. Standard library only.

The K of position p is the state, ``state_p = mix64(link_p)``; its V is the link,
``link_p = state_{p-1} + STRIDE * (token_p + 1) mod 2**64``. A state depends on all earlier tokens and their order. A
link and the state before it give the token, so a context is verified from its KV alone: a changed byte, or a block that
is lost, repeated or misplaced, breaks a link.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.contracts.request import SamplingParams

MASK = 2**64 - 1
STRIDE = 0x9E3779B97F4A7C15
INVERSE_STRIDE = pow(STRIDE, -1, 2**64)
ROOT_STATE = 0x243F6A8885A308D3
"""State before the first token."""


def mix64(value: int) -> int:
    """Mix 64 bits bijectively: SplitMix64's finaliser. ``mix64(0)`` is 0.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
    """
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


def link(state: int, token: int) -> int:
    """Link from the state before ``token`` to the state after it."""
    return state + STRIDE * (token + 1) & MASK


def linked_token(state: int, link: int) -> int:
    """Token that ``link`` adds to ``state``; any 64-bit number if they do not match."""
    return ((link - state) * INVERSE_STRIDE - 1) & MASK


def sampling_salt(sampling: SamplingParams, choice: int) -> int:
    """Salt of a draw: 0 when greedy, else a hash of seed and choice. Seed 0, choice 0 gives 0."""
    if sampling.temperature == 0:
        return 0
    return mix64(sampling.seed + STRIDE * choice & MASK)


def pick(state: int, salt: int, allowed: Sequence[int]) -> int:
    """Token after ``state`` among those that a grammar allows."""
    return allowed[mix64(state ^ salt) % len(allowed)]


class HashVocabulary:
    """Maps states to tokens.

    Args:
        size: tokens are in ``[0, size)``.
        eos_token_ids: never generated, except the first, as ``eos_period`` sets.
        eos_period: one token in this many, picked by hash, ends the sequence; 0 for none.
    """

    def __init__(self, size: int, eos_token_ids: Sequence[int] = (), eos_period: int = 0) -> None:
        self.size = size
        self._eos_tokens = sorted(set(eos_token_ids))
        self._num_ordinary = size - len(self._eos_tokens)
        self._eos_token = eos_token_ids[0] if eos_token_ids else -1
        self._eos_period = eos_period if eos_token_ids else 0
        assert self._num_ordinary > 0
        assert all(0 <= token < size for token in self._eos_tokens)

    def next_token(self, state: int, salt: int = 0, banned: Sequence[int] = ()) -> int:
        """Token after ``state``; a banned token gives way to the next ordinary one that is not banned.

        Raises:
            RuntimeError: every ordinary token is banned.
        """
        value = mix64(state ^ salt)
        if self._eos_period and (value >> 32) % self._eos_period == 0 and self._eos_token not in banned:
            return self._eos_token
        for rank in range(value % self._num_ordinary, value % self._num_ordinary + self._num_ordinary):
            token = self._ordinary_token(rank % self._num_ordinary)
            if token not in banned:
                return token
        raise RuntimeError("every ordinary token is banned")

    def _ordinary_token(self, rank: int) -> int:
        for eos_token in self._eos_tokens:
            rank += rank >= eos_token
        return rank
