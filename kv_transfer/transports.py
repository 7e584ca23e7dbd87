"""Transports of granted blocks: a copy from the source's mapped pool, a data stream, or a link (in `links`).

A receiver returns from ``receive`` only when every block is copied and verified. Copies run on the event loop
between two awaits, never in a thread: a cancelled pull therefore writes nothing more, and the loop gets a turn every
few milliseconds.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import xxhash

from pdserve.contracts.kv_layout import KvLayout
from pdserve.kv_transfer.data_stream import DataStream
from pdserve.kv_transfer.pool_memory import PoolMemory

COPY_BYTES_PER_TURN = 4 << 20
BATCH_BYTES = 1 << 20
"""Bytes of blocks between two trailers of a data stream; both sides must agree. Few enough that a batch is still in a
core's cache when its digests are computed."""

REFUSED = "refused"
"""Failure stage of a pull that no other decode worker could complete either."""


class PullError(Exception):
    """Reason why a pull failed. ``stage`` is one of `PullDone.failure_stage`."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(message)
        self.stage = stage


class TransportImpossibleError(Exception):
    """The transport that both sides agreed on does not work between them."""

    def __init__(self, transport: str, message: str) -> None:
        super().__init__(message)
        self.transport = transport


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
            PullError: a block failed verification.
            OSError: the connection broke.
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


class TcpReceiver:
    """Receives blocks from a data stream into their targets, in batches: the bytes of some blocks, then a trailer with
    the generation and the digests of each. A block must not be used before its trailer is verified."""

    def __init__(self, target: PoolMemory, stream: DataStream) -> None:
        self._target = target
        self._stream = stream
        self._trailer = trailer_struct(target.layout)

    async def receive(self, blocks: Sequence[GrantedBlock]) -> None:
        num_heads = self._target.layout.num_kv_heads
        for batch in batches(blocks, self._target.layout):
            for block in batch:
                await self._stream.receive_into(self._target.block(block.target_id, 0, num_heads))
            trailers = await self._stream.receive(len(batch) * self._trailer.size)
            for block, trailer in zip(batch, self._trailer.iter_unpack(trailers), strict=True):
                self._verify(block, *trailer)
            await asyncio.sleep(0)

    def _verify(self, block: GrantedBlock, generation: int, *digests: int) -> None:
        check_generation(block, generation)
        layout = self._target.layout
        if list(digests) != head_digests(self._target.block(block.target_id, 0, layout.num_kv_heads), layout):
            raise _damaged(block)


async def send_batch(stream: DataStream, memory: PoolMemory, block_ids: Sequence[int]) -> None:
    """Send the blocks of one batch, and their trailer.

    Raises:
        OSError: the stream broke.
    """
    trailers = bytearray()
    trailer = trailer_struct(memory.layout)
    for block_id in block_ids:
        view = memory.block(block_id, 0, memory.layout.num_kv_heads)
        digests = head_digests(view, memory.layout)
        await stream.send(view)
        # The generation is read after the copy: an owner raises it before it writes anything new.
        trailers += trailer.pack(memory.generations[block_id], *digests)
    await stream.send(memoryview(trailers))
    await asyncio.sleep(0)


_Block = TypeVar("_Block")


def batches(blocks: Sequence[_Block], layout: KvLayout) -> Iterator[Sequence[_Block]]:
    """Split the blocks of one grant into the batches of a data stream."""
    size = max(1, BATCH_BYTES // layout.block_bytes)
    return (blocks[start : start + size] for start in range(0, len(blocks), size))


def trailer_struct(layout: KvLayout) -> struct.Struct:
    """Generation and xxh3-64 of each KV head of a block."""
    return struct.Struct(f"<{1 + layout.num_kv_heads}Q")


def head_digests(view: memoryview[int], layout: KvLayout) -> list[int]:
    """xxh3-64 of each KV head in ``view``, ``[num_heads, head_bytes]`` bytes."""
    head_bytes = layout.head_bytes
    return [xxhash.xxh3_64_intdigest(view[start : start + head_bytes]) for start in range(0, len(view), head_bytes)]


def _damaged(block: GrantedBlock) -> PullError:
    return PullError("verify", f"block {block.position} was damaged on its way: its digest differs")


def check_generation(block: GrantedBlock, generation: int) -> None:
    """Check the generation that was read after the block's copy.

    Raises:
        PullError: the source gave the block to another owner meanwhile.
    """
    if generation != block.generation:
        raise PullError(
            "verify", f"block {block.position} was reused: generation {generation}, {block.generation} was granted"
        )
