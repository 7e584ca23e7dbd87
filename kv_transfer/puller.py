"""Pulling side of KV transfer: one task per pull, from the engine's order to its `PullDone`.

Owned by the transfer process. A pull succeeds only if every block is copied and verified. Once its end is reported,
nothing writes to its target blocks.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing, suppress
from functools import partial

import grpc

from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.placement import TRANSPORTS, TlsFiles
from pdserve.kv_transfer import data_stream
from pdserve.kv_transfer.handshake import check_grant, check_layout, ends_request, host_id, layout_message
from pdserve.kv_transfer.pool_memory import PeerPools, PoolMemory
from pdserve.kv_transfer.transfer_client import TransferConfig
from pdserve.kv_transfer.transports import (
    REFUSED,
    GrantedBlock,
    MemfdReceiver,
    PullError,
    Receiver,
    TcpReceiver,
)
from pdserve.proto.rpc import channel_options, open_channel
from pdserve.proto.token_proof import ClientProof
from pdserve.proto.v1 import kv_pb2, kv_pb2_grpc, transfer_pb2

BUSY_TIMEOUT_S = 2.0
BUSY_RETRY_S = 0.02

_log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 5.0
"""Timeout of an open. A source answers immediately; otherwise it is unreachable."""
RELEASE_TIMEOUT_S = 2.0

_REFUSALS = (
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
)


class SourceBusyError(PullError):
    """Another pull of the prompt holds the lease."""


class PullStream:
    """gRPC stream of one pull, with statuses converted to `PullError`. Always `close` it.

    A connection per pull costs about a millisecond, hidden by the wait for the prompt's last chunk, and leaves no
    stale state behind when a source restarts.
    """

    def __init__(
        self, *, address: str, cluster_token: str, tls: TlsFiles | None = None, max_message_bytes: int
    ) -> None:
        try:
            self._channel = open_channel(address, channel_options(max_message_bytes), tls)
        except ValueError as error:
            raise PullError("connect", str(error)) from error
        self._proof = ClientProof(cluster_token, address)
        self._call = kv_pb2_grpc.KvTransferStub(self._channel).Pull(None, metadata=self._proof.metadata)

    async def open(self, opening: kv_pb2.PullOpen) -> kv_pb2.Opened:
        """Request a prompt, and add the proof to ``opening``.

        Raises:
            PullError: the source is unreachable or refuses.
        """
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                opening.proof = await self._proof.answer(self._call)
                with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):  # the read below raises the reason
                    await self._call.write(kv_pb2.PullMessage(open=opening))
                message = await self.read("connect")
        except grpc.aio.AioRpcError as error:
            raise _pull_error(error, "connect") from error
        except PermissionError as error:
            raise PullError(REFUSED, f"the source at {error}") from error
        except TimeoutError:
            raise PullError("connect", f"the source did not answer within {OPEN_TIMEOUT_S} s") from None
        if message.WhichOneof("body") != "opened":
            raise PullError("connect", f"the source answered with {message.WhichOneof('body')}")
        return message.opened

    async def read(self, stage: str) -> kv_pb2.SourceMessage:
        """Read the source's next message.

        Args:
            stage: stage of the pull, for the error.

        Raises:
            PullError: the stream ended or broke.
        """
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise _pull_error(error, stage) from error
        if not isinstance(message, kv_pb2.SourceMessage):  # the end of the stream
            raise PullError(stage, "the source ended the stream too early")
        return message

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once the stream has ended or broken."""
        self._call.add_done_callback(lambda _: callback())

    async def failure(self, stage: str, message: str) -> PullError:
        """Failure of the data stream: the status of this one if the source has ended it, else ``message``."""
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                while True:
                    await self.read(stage)
        except PullError as reason:
            return reason
        except TimeoutError:
            return PullError(stage, message)

    async def close(self, *, release: bool) -> None:
        """End the stream. With ``release``, first inform the source that it may free the prompt."""
        if release:
            # Best effort: the blocks have arrived, and a source that misses the release frees the prompt after its park
            # time.
            with suppress(TimeoutError, asyncio.InvalidStateError, grpc.aio.AioRpcError):
                async with asyncio.timeout(RELEASE_TIMEOUT_S):
                    await self._call.write(kv_pb2.PullMessage(release=kv_pb2.Release()))
                    await self._call.done_writing()
                    await self._call.code()
        self._call.cancel()
        await self._channel.close(None)


def _pull_error(error: grpc.aio.AioRpcError, stage: str) -> PullError:
    message = f"{error.code().name}: {error.details()}"
    if error.code() is grpc.StatusCode.ALREADY_EXISTS:
        return SourceBusyError(REFUSED, message)
    return PullError(REFUSED if error.code() in _REFUSALS else stage, message)


