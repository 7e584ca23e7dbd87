"""Transfer process of a worker with its KV pool on a GPU: the process maps a staging file on the host.

Sits between the step loop and the process. Blocks are copied D2H before the order that grants them is sent, and H2D
before the loop receives the end of their pull. The loop does not wait for copies: orders queue in one thread and
messages of the process in another, each in order. Only an offer overtakes other orders, because its puller may come
at any moment; its grants follow.

Where other workers reach the pool (`pdserve.kv_transfer.group_copies`, `pdserve.kv_transfer.ipc_copies`), grants leave
at once, and the process asks for the D2H copy of those that are pulled through the file.

Why a puller never uses wrong bytes of the staging file:

- A queued grant may belong to a prompt that has ended, and its blocks may have new owners. The generations in the
  grant are outdated by then, so the puller refuses its blocks.
- If the new owner is a pull, its order follows the grant, and the process writes to the blocks after that copy.
- A granted block has one owner and one content until its generation is raised: another copy has the same bytes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from pdserve.contracts.worker_config import DIRECT_TRANSPORTS
from pdserve.kv_transfer.transfer_client import TransferProcess
from pdserve.proto.v1.transfer_pb2 import EngineToTransfer, Stage, Staged, TransferToEngine

if TYPE_CHECKING:  # some import torch
    from pdserve.engine.worker.followers import RanksCopies, RanksIpcCopies
    from pdserve.kv_transfer.group_copies import GroupCopies
    from pdserve.kv_transfer.host_staging import Staging

_log = logging.getLogger(__name__)


class StagedTransfer:
    """The transfer process as the step loop uses it: `send`, `address` and `close`."""

    def __init__(
        self,
        staging: Staging,
        start: Callable[..., TransferProcess],
        on_message: Callable[[TransferToEngine], None],
        on_failure: Callable[[], None],
        copies: GroupCopies | RanksCopies | RanksIpcCopies | None = None,
    ) -> None:
        """
        Args:
            start: starts the transfer process, given ``on_message``, the receiver of its messages.
            on_message: receives every message of the process, on a thread of this object; must only enqueue.
            on_failure: called on such a thread when a copy failed; later orders are lost.
            copies: from and to the devices of other workers.
        """
        self._staging = staging
        self._on_message = on_message
        self._on_failure = on_failure
        self._orders = ThreadPoolExecutor(1, "kv-d2h")
        self._messages = ThreadPoolExecutor(1, "kv-h2d")
        self._targets: dict[int, Sequence[int]] = {}
        """Target blocks of each pull in flight."""
        self._is_closing = False
        self._copies = copies
        self._process = start(on_message=self._receive)
        if copies is not None:
            copies.start(self._process.send)

    @property
    def address(self) -> str:
        return self._process.address

    def send(self, message: EngineToTransfer) -> None:
        """Send an order once the blocks it grants are on the host. Returns at once."""
        if message.HasField("offer"):
            self._process.send(message)
            return
        if message.HasField("start_pull"):
            self._targets[message.start_pull.pull_id] = message.start_pull.block_ids
        self._orders.submit(self._pass_on, message).add_done_callback(self._check)

    def close(self) -> None:
        """Stop the process and both threads; queued orders and messages are dropped."""
        self._is_closing = True
        self._orders.shutdown(cancel_futures=True)
        if self._copies is not None:
            self._messages.submit(self._copies.close)
        self._process.close()
        self._messages.shutdown(cancel_futures=True)

    def _pass_on(self, message: EngineToTransfer) -> None:
        if message.HasField("grant") and self._copies is None:
            grant = message.grant.grant
            self._staging.copy_d2h(grant.block_ids, grant.generations)
        self._process.send(message)

    def _receive(self, message: TransferToEngine) -> None:
        self._messages.submit(self._deliver, message).add_done_callback(self._check)

    def _stage(self, stage: Stage) -> None:
        """Copy granted blocks to the host. Those with new owners meanwhile are left out: an owner may be a pull whose
        order has left. Their puller refuses them."""
        assert self._copies is not None
        current = [
            (block_id, generation)
            for block_id, generation in zip(stage.block_ids, stage.generations, strict=True)
            if self._copies.generations[block_id] == generation
        ]
        self._staging.copy_d2h([block_id for block_id, _ in current], [generation for _, generation in current])
        self._process.send(EngineToTransfer(staged=Staged(stage_id=stage.stage_id)))

    def _deliver(self, message: TransferToEngine) -> None:
        kind = message.WhichOneof("body")
        if kind in ("link_order", "copy_order"):
            assert self._copies is not None
            self._copies.handle(getattr(message, kind))
            return
        if message.HasField("stage"):
            if not self._is_closing:
                self._orders.submit(self._stage, message.stage).add_done_callback(self._check)
            return
        if message.HasField("pull_done"):
            done = message.pull_done
            targets = self._targets.pop(done.pull_id)
            if done.transport not in DIRECT_TRANSPORTS:
                if not done.failure_stage:
                    started_s = time.monotonic()
                    self._staging.copy_h2d(targets)
                    done.seconds += time.monotonic() - started_s
                self._staging.release(targets)
        self._on_message(message)

    def _check(self, future: Future[None]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            _log.critical("KV was not copied", exc_info=error)
            self._on_failure()
