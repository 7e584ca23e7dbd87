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
from contextlib import asynccontextmanager, closing
from functools import partial

from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.worker_config import DIRECT_TRANSPORTS, TRANSPORTS
from pdserve.kv_transfer import data_stream
from pdserve.kv_transfer.handshake import check_grant, check_layout, ends_request, host_id, layout_message
from pdserve.kv_transfer.ipc_pulls import IpcCopyOrders, IpcReceiver, IpcSource
from pdserve.kv_transfer.links import GroupReceiver, Links, PullerLinks
from pdserve.kv_transfer.pool_memory import PeerPools, PoolMemory
from pdserve.kv_transfer.pull_stream import PullStream
from pdserve.kv_transfer.transfer_client import TransferConfig
from pdserve.kv_transfer.transports import (
    ABORTED,
    REFUSED,
    GrantedBlock,
    MemfdReceiver,
    PullError,
    Receiver,
    TcpReceiver,
    TransportImpossibleError,
)
from pdserve.proto.v1 import kv_pb2, transfer_pb2, worker_pb2

_log = logging.getLogger(__name__)


class Puller:
    """Pulls in flight."""

    def __init__(
        self,
        *,
        config: TransferConfig,
        memory: PoolMemory,
        links: Links,
        ipc_orders: IpcCopyOrders,
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
        self._shards = links.shards
        self._links = PullerLinks(links, lambda address: self._stream(address, "Link"), self._opening)
        self._ipc_orders = ipc_orders
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
            done = _failure(pull_id, ABORTED, "the engine aborted the pull")
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
        """Pull the prompt. Retries over another transport if the one chosen does not work."""
        self._check_targets(order)
        transport, reason = self._config.transport, ""
        while True:
            try:
                return await self._fetch_over(transport, order, reason)
            except TransportImpossibleError as error:
                if self._config.transport != "auto":
                    raise PullError("connect", f"KV transport {error.transport} is impossible here: {error}") from error
                reason = f"{error.transport} is impossible: {error}"
                if error.transport in DIRECT_TRANSPORTS:
                    self._links.fail(order.source, str(error))
                else:
                    transport = "tcp"

    def _check_targets(self, order: transfer_pb2.StartPull) -> None:
        num_blocks = self._memory.layout.num_blocks
        targets = set(order.block_ids)
        if len(targets) != len(order.block_ids) or any(block_id >= num_blocks for block_id in targets):
            raise PullError(REFUSED, f"the target blocks are not distinct blocks of a pool of {num_blocks}")

    async def _fetch_over(self, transport: str, order: transfer_pb2.StartPull, reason: str) -> transfer_pb2.PullDone:
        async with self._stream(order.source.address, "Pull") as stream:
            opening = self._opening(order.source.worker_epoch)
            opening.handle = order.source.handle
            opening.prefix.extend(order.prefix)
            opening.deadline_s = order.deadline_s
            opening.num_cached_blocks = order.num_cached_blocks
            opening.transport = transport
            opening.host_id = host_id()
            if why_not := self._links.why_not(order.source):
                opening.device = ""
                reason = reason or f"a copy from GPU to GPU is impossible: {why_not}"
            opened = await stream.open(opening)
            if opened.transport not in TRANSPORTS or transport not in ("auto", opened.transport):
                raise PullError(REFUSED, f"the source chose transport {opened.transport!r} for {transport!r}")
            if opened.transport in DIRECT_TRANSPORTS and not opening.device:
                raise PullError(REFUSED, f"the source chose transport {opened.transport} for a pool out of its reach")
            try:
                layout = check_layout(opened.layout, self._memory.layout)
            except ValueError as error:
                raise PullError(REFUSED, str(error)) from error
            self._transports[order.pull_id] = opened.transport
            async with self._receiver(opened, layout, order.source, stream) as receiver:
                self._log_choice(_host(order.source), opened.transport, reason or opened.reason)
                return await _receive_prompt(order, layout, stream, receiver)

    def _opening(self, worker_epoch: int) -> kv_pb2.PullOpen:
        return kv_pb2.PullOpen(
            worker_epoch=worker_epoch,
            layout=layout_message(self._memory.layout),
            device=self._config.device,
            shards=self._shards,
        )

    def _log_choice(self, host: str, transport: str, reason: str) -> None:
        if (host, transport) not in self._logged:
            self._logged.add((host, transport))
            _log.info("KV from workers at %s comes by %s: %s", host, transport, reason)

    @asynccontextmanager
    async def _stream(self, address: str, method: str) -> AsyncIterator[PullStream]:
        """Yield a stream, released if the body succeeds and broken off otherwise, without delaying the pull."""
        stream = PullStream(
            address=address,
            cluster_token=self._config.cluster_token,
            tls=self._config.tls,
            max_message_bytes=16 * self._memory.layout.num_blocks + (64 << 10),  # a grant of all blocks
            method=method,
        )
        is_complete = False
        try:
            yield stream
            is_complete = method == "Pull"
        finally:
            self._close_later(stream.close(release=is_complete))

    def _close_later(self, closing: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(closing)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    @asynccontextmanager
    async def _receiver(
        self, opened: kv_pb2.Opened, layout: KvLayout, source: worker_pb2.KvSource, stream: PullStream
    ) -> AsyncIterator[Receiver]:
        match opened.transport:
            case "memfd" | "cuda_ipc":
                try:
                    pool = self.peer_pools.get(opened.pool_path, opened.pool_inode, layout)
                except (OSError, ValueError) as error:
                    message = f"its pool cannot be mapped here: {error}"
                    raise TransportImpossibleError(opened.transport, message) from error
                if opened.transport == "memfd":
                    yield MemfdReceiver(self._memory, pool)
                else:
                    ipc_source = IpcSource(source.worker_epoch, opened.pool_inode, opened.rank_pools, opened.shards)
                    yield IpcReceiver(self._ipc_orders, ipc_source, pool)
            case "nccl":
                group = GroupReceiver(self._links, source, opened.handle, opened.shards)
                stream.on_end(group.end)
                yield group
            case "tcp":
                host = _host(source)
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


def _host(source: worker_pb2.KvSource) -> str:
    return source.address.rpartition(":")[0].strip("[]")


async def _receive_prompt(
    order: transfer_pb2.StartPull, layout: KvLayout, stream: PullStream, receiver: Receiver
) -> transfer_pb2.PullDone:
    """Receive grants and fetch their blocks, up to the final grant. ``layout`` is the source's."""
    num_granted = 0
    num_received = 0
    while True:
        grant = await _read_grant(stream, num_granted, layout, is_prefix=bool(order.prefix))
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
        first_token=grant.first_token if grant.HasField("first_token") else None,
        num_tokens=grant.num_tokens,
        bytes=num_received * layout.block_bytes,
        seconds=time.monotonic() - granted_at_s,
    )


async def _read_grant(stream: PullStream, num_granted: int, layout: KvLayout, *, is_prefix: bool) -> kv_pb2.Grant:
    message = await stream.read("grant")
    if message.WhichOneof("body") != "grant":
        raise PullError("grant", f"a grant was expected, {message.WhichOneof('body')} came")
    try:
        check_grant(message.grant, first_index=num_granted, layout=layout, is_prefix=is_prefix)
    except ValueError as error:
        raise PullError("grant", str(error)) from error
    return message.grant


def _missing_blocks(order: transfer_pb2.StartPull, grant: kv_pb2.Grant) -> list[GrantedBlock]:
    """Blocks of a grant that are not cached here, each with its target."""
    num_cached = order.num_cached_blocks
    num_known = num_cached + len(order.block_ids)
    num_granted = grant.first_index + len(grant.block_ids)
    is_whole = not grant.final or num_granted == num_known or order.prefix
    if num_granted > num_known or not is_whole:
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
