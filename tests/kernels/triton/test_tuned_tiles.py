from __future__ import annotations

import json

import pytest

from pdserve.kernels.triton.tuned_tiles import (
    TABLE,
    AttentionShape,
    Key,
    ProductShape,
    read_tiles,
    table_entry,
    tuned_tiles,
)

DECODE = Key("GPU", "decode_attention", AttentionShape("bfloat16", "int8", 128, 4))
PRODUCT = Key("GPU", "quantized_matmul", ProductShape("bfloat16", "int4", 16, 4096, 28672))
TILE = {"rows": 16, "keys": 32}


def test_entries_are_read_as_they_were_written() -> None:
    entries = [table_entry(DECODE, TILE, times_faster=1.2), table_entry(PRODUCT, {"tokens": 16})]
    assert read_tiles(json.dumps(entries)) == {DECODE: TILE, PRODUCT: {"tokens": 16}}
    assert entries[0]["times_faster"] == 1.2


@pytest.mark.parametrize(
    "change",
    [
        {"kernel": "gate"},
        {"shape": {"dtype": "bfloat16"}},
        {"shape": PRODUCT.shape._asdict()},
        {"tile": [16, 32]},
        {"tile": {"rows": "many"}},
    ],
)
def test_what_is_no_entry_is_quoted(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"no entry of a table of tiles: \{'device': 'GPU'.*make it anew"):
        read_tiles(json.dumps([{**table_entry(DECODE, TILE), **change}]))


def test_an_entry_without_a_device_is_none() -> None:
    with pytest.raises(ValueError, match="no entry"):
        read_tiles('[{"kernel": "decode_attention"}]')


def test_two_tiles_for_a_shape_are_an_error() -> None:
    with pytest.raises(ValueError, match="two tiles"):
        read_tiles(json.dumps([table_entry(DECODE, TILE), table_entry(DECODE, TILE)]))


def test_the_table_comes_with_the_package() -> None:
    assert tuned_tiles() == read_tiles(TABLE.read_text())
