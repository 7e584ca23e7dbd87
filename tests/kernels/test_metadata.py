from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
import torch

from pdserve.kernels.metadata import AttentionMetadata, most_short


def build(
    new: Sequence[int], cached: Sequence[int], tables: Sequence[Sequence[int]], num_blocks: int = 8
) -> AttentionMetadata:
    return AttentionMetadata.build(new, cached, tables, num_blocks=num_blocks, block_size=4)


def test_ragged_rows_are_laid_end_to_end() -> None:
    metadata = build([3, 1], [2, 4], [[5, 0, 7], array("i", [1, 6])])
    assert metadata.num_rows == 2
    assert metadata.num_tokens == 4
    assert metadata.query_starts.tolist() == [0, 3, 4]
    assert metadata.kv_lengths.tolist() == [5, 5]
    assert metadata.block_starts.tolist() == [0, 3, 5]
    assert metadata.block_ids.tolist() == [5, 0, 7, 1, 6]
    assert metadata.positions.tolist() == [2, 3, 4, 4]
    assert metadata.packed.tolist() == [2, 0, 3, 4, 5, 5, 0, 3, 5, 5, 0, 7, 1, 6]
    assert metadata.words.tolist() == [2, 3, 4, 4, *metadata.packed.tolist()]
    assert (metadata.min_new_tokens, metadata.max_new_tokens, metadata.most_short_tokens) == (1, 3, 3)


def test_padding_is_rows_without_tokens_and_tokens_without_rows() -> None:
    metadata = AttentionMetadata.build([1, 1], [2, 4], [[5], [1, 6]], num_blocks=8, block_size=4, num_padding=2)
    assert (metadata.num_rows, metadata.num_tokens) == (4, 4)
    assert metadata.query_starts.tolist() == [0, 1, 2, 2, 2]
    assert metadata.kv_lengths.tolist() == [3, 5, 0, 0]
    assert metadata.block_starts.tolist() == [0, 1, 3, 3, 3]
    assert metadata.block_ids.tolist() == [5, 1, 6]
    assert metadata.positions.tolist() == [2, 4, 0, 0]
    assert (metadata.min_new_tokens, metadata.max_new_tokens) == (1, 1)


def test_room_behind_the_words_is_for_blocks() -> None:
    metadata = build([1], [2], [[5]])
    roomy = AttentionMetadata.of_words(
        torch.cat((metadata.words, torch.tensor([7, 7]))).int(),
        num_rows=1,
        num_tokens=1,
        min_new_tokens=1,
        max_new_tokens=1,
        most_short_tokens=1,
    )
    assert roomy.block_ids.tolist() == [5, 7, 7]
    assert torch.equal(roomy.block_starts, metadata.block_starts)


def test_another_device_gets_the_same_layout() -> None:
    metadata = build([3, 1], [2, 4], [[5, 0, 7], [1, 6]])
    assert metadata.to(torch.device("cpu")) is metadata
    moved = metadata.to(torch.device("meta"))
    for name in ("words", "packed", "query_starts", "kv_lengths", "block_starts", "block_ids", "positions"):
        there, here = getattr(moved, name), getattr(metadata, name)
        assert there.is_meta
        assert (there.shape, there.storage_offset()) == (here.shape, here.storage_offset())
    assert (moved.min_new_tokens, moved.max_new_tokens, moved.most_short_tokens) == (1, 3, 3)


def test_long_rows_are_not_short() -> None:
    assert [most_short(counts) for counts in ([1, 8, 9], [300, 1], [9])] == [8, 1, 0]


@pytest.mark.parametrize(
    ("new", "cached", "tables"),
    [
        ([], [], []),
        ([0], [4], [[1]]),
        ([1], [-1], [[1]]),
        ([1], [4], [[1]]),
        ([1], [0], [[8]]),
        ([1], [0], [[-1]]),
    ],
    ids=["no row", "no new token", "negative cached length", "short table", "block past the pool", "negative block"],
)
def test_rows_that_would_index_out_of_bounds_are_caught(
    new: list[int], cached: list[int], tables: list[list[int]]
) -> None:
    with pytest.raises(AssertionError):
        build(new, cached, tables)
