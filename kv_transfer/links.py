"""Links between the engines of two workers, as their transfer processes see them.

A link is a process group for each two ranks of the two engines that share KV (`pdserve.kv_transfer.group_copies`), and
the gRPC stream that carries their rendezvous and the puller's requests. The groups end with the stream, on both sides:
when a worker dies, stops, or abandons a copy under way. The next pull makes another link. All pulls of one worker from
another take turns in one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import count
from typing import Any

from pdserve.kv_transfer.handshake import shard_from, shard_message
from pdserve.kv_transfer.pull_stream import PullStream
from pdserve.kv_transfer.resharding import KvShard, reshard
from pdserve.kv_transfer.transfer_client import TransferConfig
from pdserve.kv_transfer.transports import GrantedBlock, PullError, TransportImpossibleError, check_generation
from pdserve.proto.v1 import kv_pb2, transfer_pb2, worker_pb2

MAX_LINKS = 16
"""Links of a worker in each role. Each has staging buffers on the devices, and NCCL's own."""
FIRST_FETCH_TIMEOUT_S = 15.0
"""Time for a new link's first copy: the two sides meet, and NCCL finds its way between the devices."""
IMPOSSIBLE_S = 60.0
"""Time for which pulls from a worker take another transport after a new link to it failed."""

LinkMessage = kv_pb2.StoreKey | kv_pb2.SendBlocks


class LinkError(ConnectionError):
    """A link is impossible or lost."""


class Links:
    """Links of one transfer process, by the number that its engine knows them by."""

    def __init__(self, config: TransferConfig, send: Callable[[transfer_pb2.TransferToEngine], None]) -> None:
        self.shards = [shard_message(KvShard(range(*bounds[:2]), range(*bounds[2:]))) for bounds in config.shards]
        """Of each rank of the worker."""
        self.by_number: dict[int, EngineLink] = {}
        self._numbers = count()
        self._send = send

    def open(self, peer: Iterable[kv_pb2.KvShard], *, is_source: bool) -> EngineLink:
        """Let the engine start its half of a link to a worker whose ranks have these shards.

        Raises:
            ValueError: the source lacks what a rank of the puller holds.
        """
        own, other = list(map(shard_from, self.shards)), list(map(shard_from, peer))
        groups = [
            transfer_pb2.Group(source_rank=piece.source_rank, target_rank=rank, shard=shard_message(piece.shard))
            for rank, pieces in enumerate(reshard(own, other) if is_source else reshard(other, own))
            for piece in pieces
        ]
        link = EngineLink(next(self._numbers), len(groups), self)
        self.by_number[link.number] = link
        link.order(open=transfer_pb2.OpenLink(is_source=is_source, groups=groups))
        return link

    def order(self, order: transfer_pb2.LinkOrder) -> None:
        self._send(transfer_pb2.TransferToEngine(link_order=order))

    def received(self, event: transfer_pb2.LinkEvent) -> None:
        """Take a message of the engine."""
        link = self.by_number.get(event.link_id)
        if link is not None:
            link.received_event(event)


