from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pdserve.contracts.worker_config import TlsFiles
from pdserve.kv_transfer import data_stream
from pdserve.kv_transfer.data_stream import DataListener, DataStream, ExpectedStream, connect, tls_context
from tests.kv_transfer.streams import MAGIC, receive_exactly, stream_pair, token_proof

SCRIPT = Path(__file__).parents[2] / "scripts/make-certificates"
TOKEN = "secret of the cluster"


def certificates(folder: Path) -> TlsFiles:
    subprocess.run([SCRIPT, folder], check=True, capture_output=True)
    return TlsFiles(ca=f"{folder}/ca.pem", certificate=f"{folder}/host.pem", key=f"{folder}/host.key")


@pytest.fixture(name="tls", scope="module")
def fixture_tls(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return certificates(tmp_path_factory.mktemp("ours") / "tls")


@asynccontextmanager
async def listening(tls: TlsFiles | None = None) -> AsyncIterator[tuple[DataListener, ExpectedStream]]:
    """A listener that expects one stream."""
    listener = DataListener(host="127.0.0.1", token=TOKEN, tls=tls_context(tls, is_server=True) if tls else None)
    accepting = asyncio.ensure_future(listener.accept_forever())
    with listener.expect() as expected:
        yield listener, expected
    accepting.cancel()
    await asyncio.wait([accepting])


async def puller(
    listener: DataListener, ticket: bytes, *, token: str = TOKEN, tls: TlsFiles | None = None
) -> DataStream:
    context = tls_context(tls, is_server=False) if tls else None
    return await connect("127.0.0.1", listener.port, ticket=ticket, token=token, tls=context)


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_bytes_arrive_in_their_place(tls: TlsFiles, is_encrypted: bool) -> None:
    sent = os.urandom(5 << 20)  # more than the buffers of the sockets

    async def run() -> bytearray:
        received = bytearray(len(sent) + 2)
        files = tls if is_encrypted else None
        async with listening(files) as (listener, expected):
            near = await puller(listener, expected.ticket, tls=files)
            far = await expected.get()
            sending = asyncio.ensure_future(far.send([memoryview(sent)]))
            await near.receive_into([memoryview(received)[1:5], memoryview(received)[5:-1]])
            await sending
            near.close()
        return received

    assert asyncio.run(run()) == b"\0" + sent + b"\0"


def test_a_cancelled_receive_writes_nothing_later() -> None:
    async def run() -> bytearray:
        buffer = bytearray(8)
        with stream_pair() as (near, far):
            receiving = asyncio.ensure_future(near.receive_into([memoryview(buffer)]))
            await far.send([memoryview(b"1234")])
            await asyncio.sleep(0.05)
            assert buffer[:4] == b"1234"
            receiving.cancel()
            await asyncio.wait([receiving])
            await far.send([memoryview(b"5678")])
            await asyncio.sleep(0.05)
        return buffer

    assert asyncio.run(run()) == b"1234\0\0\0\0"


def test_closing_ends_a_wait() -> None:
    async def run() -> None:
        with stream_pair() as (near, far):
            receiving = asyncio.ensure_future(near.receive(1))
            sending = asyncio.ensure_future(far.send([memoryview(bytes(64 << 20))]))
            await asyncio.sleep(0.05)
            assert not receiving.done() or receiving.result()
            far.close()
            with pytest.raises(ConnectionAbortedError):
                await sending
            near.close()
            near.close()

    asyncio.run(run())


def test_the_end_of_the_peer_is_an_error() -> None:
    async def run() -> None:
        with stream_pair() as (near, far):
            far.close()
            with pytest.raises(ConnectionResetError):
                await near.receive(1)

    asyncio.run(run())


def test_a_puller_without_the_token_gets_no_stream() -> None:
    async def run() -> None:
        async with listening() as (listener, expected):
            with pytest.raises(ConnectionRefusedError, match="cluster token"):
                await puller(listener, expected.ticket, token="guess")
            assert expected.is_awaited
            # The ticket is still good for the one who knows the token, and for one time.
            near = await puller(listener, expected.ticket)
            far = await expected.get()
            with pytest.raises(ConnectionResetError):
                await puller(listener, expected.ticket)
            await far.send([memoryview(b"x")])
            assert await near.receive(1) == b"x"
            near.close()

    asyncio.run(run())


def test_a_source_refuses_a_wrong_proof() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        async with listening() as (listener, expected):
            with socket.create_connection(("127.0.0.1", listener.port)) as sock:
                nonce = os.urandom(32)
                sock.sendall(MAGIC + expected.ticket + nonce)
                answer = await loop.run_in_executor(None, receive_exactly, sock, 64)
                assert answer[32:] == token_proof(TOKEN, b"source", expected.ticket, nonce, answer[:32])
                sock.sendall(answer[32:])  # the source's own proof, sent back
                assert await loop.run_in_executor(None, sock.recv, 1) == b""
            assert expected.is_awaited

    asyncio.run(run())


@pytest.mark.parametrize("hello", [MAGIC + bytes(48), b"GET / HTTP/1.1\r\nHost: pdserve\r\n\r\n" + bytes(64)])
def test_an_unknown_ticket_or_protocol_is_closed(hello: bytes) -> None:
    async def run() -> bytes:
        loop = asyncio.get_running_loop()
        async with listening() as (listener, _):
            with socket.create_connection(("127.0.0.1", listener.port)) as sock:
                sock.sendall(hello[:64])
                return await loop.run_in_executor(None, sock.recv, 1)

    assert asyncio.run(run()) == b""


def test_silent_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_stream, "MAX_HANDSHAKES", 0)
    monkeypatch.setattr(data_stream, "HANDSHAKE_TIMEOUT_S", 0.3)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        async with listening() as (listener, expected):
            address = ("127.0.0.1", listener.port)
            with socket.create_connection(address) as silent, socket.create_connection(address) as surplus:
                assert await loop.run_in_executor(None, surplus.recv, 1) == b""
                assert await loop.run_in_executor(None, silent.recv, 1) == b""  # after the timeout
            with listener.expect() as other:
                for near in await asyncio.gather(*(puller(listener, each.ticket) for each in (expected, other))):
                    near.close()

    asyncio.run(run())


