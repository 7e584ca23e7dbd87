"""Answers of a source to a client that speaks the protocol by hand, correctly and incorrectly."""

from __future__ import annotations

import asyncio
import os
import queue
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import pytest
import xxhash

from pdserve.kv_transfer.handshake import host_id, layout_message
from pdserve.kv_transfer.links import MAX_LINKS
from pdserve.kv_transfer.source import MAX_UNPROVEN_PULLS
from pdserve.kv_transfer.transports import trailer_struct
from pdserve.proto.token_proof import ClientProof
from pdserve.proto.v1 import kv_pb2, kv_pb2_grpc, transfer_pb2
from tests.kv_transfer.peer import EPOCH, LAYOUT, TOKEN, Peer, running_peer
from tests.kv_transfer.streams import MAGIC, receive_exactly, token_proof
from tests.patience import HANG_S
from tests.shared import shared


@pytest.fixture(name="source")
def fixture_source(request: pytest.FixtureRequest) -> Peer:
    return shared(request, partial(running_peer, seed=4))


def _opening(handle: bytes, transport: str = "tcp") -> kv_pb2.PullOpen:
    return kv_pb2.PullOpen(
        worker_epoch=EPOCH,
        handle=handle,
        layout=layout_message(LAYOUT),
        transport=transport,
        host_id=host_id(),
    )


class _Client:
    """A pull whose messages the test writes as bytes and reads one by one."""

    def __init__(self, channel: grpc.Channel, address: str, method: str = "Pull") -> None:
        self._requests: queue.Queue[bytes | None] = queue.Queue()
        pull = channel.stream_stream(f"/pdserve.v1.KvTransfer/{method}", bytes, kv_pb2.SourceMessage.FromString)
        # Both a response iterator and a call, a combination unknown to grpc-stubs.
        ours = ClientProof(TOKEN, address)
        self.call: Any = pull(iter(self._requests.get, None), timeout=HANG_S, metadata=ours.metadata)
        opening = kv_pb2.PullOpen(proof=ours.check(dict(self.call.initial_metadata())))
        self.proof = kv_pb2.PullMessage(open=opening).SerializeToString()
        """Makes a `PullOpen` that it follows in one message that of a member."""

    def write(self, message: kv_pb2.PullMessage) -> None:
        proof = self.proof if message.HasField("open") else b""
        self._requests.put(message.SerializeToString() + proof)

    def write_bytes(self, data: bytes) -> None:
        self._requests.put(data)

    def done_writing(self) -> None:
        self._requests.put(None)

    def read(self) -> kv_pb2.SourceMessage:
        message = next(self.call)
        assert isinstance(message, kv_pb2.SourceMessage)
        return message

    def expect_end(self) -> tuple[grpc.StatusCode, str]:
        """Read to the end of the stream; returns its status."""
        try:
            for _ in self.call:
                pass
        except grpc.RpcError:
            pass
        return self.call.code(), self.call.details()


@contextmanager
def _client(source: Peer, method: str = "Pull") -> Iterator[_Client]:
    with grpc.insecure_channel(source.process.address) as channel:
        client = _Client(channel, source.process.address, method)
        yield client
        client.done_writing()
        client.call.cancel()


def test_grants_and_their_blocks_in_order(source: Peer) -> None:
    handle = source.offer()
    source.grant(handle, [5, 6], final=False)
    source.grant(handle, [7], first_index=2, token=11)
    with _client(source) as client:
        opening = _opening(handle)
        opening.num_cached_blocks = 1
        client.write(kv_pb2.PullMessage(open=opening))
        opened = client.read().opened
        assert (opened.transport, opened.layout, opened.pool_path) == ("tcp", layout_message(LAYOUT), "")
        assert list(client.read().grant.block_ids) == [5, 6]
        with _data_stream(opened) as sock:
            assert client.read().grant.first_token.token == 11
            for block_id in (6, 7):
                block = source.memory.block(block_id, 0, LAYOUT.num_kv_heads)
                trailer = trailer_struct(LAYOUT).pack(
                    source.memory.generations[block_id], xxhash.xxh3_64_intdigest(block)
                )
                assert receive_exactly(sock, len(block) + len(trailer)) == bytes(block) + trailer
            client.write(kv_pb2.PullMessage(release=kv_pb2.Release()))
            assert client.expect_end()[0] is grpc.StatusCode.OK
            assert sock.recv(1) == b""
    source.expect("lease_opened")
    source.expect("released")


