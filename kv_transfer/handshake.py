"""Checks between a puller and a source before any byte moves, and of every grant.

Pure functions over wire messages and the local configuration. Each raises ValueError with a reason that names the
field; the caller decides what fails.
"""

from __future__ import annotations

import os
from dataclasses import asdict, fields, replace
from pathlib import Path

from pdserve.contracts.kv_layout import KV_LAYOUT_VERSION, KvLayout
from pdserve.kv_transfer.resharding import KvShard
from pdserve.proto.v1 import kv_pb2

_LAYOUT_FIELDS = [field.name for field in fields(KvLayout)]


def host_id() -> str:
    """Id shared by processes that can reach each other through ``/proc``: same boot, same process-id namespace."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id} {os.readlink('/proc/self/ns/pid')}"


def layout_message(layout: KvLayout) -> kv_pb2.Layout:
    return kv_pb2.Layout(version=KV_LAYOUT_VERSION, **asdict(layout))


def shard_message(shard: KvShard) -> kv_pb2.KvShard:
    heads, layers = shard
    return kv_pb2.KvShard(first_head=heads.start, end_head=heads.stop, first_layer=layers.start, end_layer=layers.stop)


def shard_from(message: kv_pb2.KvShard) -> KvShard:
    return KvShard(range(message.first_head, message.end_head), range(message.first_layer, message.end_layer))


def check_layout(message: kv_pb2.Layout, ours: KvLayout) -> KvLayout:
    """Return the peer's layout, whose blocks can be copied to and from ours.

    Raises:
        ValueError: it differs in more than the number of blocks.
    """
    if message.version != KV_LAYOUT_VERSION:
        raise ValueError(f"KV layout version is {message.version} there and {KV_LAYOUT_VERSION} here")
    for name in _LAYOUT_FIELDS:
        if name != "num_blocks" and getattr(message, name) != getattr(ours, name):
            raise ValueError(f"KV layout: {name} is {getattr(message, name)!r} there and {getattr(ours, name)!r} here")
    if message.num_blocks < 1:
        raise ValueError("KV layout: num_blocks is 0")
    return replace(ours, num_blocks=message.num_blocks)


def check_grant(grant: kv_pb2.Grant, *, first_index: int, layout: KvLayout, is_prefix: bool = False) -> None:
    """Check that a grant follows the previous one and names blocks of the source's pool.

    Args:
        first_index: number of blocks granted before.
        layout: the source's.
        is_prefix: it lends cached blocks, and has no first token.

    Raises:
        ValueError: it does not.
    """
    num_blocks = len(grant.block_ids)
    if grant.first_index != first_index:
        raise ValueError(f"grant starts at block {grant.first_index}, not {first_index}")
    if len(grant.generations) != num_blocks:
        raise ValueError(f"grant of {num_blocks} blocks with {len(grant.generations)} generations")
    if first_index + num_blocks > layout.num_blocks:
        raise ValueError(f"grants of {first_index + num_blocks} blocks from a pool of {layout.num_blocks}")
    if any(block_id >= layout.num_blocks for block_id in grant.block_ids):
        raise ValueError(f"grant of block {max(grant.block_ids)} from a pool of {layout.num_blocks}")
    if grant.final and not is_prefix and not grant.HasField("first_token"):
        raise ValueError("final grant without a first token")
    if grant.final and not ends_request(grant) and layout.num_blocks_for(grant.num_tokens) != first_index + num_blocks:
        raise ValueError(f"{first_index + num_blocks} blocks granted for {grant.num_tokens} tokens")


def ends_request(grant: kv_pb2.Grant) -> bool:
    """Whether the request ended with its first token and needs no block."""
    return grant.final and bool(grant.first_token.finish)
