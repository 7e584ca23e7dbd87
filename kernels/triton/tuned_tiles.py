"""Tiles that were measured to be the fastest on a GPU: a table by device, kernel and shape, in ``tuned_tiles.json``.

Asked by `pdserve.kernels.triton.configs`, whose rules hold for what is not in the table. `pdserve.bench.kernels.tune`
writes it, and nobody by hand: an entry that was not measured has no place in it. Read once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

TABLE = Path(__file__).with_suffix(".json")


class AttentionShape(NamedTuple):
    """What the tiles of both attention kernels, and the cut of KV among programs, depend on."""

    dtype: str
    """Of queries, as torch names it."""
    kv_dtype: str
    head_dim: int
    group: int
    """Query heads of a KV head."""


class ProductShape(NamedTuple):
    """What the tiles of a product with a quantised weight depend on."""

    dtype: str
    """Of activations."""
    weight: str
    """``int8`` or ``int4``."""
    num_tokens: int
    """Of `pdserve.kernels.triton.configs.token_bucket`."""
    num_inputs: int
    num_outputs: int


Shape = AttentionShape | ProductShape
SHAPES: Mapping[str, type[AttentionShape] | type[ProductShape]] = {
    "prefill_attention": AttentionShape,
    "decode_attention": AttentionShape,
    "kv_split": AttentionShape,
    "quantized_matmul": ProductShape,
}
"""By kernel; ``kv_split`` is how decode attention is cut, for which there are two numbers in place of a tile."""


class Key(NamedTuple):
    device: str
    """Its name, as torch gives it."""
    kernel: str
    shape: Shape


Tile = Mapping[str, int]
"""The fields of `AttentionTile`, `KvCut` or `MatmulTile` in `pdserve.kernels.triton.configs`."""


def read_tiles(text: str) -> dict[Key, Tile]:
    """The table from its JSON: a list of objects with a device, a kernel, a shape and a tile.

    Raises:
        ValueError: an entry is not of this form, or a second one for the same shape; it is quoted.
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
    """What `read_tiles` reads, with what was measured beside it."""
    return {**key._asdict(), "shape": key.shape._asdict(), "tile": dict(tile), **measured}


@cache
def tuned_tiles() -> Mapping[Key, Tile]:
    """The table that comes with this package."""
    return read_tiles(TABLE.read_text())
