"""Serving side of pulls: prompts on offer, the grants of their blocks, and the lease on each.

Owned by the transfer process. The engine offers, grants and withdraws; pullers connect over gRPC. A lease is a
pull's stream: it ends with the stream, or when another puller comes, which the router has sent because the first one is
lost; only the latest lease may release the prompt.

A pull of a prefix names hashes of cached blocks instead of an offer. The engine lends it those that it has, in one
grant, until the stream ends or the puller's deadline has passed.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import grpc
from google.protobuf.message import DecodeError

from pdserve.contracts.request import HANDLE_BYTES
from pdserve.contracts.transports import choose_transport
from pdserve.contracts.worker_config import DIRECT_TRANSPORTS
from pdserve.kv_transfer.data_stream import DataListener, ExpectedStream
from pdserve.kv_transfer.handshake import (
    check_grant,
    check_layout,
    ends_request,
    host_id,
    layout_message,
)
from pdserve.kv_transfer.links import MAX_LINKS, EngineLink, LinkMessage, Links, carry
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.kv_transfer.transfer_client import TransferConfig
from pdserve.kv_transfer.transports import batches, send_batch
from pdserve.proto.token_proof import ServerProof, UnprovenCalls, UnprovenError
from pdserve.proto.v1 import kv_pb2, kv_pb2_grpc, transfer_pb2

OPEN_TIMEOUT_S = 5.0
"""Timeout for the first message of a stream, after which the stream is closed."""
MAX_UNPROVEN_PULLS = 1024
"""Streams without a first message. Further ones end the oldest, so that members' pulls find room."""
MAX_LOAN_S = 60.0
"""Longest loan of cached blocks, whatever its puller's deadline."""

_Context = grpc.aio.ServicerContext[kv_pb2.PullMessage, kv_pb2.SourceMessage]
_log = logging.getLogger(__name__)


class _RefusalError(Exception):
    def __init__(self, status: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True, eq=False)
class _Offer:
    """A prompt that may be pulled."""

    handle: bytes
    grants: list[kv_pb2.Grant] = field(default_factory=list)
    num_blocks: int = 0
    """Blocks granted so far."""
    is_withdrawn: bool = False
    is_prefix: bool = False
    """Cached blocks, for one pull."""
    lease: _Lease | None = None
    """The latest lease, unless it has ended."""

    @property
    def is_complete(self) -> bool:
        return bool(self.grants) and self.grants[-1].final

    def check(self, lease: _Lease) -> None:
        """Raise `_RefusalError` if the prompt can no longer be pulled by ``lease``."""
        if self.is_withdrawn:
            raise _RefusalError(grpc.StatusCode.ABORTED, "the source needs the prompt's blocks and withdrew it")
        if self.lease is not lease:
            raise _RefusalError(grpc.StatusCode.ABORTED, "another worker pulls the prompt by now")


@dataclass(slots=True, eq=False)
class _Lease:
    """One pull of an offer."""

    data: ExpectedStream
    release: asyncio.Future[bool]
    """Done once the puller has released the prompt or left."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by a new grant, the withdrawal, a release or another puller. Cleared by the pull that waits for it."""

    def end(self) -> None:
        """Let the pull see that it is over."""
        self.changed.set()
        self.data.end()


