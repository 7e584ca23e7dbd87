"""Philox4x32-10, the counter-based random generator, on integer tensors of any device.

Called by `pdserve.kernels.torch.sampling`; the C++ and Triton kernels implement the same generator. Holds no state: a
counter and key give the same words in any batch, evaluation order and implementation, so that another worker can
continue a seeded request.

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
    """The four 32-bit words that identify a draw: int64 tensors that broadcast against each other."""

    word_0: torch.Tensor
    word_1: torch.Tensor
    word_2: torch.Tensor
    word_3: torch.Tensor


def philox4x32(counter: Counter, key_0: torch.Tensor, key_1: torch.Tensor) -> torch.Tensor:
    """Generate four random 32-bit words per counter.

    Args:
        counter: values in ``[0, 2**32)``.
        key_0, key_1: int64 in ``[0, 2**32)``; their shape broadcasts with the counter's.

    Returns:
        int64 ``[..., 4]``, where ``...`` is the broadcast shape.
    """
    word_0, word_1, word_2, word_3 = counter
    for _ in range(_NUM_ROUNDS):
        # Products wrap as signed numbers; their bits are unaffected.
        product_0, product_1 = word_0 * _MULTIPLIERS[0], word_2 * _MULTIPLIERS[1]
        word_0 = (product_1 >> _WORD_BITS & _WORD) ^ word_1 ^ key_0
        word_1 = product_1 & _WORD
        word_2 = (product_0 >> _WORD_BITS & _WORD) ^ word_3 ^ key_1
        word_3 = product_0 & _WORD
        key_0, key_1 = key_0 + _KEY_STEPS[0] & _WORD, key_1 + _KEY_STEPS[1] & _WORD
    return torch.stack((word_0, word_1, word_2, word_3), dim=-1)  # all have the broadcast shape by now


def uniform(words: torch.Tensor) -> torch.Tensor:
    """Map words to the open interval (0, 1) in float64: ``(word + 1/2) / 2**32``, which never reaches either end."""
    return (words.double() + 0.5) * 2.0**-_WORD_BITS