class EngineLink:
    """One link, until `close`."""

    def __init__(self, number: int, num_groups: int, links: Links) -> None:
        self.number = number
        self.turn = asyncio.Lock()
        """Held by the pull whose blocks are copied."""
        self.is_proven = False
        """Whether blocks have come through it."""
        self.outgoing: asyncio.Queue[LinkMessage] = asyncio.Queue()
        """To the peer's transfer process."""
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why it has ended."""
        self._num_groups = num_groups
        self._generations: list[Sequence[int]] = []
        """Read after the copy of the blocks that are fetched, by each group that is done."""
        self._fetched: asyncio.Future[None] | None = None
        self._links = links

    def order(self, **body: Any) -> None:
        self._links.order(transfer_pb2.LinkOrder(link_id=self.number, **body))

    def received_event(self, event: transfer_pb2.LinkEvent) -> None:
        match event.WhichOneof("body"):
            case "key":
                self.outgoing.put_nowait(event.key)
            case "fetched":
                assert self._fetched is not None
                self._generations.append(event.fetched.generations)
                if len(self._generations) == self._num_groups:
                    self._fetched.set_result(None)
            case "lost":
                self.close(event.lost)

    def close(self, reason: str) -> None:
        """End the link. Once the engine has the order, it writes no block."""
        if self.closed.done():
            return
        del self._links.by_number[self.number]
        self.order(close=transfer_pb2.CloseLink())
        self.closed.set_result(reason)

    async def fetch(self, blocks: Sequence[GrantedBlock], ended: asyncio.Future[None]) -> list[Sequence[int]]:
        """Let the engine fetch blocks that the peer sends; returns, for each group, their generations there after the
        copy.

        Args:
            ended: done when the lease has ended.

        Raises:
            LinkError: the copy failed.
        """
        self._generations = []
        self._fetched = asyncio.get_running_loop().create_future()
        self.order(
            fetch=transfer_pb2.GroupFetch(
                block_ids=[block.target_id for block in blocks], generations=[block.generation for block in blocks]
            )
        )
        ends: set[asyncio.Future[Any]] = {self._fetched, self.closed, ended}
        try:
            async with asyncio.timeout(None if self.is_proven else FIRST_FETCH_TIMEOUT_S):
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise LinkError(f"no block came within {FIRST_FETCH_TIMEOUT_S} s") from None
        finally:
            if not self._fetched.done():
                self.close("a copy was abandoned")
        if not self._fetched.done():
            raise LinkError(self.closed.result())
        self.is_proven = True
        return self._generations


async def carry(
    link: EngineLink, read: Callable[[], Awaitable[None]], write: Callable[[LinkMessage], Awaitable[None]]
) -> None:
    """Carry messages between a link and its stream until one of them ends, which ends the link.

    Args:
        read: reads and handles the next message of the stream; raises at its end.
    """

    async def read_all() -> None:
        while True:
            await read()

    async def write_all() -> None:
        while True:
            await write(await link.outgoing.get())

    tasks = [asyncio.ensure_future(read_all()), asyncio.ensure_future(write_all())]
    ends: set[asyncio.Future[Any]] = {*tasks, link.closed}
    try:
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in done - {link.closed}:
            link.close(str(end.exception()))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class PullerLinks:
    """Links to the workers that this one pulls from."""

    def __init__(
        self,
        links: Links,
        open_stream: Callable[[str], AbstractAsyncContextManager[PullStream]],
        opening: Callable[[int], kv_pb2.PullOpen],
    ) -> None:
        """
        Args:
            open_stream: opens the stream of a link to an address.
            opening: first message of a stream to a worker of this epoch.
        """
        self._links = links
        self._open_stream = open_stream
        self._opening = opening
        self._by_source: dict[tuple[str, int], EngineLink] = {}
        self._failed: dict[tuple[str, int], tuple[float, str]] = {}
        """Until when a link to a source counts as impossible, and why."""
        self._tasks: set[asyncio.Task[None]] = set()

    def why_not(self, source: worker_pb2.KvSource) -> str:
        """Why a link to this worker is impossible now; empty if it is not known to be."""
        until_s, reason = self._failed.get((source.address, source.worker_epoch), (0.0, ""))
        return reason if time.monotonic() < until_s else ""

    def get(self, source: worker_pb2.KvSource, shards: Iterable[kv_pb2.KvShard]) -> EngineLink:
        """Return the link to a worker, whose ranks have these shards, and make it if there is none.

        Raises:
            TransportImpossibleError: a new one has just failed, there are too many, or the shards do not match.
        """
        if reason := self.why_not(source):
            raise TransportImpossibleError("nccl", reason)
        key = source.address, source.worker_epoch
        link = self._by_source.get(key)
        if link is None or link.closed.done():
            if len(self._by_source) >= MAX_LINKS:
                raise TransportImpossibleError("nccl", f"{MAX_LINKS} links exist")
            try:
                link = self._by_source[key] = self._links.open(shards, is_source=False)
            except ValueError as error:
                raise TransportImpossibleError("nccl", str(error)) from error
            task = asyncio.ensure_future(self._run(link, key))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return link

    async def _run(self, link: EngineLink, key: tuple[str, int]) -> None:
        address, epoch = key
        try:
            async with self._open_stream(address) as stream:
                await stream.open(self._opening(epoch))

                async def read() -> None:
                    link.order(key=(await stream.read("copy")).key)

                await carry(link, read, lambda message: stream.write(_pull_message(message)))
        except PullError as error:
            link.close(str(error))
        finally:
            if self._by_source.get(key) is link:
                del self._by_source[key]

    def fail(self, source: worker_pb2.KvSource, reason: str) -> None:
        """Count links to a worker as impossible for a while."""
        now_s = time.monotonic()
        self._failed = {key: failed for key, failed in self._failed.items() if failed[0] > now_s}
        self._failed[source.address, source.worker_epoch] = now_s + IMPOSSIBLE_S, reason


def _pull_message(message: LinkMessage) -> kv_pb2.PullMessage:
    if isinstance(message, kv_pb2.StoreKey):
        return kv_pb2.PullMessage(key=message)
    return kv_pb2.PullMessage(send=message)


class GroupReceiver:
    """Receives blocks through the link to their source, straight into the engine's pool."""

    def __init__(
        self, links: PullerLinks, source: worker_pb2.KvSource, handle: bytes, shards: Sequence[kv_pb2.KvShard]
    ) -> None:
        self._links = links
        self._source = source
        self._handle = handle
        """Of the prompt or the loan."""
        self._shards = shards
        """Of the source's ranks."""
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self) -> None:
        """Abandon the copy: the lease has ended."""
        if not self._ended.done():
            self._ended.set_result(None)

    async def receive(self, blocks: Sequence[GrantedBlock]) -> None:
        if blocks:
            for generations in await self._fetch(blocks):
                for block, generation in zip(blocks, generations, strict=True):
                    check_generation(block, generation)

    async def _fetch(self, blocks: Sequence[GrantedBlock]) -> list[Sequence[int]]:
        while True:
            link = self._links.get(self._source, self._shards)
            async with link.turn:
                if self._ended.done():
                    raise LinkError("the source has ended the pull")
                if link.closed.done():  # by another pull, which abandoned its copy
                    continue
                request = kv_pb2.SendBlocks(handle=self._handle, first_index=blocks[0].position, num_blocks=len(blocks))
                link.outgoing.put_nowait(request)
                try:
                    return await link.fetch(blocks, self._ended)
                except LinkError as error:
                    if link.is_proven or self._ended.done():
                        raise
                    raise TransportImpossibleError("nccl", str(error)) from error
