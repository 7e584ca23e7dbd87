"""Philox4x32-10, the counter-based random generator, on integer arrays.

Called by `pdserve.model.sampling`. Holds no state: the same counter and key give the same words in any batch, in any
order of evaluation and in any implementation, which is what lets another worker continue a seeded answer. In NumPy: its
64-bit products are unsigned, and its calls on some hundred words cost a fraction of torch's.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), and its reference code
Random123.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
"""Values in [0, 2**32), so that the product of two of them fits."""

_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)
_NUM_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)


class Counter(NamedTuple):
    """The four 32-bit words that name a draw: arrays ``[N]``."""

    word_0: Words
    word_1: Words
    word_2: Words
    word_3: Words


def philox4x32(counter: Counter, key_0: Words, key_1: Words) -> Words:
    """Four random 32-bit words per counter.

    Args:
        counter: arrays ``[N]``.
        key_0, key_1: arrays ``[N]``.

    Returns:
        ``[N, 4]``.
    """
    # Words 0 and 2 are multiplied, words 1 and 3 are mixed in, each by the other pair's product: [2, N] arrays.
    multiplied = np.stack((counter.word_0, counter.word_2))
    mixed = np.stack((counter.word_1, counter.word_3))
    key = np.stack((key_0, key_1))
    for _ in range(_NUM_ROUNDS):
        product = (multiplied * _MULTIPLIERS)[::-1]
        multiplied = (product >> _WORD_BITS) ^ mixed ^ key
        mixed = product & _WORD
        key = (key + _KEY_STEPS) & _WORD
    return np.stack((multiplied[0], mixed[0], multiplied[1], mixed[1]), axis=-1)


def uniform(words: Words) -> npt.NDArray[np.float64]:
    """Map words to the open interval (0, 1): ``(word + 1/2) / 2**32``, so that neither end is drawn."""
    return (words.astype(np.float64) + 0.5) * 2.0**-32
