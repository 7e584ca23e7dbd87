"""The transfer process of a worker whose KV pool lies on a device, where the process maps a mirror of it.

Stands between the step loop and the process. Blocks are copied to the mirror before the order that grants them leaves,
and to the pool before the loop hears that they were pulled. The loop does not wait for copies: orders wait in one
thread, and what the process says in another, each in its order. Only an offer goes ahead of what waits, because the
puller that it is for may come at any moment; its grants follow.

Why the mirror never holds anything wrong that could be used:

- A grant that waits may be of a prompt that ended meanwhile, and its blocks may have new owners. What is copied then is
  no matter: the generations that the grant names are past, so that a puller refuses its blocks.
- If the new owner is a pull, its order comes behind the grant, and the process writes to the blocks after that copy.
- A granted block has one owner and one content until its generation is raised: copied again, it stays the same bytes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from pdserve.engine.live_loop import TransferLink
from pdserve.proto.v1.transfer_pb2 import EngineToTransfer, TransferToEngine

_log = logging.getLogger(__name__)


class Mirror(Protocol):
    """`pdserve.kv_transfer.kv_mirror.KvMirror`."""

    def download(self, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        """Copy blocks of these generations from the pool to the mirror; returns when they are there."""
        ...

    def upload(self, block_ids: Sequence[int]) -> None:
        """Copy blocks from the mirror to the pool; returns when they are there."""
        ...


class MirroredTransfer:
    """Implements `pdserve.engine.live_loop.TransferLink`."""

    def __init__(
        self,
        mirror: Mirror,
        start: Callable[[Callable[[TransferToEngine], None]], TransferLink],
        on_message: Callable[[TransferToEngine], None],
        on_failure: Callable[[], None],
    ) -> None:
        """
        Args:
            start: starts the transfer process, given whom it tells what it says.
            on_message: called on a thread of this object with everything that the process says; must only enqueue.
            on_failure: called on one when a copy failed; what waits behind it is lost.
        """
        self._mirror = mirror
        self._on_message = on_message
        self._on_failure = on_failure
        self._orders = ThreadPoolExecutor(1, "kv-download")
        self._messages = ThreadPoolExecutor(1, "kv-upload")
        self._targets: dict[int, Sequence[int]] = {}
        """Blocks of each pull under way."""
        self._process = start(self._receive)

    @property
    def address(self) -> str:
        return self._process.address

    def send(self, message: EngineToTransfer) -> None:
        """Send an order once the blocks that it grants are in the mirror; returns at once."""
        if message.HasField("offer"):
            self._process.send(message)
            return
        if message.HasField("start_pull"):
            self._targets[message.start_pull.pull_id] = message.start_pull.block_ids
        self._orders.submit(self._pass_on, message).add_done_callback(self._check)

    def close(self) -> None:
        """End the process and both threads; what waits is dropped."""
        self._orders.shutdown(cancel_futures=True)
        self._process.close()
        self._messages.shutdown(cancel_futures=True)

    def _pass_on(self, message: EngineToTransfer) -> None:
        if message.HasField("grant"):
            grant = message.grant.grant
            self._mirror.download(grant.block_ids, grant.generations)
        self._process.send(message)

    def _receive(self, message: TransferToEngine) -> None:
        self._messages.submit(self._deliver, message).add_done_callback(self._check)

    def _deliver(self, message: TransferToEngine) -> None:
        if message.HasField("pull_done"):
            done = message.pull_done
            targets = self._targets.pop(done.pull_id)
            if not done.failure_stage:
                started_s = time.monotonic()
                self._mirror.upload(targets)
                done.seconds += time.monotonic() - started_s
        self._on_message(message)

    def _check(self, future: Future[None]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            _log.critical("KV was not copied between the pool and its mirror", exc_info=error)
            self._on_failure()
