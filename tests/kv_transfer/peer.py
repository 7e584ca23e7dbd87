"""One engine's side of KV transfer for tests: a pool with random content, its transfer process, and its messages."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.worker_config import TlsFiles
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.kv_transfer.transfer_client import TransferProcess
from pdserve.proto.v1 import kv_pb2, transfer_pb2, worker_pb2
from tests.patience import HANG_S

LAYOUT = KvLayout(
    num_blocks=64, num_kv_heads=2, num_layers=3, block_size=4, head_dim=8, dtype="float32", model_hash="model"
)
EPOCH = 0xFEED_FACE_CAFE_BEEF
TOKEN = "secret of the cluster"
EVENT_GRACE_S = 0.2
"""Wait before checking that something did not happen."""


class Peer:
    """Built by `running_peer`."""

    def __init__(
        self, layout: KvLayout, transport: str, seed: int, token: str, tls: TlsFiles | None = None, device: str = ""
    ) -> None:
        self.layout = layout
        self.memory = PoolMemory.create(layout)
        self.memory.blocks[:] = np.random.default_rng(seed).bytes(layout.pool_bytes)
        for block_id in range(layout.num_blocks):
            self.memory.generations[block_id] = (block_id + 1) << 33
        self.messages: queue.Queue[transfer_pb2.TransferToEngine | None] = queue.Queue()
        """From the transfer process; ``None`` once it has died."""
        self.process = TransferProcess.start(
            memory=self.memory,
            worker_epoch=EPOCH,
            host="127.0.0.1",
            cluster_token=token,
            tls=tls,
            transport=transport,
            cpu_cores=(),
            on_message=self.messages.put,
            on_death=lambda: self.messages.put(None),
            device=device,
        )

    def offer(self) -> bytes:
        """Offer a prompt; returns its handle."""
        handle = os.urandom(16)
        self.process.send(transfer_pb2.EngineToTransfer(offer=transfer_pb2.Offer(handle=handle)))
        return handle

    def grant(
        self,
        handle: bytes,
        block_ids: Sequence[int],
        *,
        first_index: int = 0,
        final: bool = True,
        token: int = 7,
        finish: worker_pb2.FinishReason.ValueType = worker_pb2.FINISH_REASON_NONE,
    ) -> None:
        """Grant blocks with their current generations. A final grant's last block is not full."""
        grant = kv_pb2.Grant(
            first_index=first_index,
            block_ids=block_ids,
            generations=[self.memory.generations[block_id] for block_id in block_ids],
            final=final,
        )
        if final:
            grant.num_tokens = (first_index + len(block_ids)) * self.layout.block_size - 1
            grant.first_token.CopyFrom(kv_pb2.FirstToken(token=token, finish=finish))
        self.process.send(transfer_pb2.EngineToTransfer(grant=transfer_pb2.OfferedGrant(handle=handle, grant=grant)))

    def lend(self, handle: bytes, block_ids: Sequence[int]) -> None:
        """Grant cached blocks to a pull of a prefix."""
        grant = kv_pb2.Grant(
            block_ids=block_ids,
            generations=[self.memory.generations[block_id] for block_id in block_ids],
            final=True,
            num_tokens=len(block_ids) * self.layout.block_size,
        )
        self.process.send(transfer_pb2.EngineToTransfer(grant=transfer_pb2.OfferedGrant(handle=handle, grant=grant)))

    def withdraw(self, handle: bytes) -> None:
        self.process.send(transfer_pb2.EngineToTransfer(withdraw=transfer_pb2.Withdraw(handle=handle)))

    def pull(
        self,
        source: str,
        handle: bytes,
        block_ids: Sequence[int],
        *,
        pull_id: int = 1,
        num_cached_blocks: int = 0,
        deadline_s: float = HANG_S,
        min_duration_s: float = 0.0,
        epoch: int = EPOCH,
        prefix: Sequence[bytes] = (),
    ) -> None:
        """Order the transfer process to pull from address ``source``."""
        self.process.send(
            transfer_pb2.EngineToTransfer(
                start_pull=transfer_pb2.StartPull(
                    pull_id=pull_id,
                    source=worker_pb2.KvSource(address=source, worker_epoch=epoch, handle=handle),
                    num_cached_blocks=num_cached_blocks,
                    block_ids=block_ids,
                    deadline_s=deadline_s,
                    min_duration_s=min_duration_s,
                    prefix=prefix,
                )
            )
        )

    def abort(self, pull_id: int = 1) -> None:
        self.process.send(transfer_pb2.EngineToTransfer(abort_pull=transfer_pb2.AbortPull(pull_id=pull_id)))

    def expect(self, body: str) -> transfer_pb2.TransferToEngine:
        """Return the next message, which must be of this kind."""
        message = self.messages.get(timeout=HANG_S)
        assert message is not None, "the transfer process died"
        assert message.WhichOneof("body") == body, message
        return message

    def expect_done(self, failure_stage: str = "") -> transfer_pb2.PullDone:
        """Return the next message, which must be the end of a pull with this failure stage."""
        done = self.expect("pull_done").pull_done
        assert done.failure_stage == failure_stage, done
        return done

    def expect_death(self) -> None:
        assert self.messages.get(timeout=HANG_S) is None

    def block(self, block_id: int) -> bytes:
        return bytes(self.memory.block(block_id, 0, self.layout.num_kv_heads))

    def wait_for_block(self, block_id: int, content: bytes) -> None:
        """Wait until a pull has written ``content`` to a block."""
        deadline_s = time.monotonic() + HANG_S
        while self.block(block_id) != content:
            assert time.monotonic() < deadline_s
            time.sleep(0.005)


def quiet(peer: Peer) -> Iterator[Peer]:
    """Yield a peer whose messages the test must all expect."""
    yield peer
    assert peer.messages.empty()


@contextmanager
def running_peer(
    *,
    layout: KvLayout = LAYOUT,
    transport: str = "auto",
    seed: int = 0,
    token: str = TOKEN,
    tls: TlsFiles | None = None,
    device: str = "",
) -> Iterator[Peer]:
    peer = Peer(layout, transport, seed, token, tls, device)
    try:
        yield peer
    finally:
        peer.process.close()
        peer.memory.close()