def test_a_puller_without_the_token_is_refused(source: Peer) -> None:
    handle = source.offer()
    with _client(source) as client:
        client.write_bytes(kv_pb2.PullMessage(open=_opening(handle)).SerializeToString())
        assert client.expect_end() == (grpc.StatusCode.UNAUTHENTICATED, "the puller does not know the cluster token")
    source.withdraw(handle)


def test_strangers_that_wait_keep_no_puller_out(source: Peer) -> None:
    async def run() -> None:
        async with grpc.aio.insecure_channel(source.process.address) as channel:
            strangers = [kv_pb2_grpc.KvTransferStub(channel).Pull(None) for _ in range(MAX_UNPROVEN_PULLS)]
            await asyncio.gather(*(stranger.initial_metadata() for stranger in strangers))
            await asyncio.to_thread(pull)
            ends = [asyncio.ensure_future(stranger.details()) for stranger in strangers]
            ended, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            assert ended.pop().result() == "no proof of the cluster token came before newer calls took its place"

    def pull() -> None:
        handle = source.offer()
        with _client(source) as client:
            client.write(kv_pb2.PullMessage(open=_opening(handle)))
            client.read()
        source.expect("lease_opened")
        source.expect("lease_lost")
        source.withdraw(handle)

    asyncio.run(run())


def test_a_withdrawn_prompt_is_not_sent_on() -> None:
    layout = replace(LAYOUT, num_layers=LAYOUT.num_layers << 10)
    num_blocks = 48
    with running_peer(layout=layout, seed=6) as source:
        handle = source.offer()
        source.grant(handle, list(range(num_blocks)))
        with _client(source) as client:
            opening = _opening(handle)
            opening.layout.CopyFrom(layout_message(layout))
            client.write(kv_pb2.PullMessage(open=opening))
            with _data_stream(client.read().opened) as sock:
                receive_exactly(sock, 1)
                source.withdraw(handle)
                code, reason = client.expect_end()
                assert code is grpc.StatusCode.ABORTED
                assert "withdrew" in reason
                num_received = 1
                with suppress(ConnectionError):
                    while data := sock.recv(1 << 20):
                        num_received += len(data)
                assert num_received < num_blocks * layout.block_bytes // 2


@contextmanager
def _data_stream(opened: kv_pb2.Opened) -> Iterator[socket.socket]:
    """The puller's side of a data stream, by hand."""
    with socket.create_connection(("127.0.0.1", opened.data_port), timeout=HANG_S) as sock:
        nonce = os.urandom(32)
        sock.sendall(MAGIC + opened.ticket + nonce)
        answer = receive_exactly(sock, 64)
        fields = opened.ticket, nonce, answer[:32]
        assert answer[32:] == token_proof(TOKEN, b"source", *fields)
        sock.sendall(token_proof(TOKEN, b"puller", *fields))
        yield sock


def test_memfd_sends_no_blocks(source: Peer) -> None:
    handle = source.offer()
    source.grant(handle, [5])
    with _client(source) as client:
        client.write(kv_pb2.PullMessage(open=_opening(handle, "auto")))
        opened = client.read().opened
        assert opened.pool_path == f"/proc/{source.process.pid}/fd/{source.memory.fd}"
        assert opened.pool_inode == source.memory.inode
        assert client.read().grant.final
        client.write(kv_pb2.PullMessage(release=kv_pb2.Release()))
        assert client.expect_end()[0] is grpc.StatusCode.OK
    source.expect("lease_opened")
    source.expect("released")


