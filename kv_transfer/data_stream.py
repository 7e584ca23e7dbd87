"""Data streams: TCP connections that carry KV blocks between two transfer processes, beside the pull's gRPC stream.

A source announces a ticket in the gRPC stream, and the puller connects with it. Each side then proves that it knows the
cluster token, without sending it: HMACs of the ticket and a nonce of either side. With TLS, both sides show
their certificates first. Bytes are received straight into their place, and only while `DataStream.receive_into` runs: a
cancelled pull leaves nothing behind that could write.

    puller -> source   MAGIC, ticket, nonce
    source -> puller   nonce, proof of the source
    puller -> source   proof of the puller

Used by `pdserve.kv_transfer.source` and `pdserve.kv_transfer.puller`. Knows neither blocks nor offers.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
import ssl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from pdserve.contracts.worker_config import TlsFiles
from pdserve.proto.rpc import TLS_NAME
from pdserve.proto.token_proof import NONCE_BYTES, PROOF_BYTES, token_proof

HANDSHAKE_TIMEOUT_S = 5.0
MAX_HANDSHAKES = 256
"""Connections that have not proven anything yet, beyond one for each expected stream. Further ones are closed."""
TICKET_BYTES = 16
MAGIC = b"pdserve-kv-data2"
"""First bytes of a stream; the last one is the version."""

_ACCEPT_RETRY_S = 0.1
_log = logging.getLogger(__name__)


class DataStream:
    """Non-blocking socket, plain or TLS, that one task at a time reads or writes. Every failure is an OSError."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._waiter: asyncio.Future[None] | None = None

    def close(self) -> None:
        """Close the socket. A task that waits for it gets a ConnectionAbortedError."""
        if self._sock.fileno() < 0:
            return
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(ConnectionAbortedError("the data stream was closed"))
        self._unwatch()
        self._sock.close()

    async def connect(self, address: tuple[str, int]) -> None:
        await asyncio.get_running_loop().sock_connect(self._sock, address)

    async def start_tls(self, context: ssl.SSLContext, *, is_server: bool) -> None:
        """Encrypt the stream; both sides show their certificates."""
        encrypted = context.wrap_socket(
            self._sock,
            server_side=is_server,
            server_hostname=None if is_server else TLS_NAME,
            do_handshake_on_connect=False,
        )
        self._sock = encrypted
        await self._run(_handshake(encrypted))

    async def receive_into(self, buffers: Iterable[memoryview[int]]) -> None:
        """Fill buffers of bytes. Each is taken from the iterable once the one before it is full."""
        await self._run(_receive(self._sock, buffers))

    async def receive(self, num_bytes: int) -> bytes:
        received = bytearray(num_bytes)
        await self.receive_into([memoryview(received)])
        return bytes(received)

    async def send(self, buffers: Iterable[memoryview[int]]) -> None:
        """Send buffers of bytes, each taken from the iterable once the one before it is sent."""
        await self._run(_send(self._sock, buffers))

    async def _run(self, steps: Iterator[bool]) -> None:
        """Run steps, each once the socket is ready for it: to write if the one before it yields True, else to read. The
        event loop runs them itself, which takes less time than to wake this task for each."""
        loop = asyncio.get_running_loop()
        if (is_write := next(steps, None)) is None:
            return
        waiter = self._waiter = loop.create_future()

        def watch() -> None:
            (loop.add_writer if is_write else loop.add_reader)(self._sock, step)

        def step() -> None:
            nonlocal is_write
            if waiter.done():
                return
            try:
                waits_to_write = next(steps, None)
            except OSError as error:
                waiter.set_exception(error)
                return
            if waits_to_write is None:
                waiter.set_result(None)
            elif waits_to_write is not is_write:
                self._unwatch()
                is_write = waits_to_write
                watch()

        watch()
        try:
            await waiter
        finally:
            if self._sock.fileno() >= 0:
                self._unwatch()

    def _unwatch(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._sock)
        loop.remove_writer(self._sock)


_NOT_READY = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


def _waits_to_write(error: Exception, *, is_write: bool) -> bool:
    """Whether an attempt to read or write that was not ready waits until the socket can be written to."""
    return isinstance(error, ssl.SSLWantWriteError) or (is_write and not isinstance(error, ssl.SSLWantReadError))


def _handshake(sock: ssl.SSLSocket) -> Iterator[bool]:
    while True:
        try:
            sock.do_handshake()
            return
        except _NOT_READY as error:
            yield _waits_to_write(error, is_write=False)


def _receive(sock: socket.socket, buffers: Iterable[memoryview[int]]) -> Iterator[bool]:
    may_have_more = isinstance(sock, ssl.SSLSocket)  # decrypted bytes
    for buffer in buffers:
        left = buffer
        while left:
            try:
                num_received = sock.recv_into(left)
            except _NOT_READY as error:
                yield _waits_to_write(error, is_write=False)
                continue
            if num_received == 0:
                raise ConnectionResetError("the peer closed the data stream")
            left = left[num_received:]
            if left and not may_have_more:
                yield False


def _send(sock: socket.socket, buffers: Iterable[memoryview[int]]) -> Iterator[bool]:
    for buffer in buffers:
        left = buffer
        while left:
            try:
                left = left[sock.send(left) :]
            except _NOT_READY as error:
                yield _waits_to_write(error, is_write=True)


