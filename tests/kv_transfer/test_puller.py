"""Pulls from sources that fail, lie or damage the blocks: each is an in-test gRPC server."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager

import grpc
import pytest

from pdserve.kv_transfer.handshake import layout_message
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.kv_transfer.puller import PullStream
from pdserve.kv_transfer.transports import PullError, block_data
from pdserve.proto.v1 import kv_pb2, kv_pb2_grpc
from tests.kv_transfer.peer import LAYOUT, Peer, running_peer

Serve = Callable[[kv_pb2.PullOpen, grpc.ServicerContext], Iterator[kv_pb2.SourceMessage]]
HANDLE = b"sixteen bytes .."
NUM_BLOCKS = 2


@pytest.fixture(name="target", scope="module")
def fixture_target() -> Iterator[Peer]:
    with running_peer(seed=5) as peer:
        yield peer
        assert peer.messages.empty()


@pytest.fixture(name="pool")
def fixture_pool() -> Iterator[PoolMemory]:
    memory = PoolMemory.create(LAYOUT)
    memory.blocks[:] = bytes(index * 11 % 253 for index in range(LAYOUT.pool_bytes))
    yield memory
    memory.close()


class _Servicer(kv_pb2_grpc.KvTransferServicer):
    def __init__(self, serve: Serve) -> None:
        self._serve = serve

    def Pull(self, request_iterator: object, context: object) -> Iterator[kv_pb2.SourceMessage]:  # noqa: N802
        assert isinstance(request_iterator, Iterator)
        assert isinstance(context, grpc.ServicerContext)
        return self._serve(next(request_iterator).open, context)


@contextmanager
def _source(serve: Serve) -> Iterator[str]:
    """Address of a source that answers every pull with ``serve``."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    kv_pb2_grpc.add_KvTransferServicer_to_server(_Servicer(serve), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def _opened(transport: str = "grpc") -> kv_pb2.SourceMessage:
    return kv_pb2.SourceMessage(opened=kv_pb2.Opened(transport=transport, layout=layout_message(LAYOUT)))


def _grant() -> kv_pb2.SourceMessage:
    grant = kv_pb2.Grant(
        block_ids=range(NUM_BLOCKS),
        generations=[0] * NUM_BLOCKS,
        final=True,
        num_tokens=NUM_BLOCKS * LAYOUT.block_size,
        first_token=kv_pb2.FirstToken(token=1),
    )
    return kv_pb2.SourceMessage(grant=grant)


def _data(pool: PoolMemory, index: int) -> kv_pb2.SourceMessage:
    data = block_data(pool, index=index, block_id=index, head_start=0, head_end=LAYOUT.num_kv_heads)
    return kv_pb2.SourceMessage(data=data)


def _good_answer(pool: PoolMemory) -> list[kv_pb2.SourceMessage]:
    return [_opened(), _grant(), *(_data(pool, index) for index in range(NUM_BLOCKS))]


def _pull_from(target: Peer, answer: list[kv_pb2.SourceMessage], failure_stage: str) -> str:
    """Pull from a source that sends ``answer`` to any request; returns the failure's message."""
    with _source(lambda opening, context: iter(answer)) as address:
        target.pull(address, HANDLE, [8, 9])
        return target.expect_done(failure_stage).message


def test_a_good_answer_succeeds(target: Peer, pool: PoolMemory) -> None:
    _pull_from(target, _good_answer(pool), "")
    assert [target.block(8), target.block(9)] == [bytes(pool.block(0, 0, 2)), bytes(pool.block(1, 0, 2))]


def test_a_damaged_block_is_not_reported_good(target: Peer, pool: PoolMemory) -> None:
    answer = _good_answer(pool)
    damaged = bytearray(answer[3].data.data)
    damaged[100] ^= 1
    answer[3].data.data = bytes(damaged)
    before = target.block(9)
    assert "digest" in _pull_from(target, answer, "verify")
    assert target.block(9) == before


def test_a_block_reused_while_it_is_sent_is_not_reported_good(target: Peer, pool: PoolMemory) -> None:
    answer = _good_answer(pool)
    answer[2].data.generation = 1
    assert "reused" in _pull_from(target, answer, "verify")


