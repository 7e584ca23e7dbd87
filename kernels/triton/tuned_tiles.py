"""Table of the tiles that measured fastest on a GPU, by device, kernel and shape, in ``tuned_tiles.json``.

Read once, by `pdserve.kernels.triton.configs`, whose rules cover everything else. `pdserve.bench.kernels.tune` writes
the table; never edit it by hand, because every entry must be a measurement.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

TABLE = Path(__file__).with_suffix(".json")


class AttentionShape(NamedTuple):
    """Lookup key of the attention tiles and the KV split."""

    dtype: str
    """Dtype of queries, by its torch name."""
    kv_dtype: str
    head_dim: int
    group: int
    """Query heads per KV head."""


class ProductShape(NamedTuple):
    """Lookup key of the tiles of a product with a quantised weight."""

    dtype: str
    """Dtype of activations."""
    weight: str
    """``int8`` or ``int4``."""
    num_tokens: int
    """A result of `pdserve.kernels.triton.configs.token_bucket`."""
    num_inputs: int
    num_outputs: int


Shape = AttentionShape | ProductShape
SHAPES: Mapping[str, type[AttentionShape] | type[ProductShape]] = {
    "prefill_attention": AttentionShape,
    "decode_attention": AttentionShape,
    "kv_split": AttentionShape,
    "quantized_matmul": ProductShape,
}
"""Shape type by kernel; ``kv_split`` is the split of decode attention: two numbers in place of a tile."""


class Key(NamedTuple):
    device: str
    """Device name as torch reports it."""
    kernel: str
    shape: Shape


Tile = Mapping[str, int]
"""The fields of `AttentionTile`, `KvCut` or `MatmulTile` in `pdserve.kernels.triton.configs`."""


def read_tiles(text: str) -> dict[Key, Tile]:
    """Parse the table from JSON: a list of objects with a device, a kernel, a shape and a tile.

    Raises:
        ValueError: an entry is malformed, or duplicates another's shape; quotes the entry.
    """
    tiles: dict[Key, Tile] = {}
    for entry in json.loads(text):
        try:
            key = Key(entry["device"], entry["kernel"], SHAPES[entry["kernel"]](**entry["shape"]))
            tile = {str(name): int(value) for name, value in entry["tile"].items()}
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"no entry of a table of tiles: {entry} ({error!r}); make it anew by tuning") from error
        if key in tiles:
            raise ValueError(f"two tiles for {key}: remove one")
        tiles[key] = tile
    return tiles


def table_entry(key: Key, tile: Tile, **measured: Any) -> dict[str, Any]:
    """Return one entry for `read_tiles`, with its measurements added."""
    return {**key._asdict(), "shape": key.shape._asdict(), "tile": dict(tile), **measured}


@cache
def tuned_tiles() -> Mapping[Key, Tile]:
    """Return the table shipped with this package."""
    return read_tiles(TABLE.read_text())