class Source(kv_pb2_grpc.KvTransferServicer):
    """Table of offers, with the gRPC service for them."""

    def __init__(
        self,
        *,
        config: TransferConfig,
        memory: PoolMemory,
        listener: DataListener,
        links: Links,
        send: Callable[[transfer_pb2.TransferToEngine], None],
    ) -> None:
        self.address = ""
        """Where the service listens; set before it does."""
        self.rank_pools: Sequence[kv_pb2.RankPool] = ()
        """Pools on devices, for other processes; set before the first offer."""
        self._config = config
        self._memory = memory
        self._listener = listener
        self._links = links
        self._num_links = 0
        self._stage_ids = count()
        self._stages: dict[int, asyncio.Future[None]] = {}
        """Grants that the engine is copying to the staging file."""
        self._send = send
        self._unproven = UnprovenCalls(MAX_UNPROVEN_PULLS, OPEN_TIMEOUT_S)
        self._offers: dict[bytes, _Offer] = {}

    def offer(self, handle: bytes) -> None:
        """Offer a prompt for pulling. Its grants follow."""
        self._offers.setdefault(handle, _Offer(handle))

    def grant(self, handle: bytes, grant: kv_pb2.Grant) -> None:
        """Add blocks to an offer. An unknown handle is ignored: the puller has just released it."""
        offer = self._offers.get(handle)
        if offer is None:
            return
        try:
            if offer.is_complete:
                raise ValueError("a grant came after the final one")
            first_index, layout = offer.num_blocks, self._memory.layout
            check_grant(grant, first_index=first_index, layout=layout, is_prefix=offer.is_prefix)
        except ValueError:
            _log.exception("the engine granted blocks that it does not have; the prompt is withdrawn")
            self.withdraw(handle)
            return
        offer.num_blocks += len(grant.block_ids)
        offer.grants.append(grant)
        if offer.lease is not None:
            offer.lease.changed.set()

    def withdraw(self, handle: bytes) -> None:
        """Remove an offer and abort the pull of it, if there is one."""
        offer = self._offers.pop(handle, None)
        if offer is not None:
            offer.is_withdrawn = True
            if offer.lease is not None:
                offer.lease.end()

    async def Pull(self, request_iterator: object, context: _Context) -> None:  # type: ignore[override]  # noqa: N802
        """Serve one pull: `Opened`, then grants as they come, until the puller releases the prompt."""
        # A coroutine that writes, not a generator that yields: its `finally` runs at once when the stream breaks.
        try:
            proof = ServerProof(self._config.cluster_token, self.address, dict(context.invocation_metadata() or ()))
            opening = await self._read_open(context, proof)
            offer, opened = self._admit(opening)
            await self._lease(offer, opening, opened, context)
        except _RefusalError as refusal:
            await context.abort(refusal.status, str(refusal))

    async def _lease(self, offer: _Offer, opening: kv_pb2.PullOpen, opened: kv_pb2.Opened, context: _Context) -> None:
        with self._listener.expect() as data:
            if offer.lease is not None:
                offer.lease.end()
            lease = offer.lease = _Lease(data, asyncio.ensure_future(_is_release(context)))
            # A puller that leaves early must not be waited for; one that releases the prompt has everything.
            lease.release.add_done_callback(lambda _: lease.end())
            self._send(transfer_pb2.TransferToEngine(lease_opened=transfer_pb2.LeaseOpened(handle=offer.handle)))
            is_released = False
            try:
                async with asyncio.timeout(min(opening.deadline_s, MAX_LOAN_S) if offer.is_prefix else None):
                    is_released = await self._serve(offer, opening, opened, context, lease)
            except TimeoutError:
                raise _RefusalError(grpc.StatusCode.ABORTED, "the puller's deadline has passed") from None
            finally:
                lease.release.cancel()
                self._end_lease(offer, lease, is_released)

    async def _read_open(self, context: _Context, proof: ServerProof) -> kv_pb2.PullOpen:
        try:
            async with self._unproven.wait():
                await context.send_initial_metadata(proof.metadata)
                message: object = await context.read()
        except UnprovenError as error:
            raise _RefusalError(grpc.StatusCode.DEADLINE_EXCEEDED, str(error)) from None
        except DecodeError:
            raise _RefusalError(grpc.StatusCode.INVALID_ARGUMENT, "the first message is not a PullMessage") from None
        # At the end of the stream, read() returns a marker.
        if not isinstance(message, kv_pb2.PullMessage) or not message.HasField("open"):
            raise _RefusalError(grpc.StatusCode.INVALID_ARGUMENT, "a pull starts with PullOpen")
        if not proof.is_proven(message.open.proof):
            raise _RefusalError(grpc.StatusCode.UNAUTHENTICATED, "the puller does not know the cluster token")
        if message.open.worker_epoch != self._config.worker_epoch:
            raise _RefusalError(grpc.StatusCode.NOT_FOUND, "the worker was restarted: its epoch is another")
        return message.open

    def _admit(self, opening: kv_pb2.PullOpen) -> tuple[_Offer, kv_pb2.Opened]:
        """Return the offer that a pull requests, and the answer."""
        is_prefix = bool(opening.prefix)
        offer = (
            _Offer(secrets.token_bytes(HANDLE_BYTES), is_prefix=True) if is_prefix else self._offers.get(opening.handle)
        )
        if offer is None:
            raise _RefusalError(grpc.StatusCode.NOT_FOUND, "no such prompt: it was pulled, expired or never offered")
        try:
            check_layout(opening.layout, self._memory.layout)
            transport, reason = choose_transport(
                self._config.transport,
                opening.transport,
                is_same_host=opening.host_id == host_id(),
                devices=(self._config.device, opening.device),
            )
        except ValueError as error:
            raise _RefusalError(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from error
        if offer.is_prefix:
            self._offers[offer.handle] = offer
            lend = transfer_pb2.Lend(handle=offer.handle, prefix=opening.prefix)
            self._send(transfer_pb2.TransferToEngine(lend=lend))
        layout, shards = layout_message(self._memory.layout), self._links.shards
        return offer, kv_pb2.Opened(
            transport=transport, reason=reason, layout=layout, shards=shards, handle=offer.handle
        )

    async def _serve(
        self,
        offer: _Offer,
        opening: kv_pb2.PullOpen,
        opened: kv_pb2.Opened,
        context: _Context,
        lease: _Lease,
    ) -> bool:
        """Send everything, then wait for the release; ``False`` if the puller leaves without it."""
        if opened.transport in ("memfd", "cuda_ipc"):
            opened.pool_path = self._memory.path
            opened.pool_inode = self._memory.inode
        if opened.transport == "cuda_ipc":
            opened.rank_pools.extend(self.rank_pools)
        if opened.transport == "tcp":
            opened.data_port = self._listener.port
            opened.ticket = lease.data.ticket
        await context.write(kv_pb2.SourceMessage(opened=opened))
        num_sent = 0
        while True:
            offer.check(lease)
            if lease.release.done():
                return lease.release.result() and offer.is_complete and num_sent == len(offer.grants)
            if num_sent == len(offer.grants):
                lease.changed.clear()
                await lease.changed.wait()
                continue
            grant = offer.grants[num_sent]
            num_sent += 1
            if opened.transport not in DIRECT_TRANSPORTS and self._config.device:
                await self._stage(grant)
                offer.check(lease)
            await context.write(kv_pb2.SourceMessage(grant=grant))
            if opened.transport == "tcp" and not ends_request(grant):
                await self._send_blocks(offer, grant, opening, lease)

    async def _send_blocks(self, offer: _Offer, grant: kv_pb2.Grant, opening: kv_pb2.PullOpen, lease: _Lease) -> None:
        missing = grant.block_ids[max(0, opening.num_cached_blocks - grant.first_index) :]
        if not missing:
            return
        try:
            stream = await lease.data.get()
            for batch in batches(missing, self._memory.layout):
                await send_batch(stream, self._memory, batch)
        except OSError as error:
            offer.check(lease)
            raise _RefusalError(grpc.StatusCode.UNAVAILABLE, f"the data stream broke: {error}") from error

    async def _stage(self, grant: kv_pb2.Grant) -> None:
        """Let the engine copy granted blocks from its device to the staging file."""
        stage_id = next(self._stage_ids)
        self._stages[stage_id] = asyncio.get_running_loop().create_future()
        stage = transfer_pb2.Stage(stage_id=stage_id, block_ids=grant.block_ids, generations=grant.generations)
        self._send(transfer_pb2.TransferToEngine(stage=stage))
        try:
            await self._stages[stage_id]
        finally:
            del self._stages[stage_id]

    def staged(self, stage_id: int) -> None:
        """The engine has copied the blocks."""
        if stage_id in self._stages and not self._stages[stage_id].done():
            self._stages[stage_id].set_result(None)

    async def Link(self, request_iterator: object, context: _Context) -> None:  # type: ignore[override]  # noqa: N802
        """Serve the link of one puller, which sends its blocks through it on request."""
        proof = ServerProof(self._config.cluster_token, self.address, dict(context.invocation_metadata() or ()))
        try:
            opening = await self._read_open(context, proof)
            if not self._config.device:
                raise _RefusalError(grpc.StatusCode.FAILED_PRECONDITION, "no process group reaches this worker's pool")
            if self._num_links == MAX_LINKS:
                raise _RefusalError(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_LINKS} workers have links to this one")
            link = self._links.open(opening.shards, is_source=True)
        except _RefusalError as refusal:
            await context.abort(refusal.status, str(refusal))
        except ValueError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        self._num_links += 1
        try:
            await context.write(kv_pb2.SourceMessage(opened=kv_pb2.Opened(transport="nccl")))
            await carry(
                link, partial(self._read_link, link, context), lambda message: context.write(_source_message(message))
            )
        finally:
            link.close("the puller has gone")
            self._num_links -= 1
        await context.abort(grpc.StatusCode.UNAVAILABLE, link.closed.result())

    async def _read_link(self, link: EngineLink, context: _Context) -> None:
        message: object = await context.read()
        if not isinstance(message, kv_pb2.PullMessage):
            raise ConnectionResetError("the puller ended the link")
        if message.HasField("key"):
            link.order(key=message.key)
            return
        first, num_blocks = message.send.first_index, message.send.num_blocks
        offer = self._offers.get(message.send.handle)
        block_ids = [block_id for grant in offer.grants for block_id in grant.block_ids] if offer is not None else []
        if offer is None or offer.lease is None or not 0 < num_blocks <= len(block_ids) - first:
            raise ConnectionResetError("the puller requests blocks that are not granted to it")
        link.order(send=transfer_pb2.GroupSend(block_ids=block_ids[first : first + num_blocks]))

    def _end_lease(self, offer: _Offer, lease: _Lease, is_released: bool) -> None:
        if offer.lease is not lease:
            return
        offer.lease = None
        if offer.is_withdrawn and not offer.is_prefix:
            return
        if is_released or offer.is_prefix:
            self._offers.pop(offer.handle, None)
            self._send(transfer_pb2.TransferToEngine(released=transfer_pb2.Released(handle=offer.handle)))
        else:
            self._send(transfer_pb2.TransferToEngine(lease_lost=transfer_pb2.LeaseLost(handle=offer.handle)))


def _source_message(message: LinkMessage) -> kv_pb2.SourceMessage:
    assert isinstance(message, kv_pb2.StoreKey)
    return kv_pb2.SourceMessage(key=message)


async def _is_release(context: _Context) -> bool:
    try:
        message: object = await context.read()
    except DecodeError:
        return False
    return isinstance(message, kv_pb2.PullMessage) and message.HasField("release")
