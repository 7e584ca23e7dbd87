"""Pulls from sources that fail, lie or damage the blocks: each is an in-test gRPC server."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager, suppress
from functools import partial

import grpc
import pytest
import xxhash

from pdserve.kv_transfer.handshake import layout_message
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.kv_transfer.pull_stream import PullStream
from pdserve.kv_transfer.transports import PullError, trailer_struct
from pdserve.proto.token_proof import ServerProof
from pdserve.proto.v1 import kv_pb2, kv_pb2_grpc
from tests.kv_transfer.peer import LAYOUT, TOKEN, Peer, quiet, running_peer
from tests.kv_transfer.streams import answer_puller
from tests.shared import shared

Serve = Callable[[kv_pb2.PullOpen, grpc.ServicerContext], Iterator[kv_pb2.SourceMessage]]
HANDLE = b"sixteen bytes .."
NUM_BLOCKS = 2


@pytest.fixture(name="target")
def fixture_target(request: pytest.FixtureRequest) -> Iterator[Peer]:
    yield from quiet(shared(request, partial(running_peer, seed=5)))


@pytest.fixture(name="pool")
def fixture_pool() -> Iterator[PoolMemory]:
    memory = PoolMemory.create(LAYOUT)
    memory.blocks[:] = bytes(index * 11 % 253 for index in range(LAYOUT.pool_bytes))
    yield memory
    memory.close()


class _Servicer(kv_pb2_grpc.KvTransferServicer):
    def __init__(self, serve: Serve) -> None:
        self.address = ""
        self._serve = serve

    def Pull(self, request_iterator: object, context: object) -> Iterator[kv_pb2.SourceMessage]:  # noqa: N802
        assert isinstance(request_iterator, Iterator)
        assert isinstance(context, grpc.ServicerContext)
        context.send_initial_metadata(ServerProof(TOKEN, self.address, dict(context.invocation_metadata())).metadata)
        return self._serve(next(request_iterator).open, context)

    def Link(self, request_iterator: object, context: object) -> Iterator[kv_pb2.SourceMessage]:  # noqa: N802
        raise AssertionError("nothing here asks for a link")


@contextmanager
def _source(serve: Serve) -> Iterator[str]:
    """Address of a source that answers every pull with ``serve``."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    servicer = _Servicer(serve)
    kv_pb2_grpc.add_KvTransferServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield servicer.address
    server.stop(None).wait()


@contextmanager
def _data_port(sent: bytes) -> Iterator[int]:
    """Port of a source that sends ``sent`` to each puller that comes with a data stream, and then waits for its end."""

    def serve() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with sock, suppress(ConnectionError):
                answer_puller(sock, TOKEN)
                sock.sendall(sent)
                sock.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def _opened(transport: str = "tcp", port: int = 0) -> kv_pb2.SourceMessage:
    opened = kv_pb2.Opened(
        transport=transport, layout=layout_message(LAYOUT), data_port=port, ticket=b"sixteen bytes .."
    )
    return kv_pb2.SourceMessage(opened=opened)


def _grant() -> kv_pb2.SourceMessage:
    grant = kv_pb2.Grant(
        block_ids=range(NUM_BLOCKS),
        generations=[0] * NUM_BLOCKS,
        final=True,
        num_tokens=NUM_BLOCKS * LAYOUT.block_size,
        first_token=kv_pb2.FirstToken(token=1),
    )
    return kv_pb2.SourceMessage(grant=grant)


def _data(pool: PoolMemory) -> bytes:
    """What a good source sends: blocks, then their trailers."""
    data, trailers = bytearray(), bytearray()
    for block_id in range(NUM_BLOCKS):
        block = pool.block(block_id, 0, LAYOUT.num_kv_heads)
        data += block
        trailers += trailer_struct(LAYOUT).pack(pool.generations[block_id], xxhash.xxh3_64_intdigest(block))
    return bytes(data + trailers)


def _pull_from(
    target: Peer,
    data: bytes,
    failure_stage: str,
    spoil: Callable[[list[kv_pb2.SourceMessage]], object] = lambda answer: None,
) -> str:
    """Pull from a source that sends ``data``, and messages changed by ``spoil``; returns the failure's message."""
    with _data_port(data) as port:
        answer = [_opened(port=port), _grant()]
        spoil(answer)

        def serve(opening: kv_pb2.PullOpen, context: grpc.ServicerContext) -> Iterator[kv_pb2.SourceMessage]:
            yield from answer
            if not failure_stage or failure_stage == "verify":
                time.sleep(0.5)  # until the puller has received everything

        with _source(serve) as address:
            target.pull(address, HANDLE, [8, 9])
            return target.expect_done(failure_stage).message


