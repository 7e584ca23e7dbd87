from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.kv_transfer.transports import (
    GrantedBlock,
    GrpcReceiver,
    MemfdReceiver,
    PullError,
    block_data,
    head_digests,
    verify_block_data,
)
from pdserve.proto.v1 import kv_pb2
from tests.kv_transfer.peer import LAYOUT

BLOCK = GrantedBlock(position=4, source_id=11, generation=77, target_id=2)


def _source_pool() -> PoolMemory:
    memory = PoolMemory.create(LAYOUT)
    memory.blocks[:] = bytes(index * 7 % 251 for index in range(LAYOUT.pool_bytes))
    memory.generations[BLOCK.source_id] = BLOCK.generation
    return memory


@pytest.fixture(name="source")
def fixture_source() -> Iterator[PoolMemory]:
    memory = _source_pool()
    yield memory
    memory.close()


@pytest.fixture(name="target")
def fixture_target() -> Iterator[PoolMemory]:
    memory = PoolMemory.create(LAYOUT)
    yield memory
    memory.close()


def _message(source: PoolMemory) -> kv_pb2.BlockData:
    return block_data(source, index=BLOCK.position, block_id=BLOCK.source_id, head_start=0, head_end=2)


def test_memfd_copies_exactly_the_granted_blocks(source: PoolMemory, target: PoolMemory) -> None:
    asyncio.run(MemfdReceiver(target, source).receive([BLOCK]))
    assert target.block(2, 0, 2) == source.block(11, 0, 2)
    assert not any(target.block(1, 0, 2))
    assert not any(target.block(3, 0, 2))


def test_memfd_notices_a_reused_block(source: PoolMemory, target: PoolMemory) -> None:
    source.generations[BLOCK.source_id] += 1
    with pytest.raises(PullError, match="reused") as caught:
        asyncio.run(MemfdReceiver(target, source).receive([BLOCK]))
    assert caught.value.stage == "verify"


def reused_by_a_copy(source: PoolMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the block to another owner as soon as somebody begins to copy it."""
    block_of = source.block

    def block(block_id: int, head_start: int, head_end: int) -> memoryview:
        source.generations[block_id] += 1
        return block_of(block_id, head_start, head_end)

    monkeypatch.setattr(source, "block", block)


def test_a_block_that_is_reused_while_it_is_copied_is_noticed(
    source: PoolMemory, target: PoolMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    reused_by_a_copy(source, monkeypatch)
    with pytest.raises(PullError, match="reused"):
        asyncio.run(MemfdReceiver(target, source).receive([BLOCK]))
    assert _message(source).generation == BLOCK.generation + 2


def test_memfd_gives_the_loop_a_turn_between_large_copies(source: PoolMemory, target: PoolMemory) -> None:
    source.generations[0] = 5
    blocks = [GrantedBlock(0, 0, 5, 0)] * (2 * (4 << 20) // LAYOUT.block_bytes)

    async def copy_and_count() -> int:
        turns = 0
        task = asyncio.ensure_future(MemfdReceiver(target, source).receive(blocks))
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    assert asyncio.run(copy_and_count()) >= 3


def test_grpc_writes_what_it_verified(source: PoolMemory, target: PoolMemory) -> None:
    async def read() -> kv_pb2.SourceMessage:
        return kv_pb2.SourceMessage(data=_message(source))

    asyncio.run(GrpcReceiver(target, read).receive([BLOCK]))
    assert target.block(2, 0, 2) == source.block(11, 0, 2)


def test_grpc_takes_nothing_but_data(target: PoolMemory) -> None:
    async def read() -> kv_pb2.SourceMessage:
        return kv_pb2.SourceMessage(grant=kv_pb2.Grant())

    with pytest.raises(PullError, match="grant came"):
        asyncio.run(GrpcReceiver(target, read).receive([BLOCK]))


def test_a_head_range_is_sent_with_its_own_digests(source: PoolMemory) -> None:
    data = block_data(source, index=0, block_id=3, head_start=1, head_end=2)
    assert data.data == bytes(source.block(3, 1, 2))
    assert list(data.digests) == head_digests(bytes(source.block(3, 0, 2)), LAYOUT.head_bytes)[1:]


@given(position=st.integers(0, LAYOUT.block_bytes - 1), flip=st.integers(1, 255))
def test_any_flipped_byte_is_noticed(position: int, flip: int) -> None:
    memory = _source_pool()
    message = _message(memory)
    memory.close()
    damaged = bytearray(message.data)
    damaged[position] ^= flip
    message.data = bytes(damaged)
    with pytest.raises(PullError, match="digest") as caught:
        verify_block_data(message, BLOCK, LAYOUT)
    assert caught.value.stage == "verify"


def test_malformed_block_data_is_refused(source: PoolMemory) -> None:
    verify_block_data(_message(source), BLOCK, LAYOUT)
    for change, stage in (
        (kv_pb2.BlockData(index=9), "copy"),
        (kv_pb2.BlockData(data=bytes(LAYOUT.block_bytes - 1)), "copy"),
        (kv_pb2.BlockData(data=bytes(LAYOUT.block_bytes + 1)), "copy"),
        (kv_pb2.BlockData(generation=BLOCK.generation + 1), "verify"),
        (kv_pb2.BlockData(digests=[1]), "verify"),  # one digest too many
    ):
        message = _message(source)
        message.MergeFrom(change)
        with pytest.raises(PullError) as caught:
            verify_block_data(message, BLOCK, LAYOUT)
        assert caught.value.stage == stage
