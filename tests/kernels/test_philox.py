"""Philox4x32-10 against the published known answers of Random123 (tests/kat_vectors, "philox4x32 10")."""

from __future__ import annotations

import pytest
import torch

from pdserve.kernels.philox import Counter, philox4x32, uniform

ONES = 0xFFFFFFFF
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]) -> None:
    drawn = philox4x32(Counter(*map(torch.tensor, counter)), *map(torch.tensor, key))
    assert tuple(drawn.tolist()) == answer


def test_a_batch_holds_the_same_words_as_its_parts() -> None:
    counters = [torch.tensor(column) for column in zip(*(counter for counter, _, _ in KNOWN_ANSWERS), strict=True)]
    keys = [torch.tensor(column) for column in zip(*(key for _, key, _ in KNOWN_ANSWERS), strict=True)]
    assert philox4x32(Counter(*counters), *keys).tolist() == [list(answer) for _, _, answer in KNOWN_ANSWERS]


def test_uniform_excludes_both_ends() -> None:
    assert uniform(torch.tensor([0, ONES])).tolist() == [2.0**-33, 1 - 2.0**-33]