def test_strangers_are_refused_over_tls(tls: TlsFiles, tmp_path: Path) -> None:
    theirs = certificates(tmp_path / "tls")
    # Trusts our authority, but shows a certificate of another.
    forged = TlsFiles(ca=tls.ca, certificate=theirs.certificate, key=theirs.key)

    async def run() -> None:
        async with listening(tls) as (listener, expected):
            for files in (theirs, forged):
                with pytest.raises(OSError):  # noqa: PT011  # of many kinds
                    await puller(listener, expected.ticket, tls=files)
            assert expected.is_awaited

    asyncio.run(run())


def test_a_file_that_cannot_be_used_is_named(tls: TlsFiles) -> None:
    gone = TlsFiles(ca=tls.ca, certificate="/absent/host.pem", key=tls.key)
    with pytest.raises(ValueError, match=r"security.tls: cannot use .*/absent/host.pem"):
        tls_context(gone, is_server=True)


def test_a_listener_takes_a_port_of_its_range_until_every_one_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"any port from {port} to {port} of 127.0.0.1; widen ports"):
            DataListener(host="127.0.0.1", token="", tls=None, ports=(port, port))

    async def listen() -> int:
        listener = DataListener(host="127.0.0.1", token="", tls=None, ports=(port, port))
        accepting = asyncio.ensure_future(listener.accept_forever())
        await asyncio.sleep(0)
        accepting.cancel()
        await asyncio.wait({accepting})
        return listener.port

    assert asyncio.run(listen()) == port
