"""Philox4x32-10, the counter-based random generator, on integer tensors.

Called by `pdserve.model.sampling`. Holds no state: the same counter and key give the same words on every device, in any
batch and in any order of evaluation, which is what lets another worker continue a seeded answer.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), and its reference code
Random123.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_WORD = 0xFFFFFFFF
_NUM_ROUNDS = 10
_MULTIPLIERS = (0xCD9E8D57, 0xD2511F53)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


class Counter(NamedTuple):
    """The four 32-bit words that name a draw: int64 tensors of one shape, values in [0, 2**32)."""

    word_0: torch.Tensor
    word_1: torch.Tensor
    word_2: torch.Tensor
    word_3: torch.Tensor


def philox4x32(counter: Counter, key_0: torch.Tensor, key_1: torch.Tensor) -> torch.Tensor:
    """Four random 32-bit words per counter.

    Args:
        counter: int64 tensors ``[N]``.
        key_0, key_1: int64 tensors ``[N]``, values in [0, 2**32).

    Returns:
        int64 ``[N, 4]``, values in [0, 2**32).
    """
    # Words 0 and 2 are multiplied, words 1 and 3 are mixed in: each pair is one [2, N] tensor.
    multiplied = torch.stack((counter.word_0, counter.word_2))
    mixed = torch.stack((counter.word_1, counter.word_3))
    key = torch.stack((key_0, key_1))
    multipliers = key.new_tensor(_MULTIPLIERS)[:, None]
    key_steps = key.new_tensor(_KEY_STEPS)[:, None]
    for _ in range(_NUM_ROUNDS):
        # A product may pass 2**63 and wrap to a negative number: its 64 bits are right all the same, and the mask
        # removes the sign bits that the shift brings in.
        product = multiplied.flip(0) * multipliers
        multiplied = ((product >> 32) & _WORD) ^ mixed ^ key
        mixed = product & _WORD
        key = (key + key_steps) & _WORD
    return torch.stack((multiplied[0], mixed[0], multiplied[1], mixed[1]), dim=-1)


def uniform(words: torch.Tensor) -> torch.Tensor:
    """Map words to float64 in the open interval (0, 1): ``(word + 1/2) / 2**32``, so that neither end is drawn."""
    return (words.to(torch.float64) + 0.5) * 2.0**-32
