from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kv_transfer import transports
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.kv_transfer.transports import (
    GrantedBlock,
    MemfdReceiver,
    PullError,
    TcpReceiver,
    batches,
    send_batch,
    trailer_struct,
)
from tests.kv_transfer.peer import LAYOUT
from tests.kv_transfer.streams import stream_pair
from tests.patience import HANG_S

BLOCK = GrantedBlock(position=4, source_id=11, generation=77, target_id=2)
OTHER = GrantedBlock(position=5, source_id=3, generation=78, target_id=1)


def _source_pool() -> PoolMemory:
    memory = PoolMemory.create(LAYOUT)
    memory.blocks[:] = bytes(index * 7 % 251 for index in range(LAYOUT.pool_bytes))
    for block in (BLOCK, OTHER):
        memory.generations[block.source_id] = block.generation
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
    with pytest.raises(PullError, match="reused"):
        asyncio.run(_stream(source, target, [OTHER]))


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


async def _stream(source: PoolMemory, target: PoolMemory, blocks: Sequence[GrantedBlock]) -> None:
    with stream_pair() as (near, far):
        for batch in batches([block.source_id for block in blocks], LAYOUT):
            await send_batch(far, source, batch)
        await TcpReceiver(target, near).receive(blocks)


async def _receive(target: PoolMemory, sent: bytes) -> None:
    """Receive `BLOCK` from a peer that sends ``sent`` and leaves."""
    with stream_pair() as (near, far):
        await far.send([memoryview(sent)])
        far.close()
        await TcpReceiver(target, near).receive([BLOCK])


def _good_batch(source: PoolMemory) -> bytes:
    block = source.block(BLOCK.source_id, 0, LAYOUT.num_kv_heads)
    return bytes(block) + trailer_struct(LAYOUT).pack(BLOCK.generation, xxhash.xxh3_64_intdigest(block))


@pytest.mark.parametrize(("blocks_per_batch", "runs_per_block"), [(1, 1), (2, 1), (3, 7)])
def test_tcp_writes_exactly_the_granted_blocks(
    source: PoolMemory,
    target: PoolMemory,
    monkeypatch: pytest.MonkeyPatch,
    blocks_per_batch: int,
    runs_per_block: int,
) -> None:
    monkeypatch.setattr(transports, "BATCH_BYTES", blocks_per_batch * LAYOUT.block_bytes)
    monkeypatch.setattr(transports, "RUN_BYTES", LAYOUT.block_bytes // runs_per_block + runs_per_block // 2)
    asyncio.run(_stream(source, target, [BLOCK, OTHER]))
    assert target.block(2, 0, 2) == source.block(11, 0, 2)
    assert target.block(1, 0, 2) == source.block(3, 0, 2)
    assert not any(target.block(0, 0, 2))
    assert not any(target.block(3, 0, 2))


def test_tcp_takes_what_the_protocol_says(source: PoolMemory, target: PoolMemory) -> None:
    asyncio.run(_receive(target, _good_batch(source)))
    assert target.block(2, 0, 2) == source.block(11, 0, 2)


def test_tcp_notices_a_reused_block(source: PoolMemory, target: PoolMemory) -> None:
    source.generations[OTHER.source_id] += 1
    with pytest.raises(PullError, match="block 5 was reused") as caught:
        asyncio.run(_stream(source, target, [BLOCK, OTHER]))
    assert caught.value.stage == "verify"


def test_tcp_notices_the_end_of_its_source(source: PoolMemory, target: PoolMemory) -> None:
    with pytest.raises(ConnectionResetError):
        asyncio.run(_receive(target, _good_batch(source)[:-1]))


def test_tcp_waits_for_bytes_that_come_slowly(
    source: PoolMemory, target: PoolMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transports, "BATCH_BYTES", LAYOUT.block_bytes)
    monkeypatch.setattr(transports, "BATCH_TIMEOUT_S", 2.0)
    blocks = [BLOCK, OTHER] * 11

    async def pull() -> float:
        with stream_pair() as (near, far):
            task, start_s = asyncio.ensure_future(TcpReceiver(target, near).receive(blocks)), time.monotonic()
            for block in blocks:
                await asyncio.sleep(0.1)
                await send_batch(far, source, [block.source_id])
            await task
            return time.monotonic() - start_s

    assert asyncio.run(pull()) > transports.BATCH_TIMEOUT_S


def test_tcp_gives_up_a_source_that_keeps_the_stream_and_sends_nothing(
    target: PoolMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transports, "BATCH_TIMEOUT_S", 0.1)

    async def pull() -> None:
        with stream_pair() as (near, _):
            await asyncio.wait_for(TcpReceiver(target, near).receive([BLOCK]), HANG_S)

    with pytest.raises(PullError, match=r"no batch came within 0\.1 s") as caught:
        asyncio.run(pull())
    assert caught.value.stage == "copy"


BATCH_LENGTH = LAYOUT.block_bytes + trailer_struct(LAYOUT).size


@settings(max_examples=40)
@given(position=st.integers(0, BATCH_LENGTH - 1), flip=st.integers(1, 255))
def test_any_flipped_byte_is_noticed(position: int, flip: int) -> None:
    source, target = _source_pool(), PoolMemory.create(LAYOUT)
    damaged = bytearray(_good_batch(source))
    damaged[position] ^= flip
    with pytest.raises(PullError, match=r"digest|reused") as caught:
        asyncio.run(_receive(target, bytes(damaged)))
    source.close()
    target.close()
    assert caught.value.stage == "verify"
