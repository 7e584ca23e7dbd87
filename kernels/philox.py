"""Philox4x32-10, the counter-based random generator, on integer tensors of any device.

Called by `pdserve.kernels.torch.sampling`; other kernels have it in their own language. Holds no state: the same
counter and key give the same words in any batch, in any order of evaluation and in any implementation, which lets
another worker continue a seeded answer.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), and its reference code
Random123.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_WORD = 0xFFFFFFFF
_WORD_BITS = 32
_NUM_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


class Counter(NamedTuple):
    """The four 32-bit words that name a draw: int64 tensors that broadcast against each other."""

    word_0: torch.Tensor
    word_1: torch.Tensor
    word_2: torch.Tensor
    word_3: torch.Tensor


def philox4x32(counter: Counter, key_0: torch.Tensor, key_1: torch.Tensor) -> torch.Tensor:
    """Four random 32-bit words per counter.

    Args:
        counter: values in ``[0, 2**32)``.
        key_0, key_1: the same, int64; of a shape that the counter's words broadcast to.

    Returns:
        int64, of the broadcast shape and 4 words beside it.
    """
    word_0, word_1, word_2, word_3 = counter
    for _ in range(_NUM_ROUNDS):
        # The products wrap around as signed numbers, which leaves their bits as they are.
        product_0, product_1 = word_0 * _MULTIPLIERS[0], word_2 * _MULTIPLIERS[1]
        word_0 = (product_1 >> _WORD_BITS & _WORD) ^ word_1 ^ key_0
        word_1 = product_1 & _WORD
        word_2 = (product_0 >> _WORD_BITS & _WORD) ^ word_3 ^ key_1
        word_3 = product_0 & _WORD
        key_0, key_1 = key_0 + _KEY_STEPS[0] & _WORD, key_1 + _KEY_STEPS[1] & _WORD
    return torch.stack((word_0, word_1, word_2, word_3), dim=-1)  # each of them holds all of the counter by now


def uniform(words: torch.Tensor) -> torch.Tensor:
    """Map words to the open interval (0, 1): ``(word + 1/2) / 2**32`` in float64, so that neither end is drawn."""
    return (words.double() + 0.5) * 2.0**-_WORD_BITS