class _PoolUnreachableError(Exception):
    """The source offered its mapped pool, but this process cannot open it."""


class Puller:
    """Pulls in flight."""

    def __init__(
        self,
        *,
        config: TransferConfig,
        memory: PoolMemory,
        tls: ssl.SSLContext | None,
        send: Callable[[transfer_pb2.TransferToEngine], None],
    ) -> None:
        """
        Args:
            tls: encrypts data streams; that of the gRPC streams is in ``config``.
        """
        self.peer_pools = PeerPools()
        self._config = config
        self._tls = tls
        self._memory = memory
        self._send = send
        self._running: dict[int, asyncio.Task[transfer_pb2.PullDone]] = {}
        self._transports: dict[int, str] = {}
        """Transport of each running pull that has been opened."""
        self._closing: set[asyncio.Task[None]] = set()
        self._logged: set[tuple[str, str]] = set()
        """Hosts and transports in the log."""

    def start(self, order: transfer_pb2.StartPull) -> None:
        """Start a pull. Exactly one `PullDone` follows."""
        assert order.pull_id not in self._running, order.pull_id
        task = asyncio.ensure_future(self._pull(order))
        self._running[order.pull_id] = task
        # In a callback, because a task cancelled before its first step never runs any line of its body.
        task.add_done_callback(partial(self._report, order.pull_id))

    def abort(self, pull_id: int) -> None:
        """Stop a pull. One that has ended is ignored."""
        if pull_id in self._running:
            self._running[pull_id].cancel()

    def _report(self, pull_id: int, task: asyncio.Task[transfer_pb2.PullDone]) -> None:
        del self._running[pull_id]
        if task.cancelled():
            done = _failure(pull_id, "aborted", "the engine aborted the pull")
        elif (error := task.exception()) is not None:
            _log.error("a pull ended with an unexpected error", exc_info=error)
            done = _failure(pull_id, "copy", f"unexpected {type(error).__name__}")
        else:
            done = task.result()
        done.transport = self._transports.pop(pull_id, "")
        self._send(transfer_pb2.TransferToEngine(pull_done=done))

    async def _pull(self, order: transfer_pb2.StartPull) -> transfer_pb2.PullDone:
        try:
            async with asyncio.timeout(order.deadline_s):
                return await self._fetch(order)
        except TimeoutError:
            return _failure(order.pull_id, "deadline", f"the pull took more than {order.deadline_s:.3f} s")
        except PullError as error:
            return _failure(order.pull_id, error.stage, str(error))

    async def _fetch(self, order: transfer_pb2.StartPull) -> transfer_pb2.PullDone:
        """Pull the prompt. Retries while it is leased, because a source may need a moment to notice that the previous
        stream is gone, and over TCP if its pool cannot be mapped."""
        self._check_targets(order)
        transport, reason = self._config.transport, "as configured"
        busy_until_s = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            try:
                return await self._fetch_over(transport, order, reason)
            except SourceBusyError:
                if time.monotonic() > busy_until_s:
                    raise
                await asyncio.sleep(BUSY_RETRY_S)
            except _PoolUnreachableError as error:
                if transport != "auto":
                    raise PullError("connect", f"KV transport memfd is impossible here: {error}") from error
                transport, reason = "tcp", f"its pool cannot be mapped here: {error}"

    def _check_targets(self, order: transfer_pb2.StartPull) -> None:
        num_blocks = self._memory.layout.num_blocks
        targets = set(order.block_ids)
        if len(targets) != len(order.block_ids) or any(block_id >= num_blocks for block_id in targets):
            raise PullError(REFUSED, f"the target blocks are not distinct blocks of a pool of {num_blocks}")

    async def _fetch_over(self, transport: str, order: transfer_pb2.StartPull, reason: str) -> transfer_pb2.PullDone:
        async with self._stream(order.source.address) as stream:
            opened = await stream.open(
                kv_pb2.PullOpen(
                    worker_epoch=order.source.worker_epoch,
                    handle=order.source.handle,
                    layout=layout_message(self._memory.layout),
                    num_cached_blocks=order.num_cached_blocks,
                    transport=transport,
                    host_id=host_id(),
                )
            )
            if opened.transport not in TRANSPORTS or transport not in ("auto", opened.transport):
                raise PullError(REFUSED, f"the source chose transport {opened.transport!r} for {transport!r}")
            try:
                layout = check_layout(opened.layout, self._memory.layout)
            except ValueError as error:
                raise PullError(REFUSED, str(error)) from error
            self._transports[order.pull_id] = opened.transport
            if transport == "auto":
                reason = "it is on this host" if opened.transport == "memfd" else "it is on another host"
            async with self._receiver(opened, layout, _host(order), stream) as receiver:
                self._log_choice(_host(order), opened.transport, reason)
                return await _receive_prompt(order, layout, stream, receiver)

    def _log_choice(self, host: str, transport: str, reason: str) -> None:
        if (host, transport) not in self._logged:
            self._logged.add((host, transport))
            _log.info("KV from workers at %s comes by %s: %s", host, transport, reason)

    @asynccontextmanager
    async def _stream(self, address: str) -> AsyncIterator[PullStream]:
        """Yield a stream, released if the body succeeds and broken off otherwise, without delaying the pull."""
        layout = self._memory.layout
        stream = PullStream(
            address=address,
            cluster_token=self._config.cluster_token,
            tls=self._config.tls,
            max_message_bytes=16 * layout.num_blocks + (64 << 10),  # a grant of all blocks
        )
        is_complete = False
        try:
            yield stream
            is_complete = True
        finally:
            self._close_later(stream.close(release=is_complete))

    def _close_later(self, closing: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(closing)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    @asynccontextmanager
    async def _receiver(
        self, opened: kv_pb2.Opened, layout: KvLayout, host: str, stream: PullStream
    ) -> AsyncIterator[Receiver]:
        match opened.transport:
            case "memfd":
                try:
                    pool = self.peer_pools.get(opened.pool_path, opened.pool_inode, layout)
                except (OSError, ValueError) as error:
                    raise _PoolUnreachableError(str(error)) from error
                yield MemfdReceiver(self._memory, pool)
            case "tcp":
                try:
                    data = await data_stream.connect(
                        host, opened.data_port, ticket=opened.ticket, token=self._config.cluster_token, tls=self._tls
                    )
                except OSError as error:
                    message = f"no data stream to {host}:{opened.data_port}: {error}"
                    raise await stream.failure("connect", message) from error
                # A source that is stopped or cut off sends nothing here: only the other stream notices.
                stream.on_end(data.close)
                with closing(data):
                    yield TcpReceiver(self._memory, data)


def _host(order: transfer_pb2.StartPull) -> str:
    return order.source.address.rpartition(":")[0].strip("[]")


async def _receive_prompt(
    order: transfer_pb2.StartPull, layout: KvLayout, stream: PullStream, receiver: Receiver
) -> transfer_pb2.PullDone:
    """Receive grants and fetch their blocks, up to the final grant. ``layout`` is the source's."""
    num_granted = 0
    num_received = 0
    while True:
        grant = await _read_grant(stream, num_granted, layout)
        granted_at_s = time.monotonic()
        if ends_request(grant):
            break
        blocks = _missing_blocks(order, grant)
        try:
            await receiver.receive(blocks)
        except OSError as error:
            raise await stream.failure("copy", f"the data stream broke: {error}") from error
        num_received += len(blocks)
        num_granted += len(grant.block_ids)
        if grant.final:
            end_s = granted_at_s + order.min_duration_s
            while (left_s := end_s - time.monotonic()) > 0:  # noqa: ASYNC110  # uvloop may wake up a millisecond early
                await asyncio.sleep(left_s)
            break
    return transfer_pb2.PullDone(
        pull_id=order.pull_id,
        first_token=grant.first_token,
        num_tokens=grant.num_tokens,
        bytes=num_received * layout.block_bytes,
        seconds=time.monotonic() - granted_at_s,
    )


async def _read_grant(stream: PullStream, num_granted: int, layout: KvLayout) -> kv_pb2.Grant:
    message = await stream.read("grant")
    if message.WhichOneof("body") != "grant":
        raise PullError("grant", f"a grant was expected, {message.WhichOneof('body')} came")
    try:
        check_grant(message.grant, first_index=num_granted, layout=layout)
    except ValueError as error:
        raise PullError("grant", str(error)) from error
    return message.grant


def _missing_blocks(order: transfer_pb2.StartPull, grant: kv_pb2.Grant) -> list[GrantedBlock]:
    """Blocks of a grant that are not cached here, each with its target."""
    num_cached = order.num_cached_blocks
    num_known = num_cached + len(order.block_ids)
    num_granted = grant.first_index + len(grant.block_ids)
    if num_granted > num_known or (grant.final and num_granted != num_known):
        raise PullError("grant", f"{num_granted} blocks are granted; {num_known} are cached or reserved for them")
    return [
        GrantedBlock(index, source_id, generation, order.block_ids[index - num_cached])
        for index, (source_id, generation) in enumerate(
            zip(grant.block_ids, grant.generations, strict=True), grant.first_index
        )
        if index >= num_cached
    ]


def _failure(pull_id: int, stage: str, message: str) -> transfer_pb2.PullDone:
    return transfer_pb2.PullDone(pull_id=pull_id, failure_stage=stage, message=message)