def tls_context(tls: TlsFiles, *, is_server: bool) -> ssl.SSLContext:
    """Context of one side; it refuses a peer without a certificate of the authority.

    Raises:
        ValueError: a file of ``tls`` cannot be read or used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(tls.ca)
        context.load_cert_chain(tls.certificate, tls.key)
    except OSError as error:
        raise ValueError(f"security.tls: cannot use {tls.ca}, {tls.certificate} and {tls.key}: {error}") from error
    return context


async def connect(host: str, port: int, *, ticket: bytes, token: str, tls: ssl.SSLContext | None) -> DataStream:
    """Open the data stream that a source announced.

    Raises:
        OSError: the source is unreachable, or did not prove itself within `HANDSHAKE_TIMEOUT_S`.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    stream = DataStream(socket.socket(family, socket.SOCK_STREAM))
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            await stream.connect((host, port))
            if tls is not None:
                await stream.start_tls(tls, is_server=False)
            await _prove_to_source(stream, ticket, token)
    except BaseException:
        stream.close()
        raise
    return stream


async def _prove_to_source(stream: DataStream, ticket: bytes, token: str) -> None:
    nonce = os.urandom(NONCE_BYTES)
    await stream.send([memoryview(MAGIC + ticket + nonce)])
    answer = await stream.receive(NONCE_BYTES + PROOF_BYTES)
    nonces = nonce, answer[:NONCE_BYTES]
    if not hmac.compare_digest(answer[NONCE_BYTES:], token_proof(token, b"source", ticket, nonces)):
        raise ConnectionRefusedError("the source does not know the cluster token")
    await stream.send([memoryview(token_proof(token, b"puller", ticket, nonces))])


class ExpectedStream:
    """Data stream of one pull, which comes with ``ticket``."""

    def __init__(self) -> None:
        self.ticket = os.urandom(TICKET_BYTES)
        self._coming: asyncio.Future[DataStream] = asyncio.get_running_loop().create_future()

    @property
    def is_awaited(self) -> bool:
        """Whether the stream has neither come nor been given up."""
        return not self._coming.done()

    async def get(self) -> DataStream:
        """Wait for the stream.

        Raises:
            OSError: it does not come within `HANDSHAKE_TIMEOUT_S`, or the pull ends first.
        """
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            return await asyncio.shield(self._coming)

    def arrived(self, stream: DataStream) -> None:
        self._coming.set_result(stream)

    def end(self) -> None:
        """Close the stream if it has come, and let none come any more."""
        if self.is_awaited:
            self._coming.set_exception(ConnectionAbortedError("the pull has ended"))
        if self._coming.exception() is None:
            self._coming.result().close()


def _listen(host: str, ports: tuple[int, int]) -> socket.socket:
    for port in range(ports[0], ports[1] + 1):
        with suppress(OSError):  # taken
            return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    raise ValueError(f"cannot listen on any port from {ports[0]} to {ports[1]} of {host}; widen ports")


class DataListener:
    """Accepts data streams, and gives each to the pull that announced its ticket."""

    def __init__(self, *, host: str, token: str, tls: ssl.SSLContext | None, ports: tuple[int, int] = (0, 0)) -> None:
        """Listen on a free port of ``host``; `accept_forever` accepts.

        Args:
            ports: first and last port to try; (0, 0) takes any.

        Raises:
            ValueError: every port is taken.
        """
        self._sock = _listen(host, ports)
        self._sock.setblocking(False)
        self.port: int = self._sock.getsockname()[1]
        self._token = token
        self._tls = tls
        self._expected: dict[bytes, ExpectedStream] = {}
        self._handshakes: set[asyncio.Task[None]] = set()

    @contextmanager
    def expect(self) -> Iterator[ExpectedStream]:
        """Expect a stream, which ends with the body."""
        expected = ExpectedStream()
        self._expected[expected.ticket] = expected
        try:
            yield expected
        finally:
            self._expected.pop(expected.ticket, None)
            expected.end()

    async def accept_forever(self) -> None:
        """Accept until cancelled, then close the port."""
        with self._sock:
            while True:
                await self._accept()

    async def _accept(self) -> None:
        try:
            sock, _ = await asyncio.get_running_loop().sock_accept(self._sock)
        except OSError as error:  # no descriptor left, or the connection is gone again
            _log.warning("no data stream was accepted: %s", error)
            await asyncio.sleep(_ACCEPT_RETRY_S)
            return
        if len(self._handshakes) >= MAX_HANDSHAKES + len(self._expected):
            sock.close()
            return
        task = asyncio.ensure_future(self._admit(DataStream(sock)))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _admit(self, stream: DataStream) -> None:
        """Hand a stream over, or close it."""
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                if self._tls is not None:
                    await stream.start_tls(self._tls, is_server=True)
                expected = await self._check_puller(stream)
        except OSError as error:
            _log.warning("a data stream was refused: %s", error)
            stream.close()
            return
        except BaseException:
            stream.close()
            raise
        if expected.is_awaited:
            expected.arrived(stream)
        else:
            stream.close()

    async def _check_puller(self, stream: DataStream) -> ExpectedStream:
        hello = await stream.receive(len(MAGIC) + TICKET_BYTES + NONCE_BYTES)
        magic, ticket = hello[: len(MAGIC)], hello[len(MAGIC) : -NONCE_BYTES]
        expected = self._expected.get(ticket)
        if magic != MAGIC or expected is None:
            raise ConnectionRefusedError("its ticket is unknown")
        nonce = os.urandom(NONCE_BYTES)
        nonces = hello[-NONCE_BYTES:], nonce
        await stream.send([memoryview(nonce + token_proof(self._token, b"source", ticket, nonces))])
        if not hmac.compare_digest(
            await stream.receive(PROOF_BYTES), token_proof(self._token, b"puller", ticket, nonces)
        ):
            raise ConnectionRefusedError("the puller does not know the cluster token")
        self._expected.pop(ticket, None)
        return expected