def test_auto_is_tcp_from_another_host(source: Peer) -> None:
    handle = source.offer()
    with _client(source) as client:
        opening = _opening(handle, "auto")
        opening.host_id = "another host"
        client.write(kv_pb2.PullMessage(open=opening))
        assert client.read().opened.transport == "tcp"
    source.expect("lease_opened")
    source.expect("lease_lost")
    source.withdraw(handle)


@pytest.mark.parametrize("transport", ["tcp", "memfd"])
def test_a_newer_pull_takes_the_lease_of_one_that_is_not_noticed_gone(source: Peer, transport: str) -> None:
    handle = source.offer()
    with _client(source) as first, _client(source) as second:
        first.write(kv_pb2.PullMessage(open=_opening(handle, transport)))
        assert first.read().opened.transport == transport
        second.write(kv_pb2.PullMessage(open=_opening(handle, "auto")))
        assert second.read().opened.transport == "memfd"
        code, reason = first.expect_end()
        assert code is grpc.StatusCode.ABORTED
        assert "another worker" in reason
        source.expect("lease_opened")
        source.expect("lease_opened")  # and no lease is lost
        source.grant(handle, [5], final=True)
        assert second.read().grant.block_ids == [5]
        second.write(kv_pb2.PullMessage(release=kv_pb2.Release()))
        source.expect("released")


def test_a_grant_after_the_final_one_withdraws_the_prompt(source: Peer) -> None:
    handle = source.offer()
    with _client(source) as client:
        client.write(kv_pb2.PullMessage(open=_opening(handle)))
        assert client.read().opened.transport == "tcp"
        source.grant(handle, [5])
        source.grant(handle, [6], first_index=1)
        assert client.expect_end()[0] is grpc.StatusCode.ABORTED
    source.expect("lease_opened")


@pytest.mark.parametrize(
    ("change", "code", "reason"),
    [
        (lambda m: setattr(m, "worker_epoch", 1), grpc.StatusCode.NOT_FOUND, "epoch"),
        (lambda m: setattr(m, "handle", b""), grpc.StatusCode.NOT_FOUND, "no such prompt"),
        (lambda m: setattr(m.layout, "version", 9), grpc.StatusCode.FAILED_PRECONDITION, "version"),
        (lambda m: setattr(m.layout, "block_size", 16), grpc.StatusCode.FAILED_PRECONDITION, "block_size"),
        (lambda m: m.ClearField("layout"), grpc.StatusCode.FAILED_PRECONDITION, "version"),
        (lambda m: setattr(m, "transport", "fax"), grpc.StatusCode.FAILED_PRECONDITION, "transport"),
    ],
)
def test_refusals(source: Peer, change: Callable[[kv_pb2.PullOpen], None], code: grpc.StatusCode, reason: str) -> None:
    handle = source.offer()
    source.grant(handle, [1])
    with _client(source) as client:
        opening = _opening(handle)
        change(opening)
        client.write(kv_pb2.PullMessage(open=opening))
        actual_code, details = client.expect_end()
        assert actual_code is code
        assert reason in details
    source.withdraw(handle)
    assert source.messages.empty()


@pytest.mark.parametrize("first", [b"\xff\xff", b"", kv_pb2.PullMessage(release=kv_pb2.Release()).SerializeToString()])
def test_a_pull_must_start_with_open(source: Peer, first: bytes) -> None:
    with _client(source) as client:
        client.write_bytes(first)
        assert client.expect_end()[0] is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("second", [b"\xff\xff", kv_pb2.PullMessage(open=kv_pb2.PullOpen()).SerializeToString()])
def test_anything_but_a_release_loses_the_lease(source: Peer, second: bytes) -> None:
    handle = source.offer()
    source.grant(handle, [1])
    with _client(source) as client:
        client.write(kv_pb2.PullMessage(open=_opening(handle)))
        source.expect("lease_opened")
        client.write_bytes(second)
        client.expect_end()
    source.expect("lease_lost")
    source.withdraw(handle)


