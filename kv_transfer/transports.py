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
BATCH_BYTES = COPY_BYTES_PER_TURN
"""Bytes of blocks between two trailers of a data stream; both sides must agree."""
BATCH_TIMEOUT_S = 60.0
"""Longest wait of the puller for one batch of what was granted: a source that keeps both streams may send nothing."""
RUN_BYTES = 256 << 10
"""Bytes of a block with a digest of their own; both sides must agree. Few enough that a run stays in a core's cache
between its digest and its copy to or from the socket."""

REFUSED = "refused"
"""Failure stage of a pull that no other decode worker could complete either."""
ABORTED = "aborted"
"""Failure stage of a pull of a request that has ended: the engine aborted it, or the source withdrew the prompt."""


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
            PullError: a block failed verification, or does not come.
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
        for batch in batches(blocks, self._target.layout):
            trailers = bytearray(len(batch) * self._trailer.size)
            digests: list[list[int]] = []
            try:
                async with asyncio.timeout(BATCH_TIMEOUT_S):
                    await self._stream.receive_into(self._buffers(batch, trailers, digests))
            except TimeoutError:
                raise PullError("copy", f"no batch came within {BATCH_TIMEOUT_S:g} s") from None
            for block, received, (generation, *sent) in zip(
                batch, digests, self._trailer.iter_unpack(trailers), strict=True
            ):
                check_generation(block, generation)
                if received != sent:
                    raise PullError("verify", f"block {block.position} was damaged on its way: its digest differs")
            await asyncio.sleep(0)

    def _buffers(
        self, batch: Sequence[GrantedBlock], trailers: bytearray, digests: list[list[int]]
    ) -> Iterator[memoryview[int]]:
        """Buffers for a batch and its trailers, which adds the digests of each block's runs as these are full."""
        for block in batch:
            digests.append([])
            for run in runs(self._target, block.target_id):
                yield run
                digests[-1].append(xxhash.xxh3_64_intdigest(run))
        yield memoryview(trailers)


async def send_batch(stream: DataStream, memory: PoolMemory, block_ids: Sequence[int]) -> None:
    """Send the blocks of one batch, and their trailers.

    Raises:
        OSError: the stream broke.
    """
    await stream.send(_batch(memory, block_ids))
    await asyncio.sleep(0)


def _batch(memory: PoolMemory, block_ids: Sequence[int]) -> Iterator[memoryview[int]]:
    trailers = bytearray()
    trailer = trailer_struct(memory.layout)
    for block_id in block_ids:
        digests = []
        for run in runs(memory, block_id):
            digests.append(xxhash.xxh3_64_intdigest(run))
            yield run
        # The generation is read after the copy: an owner raises it before it writes anything new.
        trailers += trailer.pack(memory.generations[block_id], *digests)
    yield memoryview(trailers)


_Block = TypeVar("_Block")


def batches(blocks: Sequence[_Block], layout: KvLayout) -> Iterator[Sequence[_Block]]:
    """Split the blocks of one grant into the batches of a data stream."""
    size = max(1, BATCH_BYTES // layout.block_bytes)
    return (blocks[start : start + size] for start in range(0, len(blocks), size))


def trailer_struct(layout: KvLayout) -> struct.Struct:
    """Generation of a block, and xxh3-64 of each of its `runs`."""
    return struct.Struct(f"<{1 + -(-layout.block_bytes // RUN_BYTES)}Q")


def runs(memory: PoolMemory, block_id: int) -> Iterator[memoryview[int]]:
    """Bytes of a block, in runs of at most `RUN_BYTES`."""
    view = memory.block(block_id, 0, memory.layout.num_kv_heads)
    return (view[start : start + RUN_BYTES] for start in range(0, len(view), RUN_BYTES))


def check_generation(block: GrantedBlock, generation: int) -> None:
    """Check the generation that was read after the block's copy.

    Raises:
        PullError: the source gave the block to another owner meanwhile.
    """
    if generation != block.generation:
        raise PullError(
            "verify", f"block {block.position} was reused: generation {generation}, {block.generation} was granted"
        )
