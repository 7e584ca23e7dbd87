"""Geometry of a KV pool: one allocation per rank, of shape `KvLayout.shape`.

A page for (layer, head) is a contiguous ``[block_size, head_dim]`` tile for kernels; a whole block is one run of bytes
for transfers; a head range is contiguous within a block; axis 3 is K then V. Executors, the block pool's memory and the
transports take their offsets from this module.

A quantised pool has a float32 scale for every (token, head, layer, K or V). The scales of each (block, head),
``[num_layers, 2, block_size]``, follow its values, so that blocks and head ranges stay single runs.
"""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1, "uint64": 8}
"""Bytes per element. ``uint64`` is the emulated executor's hash state."""

SCALE_BYTES = {"int8": 4, "float8_e4m3fn": 4}
"""Bytes of one token's K or V scale, by quantised dtype; other dtypes have no scales."""

KV_DTYPE_SETTINGS = ("auto", *SCALE_BYTES)
"""Values that a deployment may request."""

KV_LAYOUT_VERSION = 1
"""Version of the byte layout; peers with different versions refuse each other. Increase it with every change."""


def resolve_kv_dtype(setting: str, model_dtype: str) -> str:
    """Return the KV dtype for ``setting``; ``auto`` is the model's dtype.

    Raises:
        ValueError: ``setting`` is not one of `KV_DTYPE_SETTINGS`.
    """
    if setting not in KV_DTYPE_SETTINGS:
        raise ValueError(f"kv_dtype {setting!r} is not supported: use one of {', '.join(KV_DTYPE_SETTINGS)}")
    return model_dtype if setting == "auto" else setting


def kv_vector_bytes(head_dim: int, dtype: str) -> int:
    """Bytes of K or V for one token and head in one layer."""
    return head_dim * DTYPE_BYTES[dtype] + SCALE_BYTES.get(dtype, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Shape and dtype of one rank's KV pool, and the identity of the model that fills it."""

    num_blocks: int
    num_kv_heads: int
    num_layers: int
    block_size: int
    """Tokens per block."""
    head_dim: int
    dtype: str
    """A key of `DTYPE_BYTES`."""
    model_hash: str
    """Identity of weights and configuration; peers refuse KV of another model."""

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """``[num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]``."""
        return (self.num_blocks, self.num_kv_heads, self.num_layers, 2, self.block_size, self.head_dim)

    @property
    def head_bytes(self) -> int:
        """Bytes of one KV head in one block: all layers, K and V."""
        return self.num_layers * 2 * self.block_size * kv_vector_bytes(self.head_dim, self.dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: the unit of transfer."""
        return self.num_kv_heads * self.head_bytes

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def layer_runs(self, layers: range) -> list[range]:
        """Bytes of ``layers`` in a head of a block: their values, then their scales. All layers are one run."""
        if layers == range(self.num_layers):
            return [range(self.head_bytes)]
        scale_bytes = 2 * self.block_size * SCALE_BYTES.get(self.dtype, 0)
        value_bytes = self.head_bytes // self.num_layers - scale_bytes
        scales = self.num_layers * value_bytes
        return [
            range(layers.start * value_bytes, layers.stop * value_bytes),
            range(scales + layers.start * scale_bytes, scales + layers.stop * scale_bytes),
        ]

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)