def test_a_release_before_the_final_grant_releases_nothing(source: Peer) -> None:
    handle = source.offer()
    source.grant(handle, [1], final=False)
    with _client(source) as client:
        client.write(kv_pb2.PullMessage(open=_opening(handle)))
        source.expect("lease_opened")
        client.write(kv_pb2.PullMessage(release=kv_pb2.Release()))
        client.expect_end()
    source.expect("lease_lost")
    source.withdraw(handle)


def test_a_source_outlives_mutated_opens() -> None:
    rng = random.Random(0)
    with running_peer() as source, running_peer(seed=1) as target:
        handle = source.offer()
        source.grant(handle, [1, 2], final=False)
        source.grant(handle, [3], first_index=2)
        valid = kv_pb2.PullMessage(open=_opening(handle)).SerializeToString()
        with grpc.insecure_channel(source.process.address) as channel:
            for _ in range(300):
                data = bytearray(valid)
                for _ in range(rng.randint(1, 4)):
                    data[rng.randrange(len(data))] = rng.randrange(256)
                client = _Client(channel, source.process.address)
                sent = bytes(data[: rng.randint(1, len(data))] if rng.random() < 0.2 else data)
                client.write_bytes(sent + client.proof)
                client.done_writing()
                assert client.expect_end()[0] is not grpc.StatusCode.DEADLINE_EXCEEDED
        target.pull(source.process.address, handle, [7, 8, 9])
        assert target.expect_done().bytes == 3 * LAYOUT.block_bytes
        assert [target.block(i) for i in (7, 8, 9)] == [source.block(i) for i in (1, 2, 3)]
        bodies = _bodies_until_released(source)
        assert set(bodies) <= {"lease_opened", "lease_lost", "released"}
        assert bodies.count("lease_opened") == bodies.count("lease_lost") + 1


def _bodies_until_released(source: Peer) -> list[str | None]:
    bodies: list[str | None] = []
    while "released" not in bodies:
        message = source.messages.get(timeout=HANG_S)
        assert isinstance(message, transfer_pb2.TransferToEngine)
        bodies.append(message.WhichOneof("body"))
    return bodies


def _open_link(client: _Client) -> None:
    client.write(kv_pb2.PullMessage(open=kv_pb2.PullOpen(worker_epoch=EPOCH)))


def test_a_pool_that_no_group_reaches_has_no_links(source: Peer) -> None:
    with _client(source, "Link") as client:
        _open_link(client)
        assert client.expect_end()[0] is grpc.StatusCode.FAILED_PRECONDITION


def test_ranks_that_hold_what_the_source_lacks_get_no_link() -> None:
    with running_peer(device="gloo A") as source, _client(source, "Link") as client:
        shards = [kv_pb2.KvShard(end_head=2, end_layer=2)]
        client.write(kv_pb2.PullMessage(open=kv_pb2.PullOpen(worker_epoch=EPOCH, shards=shards)))
        status, details = client.expect_end()
        assert status is grpc.StatusCode.FAILED_PRECONDITION
        assert "no rank of the source holds" in details


def test_links_are_bounded_and_send_leased_blocks_only() -> None:
    with running_peer(device="gloo A") as source, ExitStack() as stack:
        clients = [stack.enter_context(_client(source, "Link")) for _ in range(MAX_LINKS + 1)]
        for client in clients[:-1]:
            _open_link(client)
            assert client.read().opened.transport == "nccl"
            assert source.expect("link_order").link_order.HasField("open")
        _open_link(clients[-1])
        assert clients[-1].expect_end()[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        handle = source.offer()
        source.grant(handle, [3, 4])
        for request in (
            kv_pb2.SendBlocks(handle=handle, num_blocks=2),  # nobody has leased them
            kv_pb2.SendBlocks(handle=b"unknown", num_blocks=1),
        ):
            client = clients.pop(0)
            client.write(kv_pb2.PullMessage(send=request))
            assert client.expect_end() == (
                grpc.StatusCode.UNAVAILABLE,
                "the puller requests blocks that are not granted to it",
            )
            assert source.expect("link_order").link_order.HasField("close")
