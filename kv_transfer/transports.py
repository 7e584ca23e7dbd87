"""Transports of granted blocks: a copy from the source's mapped pool, or messages in the pull's gRPC stream.

A receiver returns from ``receive`` only when every block is copied and verified. Copies run on the event loop
between two awaits, never in a thread: a cancelled pull therefore writes nothing more, and the loop gets a turn every
few milliseconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

import xxhash

from pdserve.contracts.kv_layout import KvLayout
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.proto.v1 import kv_pb2

COPY_BYTES_PER_TURN = 4 << 20

REFUSED = "refused"
"""Failure stage of a pull that no other decode worker could complete either."""


class PullError(Exception):
    """Reason why a pull failed. ``stage`` is one of `PullDone.failure_stage`."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(message)
        self.stage = stage


class GrantedBlock(NamedTuple):
    """A block to fetch."""

    position: int
    """Index of the block in the prompt."""
    source_id: int
    generation: int
    """Generation of the source's block while it holds the prompt."""
    target_id: int


class Receiver(Protocol):
    """Receives granted blocks into the local pool."""

    async def receive(self, blocks: Sequence[GrantedBlock]) -> None:
        """Copy and verify all KV heads of ``blocks``.

        Raises:
            PullError: a block could not be received or failed verification.
        """
        ...


class MemfdReceiver:
    """Copies from the source's pool, mapped read-only."""

    def __init__(self, target: PoolMemory, source: PoolMemory) -> None:
        self._target = target
        self._source = source

    async def receive(self, blocks: Sequence[GrantedBlock]) -> None:
        blocks_per_turn = max(1, COPY_BYTES_PER_TURN // self._target.layout.block_bytes)
        for start in range(0, len(blocks), blocks_per_turn):
            for block in blocks[start : start + blocks_per_turn]:
                self._copy(block)
            await asyncio.sleep(0)

    def _copy(self, block: GrantedBlock) -> None:
        num_heads = self._target.layout.num_kv_heads
        self._target.block(block.target_id, 0, num_heads)[:] = self._source.block(block.source_id, 0, num_heads)
        # After the copy: an owner raises the generation before it writes anything new.
        check_generation(block, self._source.generations[block.source_id])


class GrpcReceiver:
    """Receives blocks from the pull's stream, in the order of the grants."""

    def __init__(self, target: PoolMemory, read: Callable[[], Awaitable[kv_pb2.SourceMessage]]) -> None:
        self._target = target
        self._read = read

    async def receive(self, blocks: Sequence[GrantedBlock]) -> None:
        num_heads = self._target.layout.num_kv_heads
        for block in blocks:
            message = await self._read()
            if message.WhichOneof("body") != "data":
                raise PullError("copy", f"block {block.position} was expected, {message.WhichOneof('body')} came")
            verify_block_data(message.data, block, self._target.layout)
            self._target.block(block.target_id, 0, num_heads)[:] = message.data.data


def block_data(memory: PoolMemory, *, index: int, block_id: int, head_start: int, head_end: int) -> kv_pb2.BlockData:
    """Message with a block's KV heads ``[head_start, head_end)`` and the integrity data of exactly these bytes."""
    data = bytes(memory.block(block_id, head_start, head_end))
    generation = memory.generations[block_id]  # after the copy
    return kv_pb2.BlockData(
        index=index, generation=generation, data=data, digests=head_digests(data, memory.layout.head_bytes)
    )


def head_digests(data: bytes, head_bytes: int) -> list[int]:
    """xxh3-64 of each KV head in ``data``, ``[num_heads, head_bytes]`` bytes."""
    view = memoryview(data)
    return [xxhash.xxh3_64_intdigest(view[start : start + head_bytes]) for start in range(0, len(data), head_bytes)]


def verify_block_data(data: kv_pb2.BlockData, block: GrantedBlock, layout: KvLayout) -> None:
    """Check that a message holds all KV heads of the granted block, undamaged and with the granted generation.

    Raises:
        PullError: it does not; its bytes must not be used.
    """
    if data.index != block.position:
        raise PullError("copy", f"block {block.position} was expected, block {data.index} came")
    if len(data.data) != layout.block_bytes:
        raise PullError("copy", f"block {block.position} came with {len(data.data)} bytes of {layout.block_bytes}")
    if list(data.digests) != head_digests(data.data, layout.head_bytes):
        raise PullError("verify", f"block {block.position} was damaged on its way: its digest differs")
    check_generation(block, data.generation)


def check_generation(block: GrantedBlock, generation: int) -> None:
    """Check the generation that was read after the block's copy.

    Raises:
        PullError: the source gave the block to another owner meanwhile.
    """
    if generation != block.generation:
        raise PullError(
            "verify", f"block {block.position} was reused: generation {generation}, {block.generation} was granted"
        )