def test_a_good_answer_succeeds(target: Peer, pool: PoolMemory) -> None:
    _pull_from(target, _data(pool), "")
    assert [target.block(8), target.block(9)] == [bytes(pool.block(0, 0, 2)), bytes(pool.block(1, 0, 2))]


def test_a_damaged_block_is_not_reported_good(target: Peer, pool: PoolMemory) -> None:
    damaged = bytearray(_data(pool))
    damaged[LAYOUT.block_bytes + 100] ^= 1
    assert "block 1 was damaged" in _pull_from(target, bytes(damaged), "verify")


def test_a_block_reused_while_it_is_sent_is_not_reported_good(target: Peer, pool: PoolMemory) -> None:
    pool.generations[1] = 1
    assert "reused" in _pull_from(target, _data(pool), "verify")


@pytest.mark.parametrize(
    ("spoil", "failure_stage"),
    [
        (lambda answer: answer.pop(), "grant"),
        (lambda answer: answer.reverse(), "connect"),
        (lambda answer: answer.clear(), "connect"),
        (lambda answer: answer.insert(1, kv_pb2.SourceMessage()), "grant"),
        (lambda answer: setattr(answer[1].grant, "first_index", 1), "grant"),
        (lambda answer: answer[1].grant.block_ids.__setitem__(0, LAYOUT.num_blocks), "grant"),
        (lambda answer: answer[1].grant.generations.pop(), "grant"),
        (lambda answer: setattr(answer[1].grant, "num_tokens", 2**32 - 1), "grant"),
        (lambda answer: setattr(answer[0].opened.layout, "dtype", "float16"), "refused"),
        (lambda answer: setattr(answer[0].opened.layout, "num_blocks", 1), "grant"),
        (lambda answer: setattr(answer[0].opened, "transport", "fax"), "refused"),
        (lambda answer: setattr(answer[0].opened, "data_port", 1), "connect"),
    ],
)
def test_malformed_answers_fail_that_pull_only(
    target: Peer, pool: PoolMemory, spoil: Callable[[list[kv_pb2.SourceMessage]], object], failure_stage: str
) -> None:
    _pull_from(target, _data(pool), failure_stage, spoil)
    _pull_from(target, _data(pool), "")


def test_a_source_that_ends_the_pull_while_it_sends_says_why(target: Peer, pool: PoolMemory) -> None:
    """The data stream alone stays silent: the end of the control stream ends the pull."""

    def serve(opening: kv_pb2.PullOpen, context: grpc.ServicerContext) -> Iterator[kv_pb2.SourceMessage]:
        yield from (_opened(port=port), _grant())
        context.abort(grpc.StatusCode.ABORTED, "the source needs the prompt's blocks and withdrew it")

    with _data_port(_data(pool)[:100]) as port, _source(serve) as address:
        target.pull(address, HANDLE, [8, 9])
        assert "withdrew" in target.expect_done("aborted").message


def _unreachable_pool(opening: kv_pb2.PullOpen) -> kv_pb2.SourceMessage:
    opened = _opened("memfd")
    opened.opened.pool_path = "/proc/1/fd/999999"
    return opened


def test_auto_falls_back_to_tcp_when_the_pool_cannot_be_opened(target: Peer, pool: PoolMemory) -> None:
    asked: list[str] = []

    def serve(opening: kv_pb2.PullOpen, context: grpc.ServicerContext) -> Iterator[kv_pb2.SourceMessage]:
        asked.append(opening.transport)
        if len(asked) == 1:
            yield _unreachable_pool(opening)
        else:
            yield from (_opened(port=port), _grant())
            time.sleep(0.5)

    with _data_port(_data(pool)) as port, _source(serve) as address:
        target.pull(address, HANDLE, [8, 9])
        assert target.expect_done().transport == "tcp"
    assert asked == ["auto", "tcp"]


def test_memfd_by_force_says_why_it_is_impossible() -> None:
    with (
        running_peer(transport="memfd") as target,
        _source(lambda opening, context: iter([_unreachable_pool(opening)])) as address,
    ):
        target.pull(address, HANDLE, [8, 9])
        assert "memfd is impossible" in target.expect_done("connect").message


def test_a_source_may_not_choose_another_transport_than_asked(pool: PoolMemory) -> None:
    with running_peer(transport="memfd") as target:
        assert "'tcp' for 'memfd'" in _pull_from(target, _data(pool), "refused")


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