@pytest.mark.parametrize(
    ("spoil", "failure_stage"),
    [
        (lambda answer: answer.pop(), "copy"),
        (lambda answer: answer.reverse(), "connect"),
        (lambda answer: answer.clear(), "connect"),
        (lambda answer: answer.insert(1, kv_pb2.SourceMessage()), "grant"),
        (lambda answer: answer.insert(2, answer[3]), "copy"),
        (lambda answer: setattr(answer[1].grant, "first_index", 1), "grant"),
        (lambda answer: answer[1].grant.block_ids.__setitem__(0, LAYOUT.num_blocks), "grant"),
        (lambda answer: answer[1].grant.generations.pop(), "grant"),
        (lambda answer: setattr(answer[1].grant, "num_tokens", 2**32 - 1), "grant"),
        (lambda answer: setattr(answer[2].data, "data", b""), "copy"),
        (lambda answer: setattr(answer[0].opened.layout, "dtype", "float16"), "refused"),
        (lambda answer: setattr(answer[0].opened.layout, "num_blocks", 1), "grant"),
        (lambda answer: setattr(answer[0].opened, "transport", "fax"), "refused"),
    ],
)
def test_malformed_answers_fail_that_pull_only(
    target: Peer, pool: PoolMemory, spoil: Callable[[list[kv_pb2.SourceMessage]], object], failure_stage: str
) -> None:
    answer = _good_answer(pool)
    spoil(answer)
    _pull_from(target, answer, failure_stage)
    _pull_from(target, _good_answer(pool), "")


def test_an_oversized_message_is_not_taken(target: Peer, pool: PoolMemory) -> None:
    answer = _good_answer(pool)
    answer[2].data.data = bytes(1 << 20)
    assert "RESOURCE_EXHAUSTED" in _pull_from(target, answer, "copy")


def _unreachable_pool(opening: kv_pb2.PullOpen) -> kv_pb2.SourceMessage:
    opened = _opened("memfd")
    opened.opened.pool_path = "/proc/1/fd/999999"
    return opened


def test_auto_falls_back_to_grpc_when_the_pool_cannot_be_opened(target: Peer, pool: PoolMemory) -> None:
    asked: list[str] = []

    def serve(opening: kv_pb2.PullOpen, context: grpc.ServicerContext) -> Iterator[kv_pb2.SourceMessage]:
        asked.append(opening.transport)
        if len(asked) == 1:
            yield _unreachable_pool(opening)
        elif len(asked) == 2:
            context.abort(grpc.StatusCode.ALREADY_EXISTS, "the first stream is not noticed gone yet")
        else:
            yield from _good_answer(pool)

    with _source(serve) as address:
        target.pull(address, HANDLE, [8, 9])
        assert target.expect_done().transport == "grpc"
    assert asked == ["auto", "grpc", "grpc"]


def test_a_prompt_is_had_once_the_puller_before_is_noticed_gone(target: Peer, pool: PoolMemory) -> None:
    num_asked = 0

    def serve(opening: kv_pb2.PullOpen, context: grpc.ServicerContext) -> Iterator[kv_pb2.SourceMessage]:
        nonlocal num_asked
        num_asked += 1
        if num_asked < 3:
            context.abort(grpc.StatusCode.ALREADY_EXISTS, "another worker is pulling the prompt")
        yield from _good_answer(pool)

    with _source(serve) as address:
        target.pull(address, HANDLE, [8, 9])
        target.expect_done()
    assert num_asked == 3


def test_memfd_by_force_says_why_it_is_impossible() -> None:
    with (
        running_peer(transport="memfd") as target,
        _source(lambda opening, context: iter([_unreachable_pool(opening)])) as address,
    ):
        target.pull(address, HANDLE, [8, 9])
        assert "memfd is impossible" in target.expect_done("connect").message


def test_a_source_may_not_choose_another_transport_than_asked(pool: PoolMemory) -> None:
    with running_peer(transport="memfd") as target:
        assert "'grpc' for 'memfd'" in _pull_from(target, _good_answer(pool), "refused")


async def _open_and_close(address: str) -> None:
    stream = PullStream(address=address, cluster_token="", max_message_bytes=1 << 20)
    try:
        await stream.open(kv_pb2.PullOpen())
    finally:
        await stream.close(release=False)


def test_nobody_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(PullError) as caught:
            asyncio.run(_open_and_close(f"127.0.0.1:{unused.getsockname()[1]}"))
    assert caught.value.stage == "connect"


def test_a_listener_that_never_answers_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start_s = time.monotonic()
        with pytest.raises(PullError) as caught:
            asyncio.run(_open_and_close(f"127.0.0.1:{silent.getsockname()[1]}"))
    assert caught.value.stage == "connect"
    assert time.monotonic() - start_s < 15
