"""The other ranks of a worker, as its leader sees them: processes that compute the steps it sends.

The leader is the worker itself, rank 0: it alone has sessions, schedulers and block pools. A follower is a child
process on the same host (`pdserve.engine.worker.follower`) with its share of the weights. On CPUs it maps the worker's
KV pool and computes the KV of its layers and heads there. On a GPU it has a pool of its own for them, and copies them
to and from the staging file that all ranks of the worker map. Either way block tables, prefix cache and transfers know
nothing of ranks.

Each follower has socket pairs, which no other process can open: for steps, for its pulse, and for each direction of
copies. A step is a 32-bit length, then the words of a `pdserve.model.executors.rank_model.PackedStep`; the other way go
events of links to other workers. The ranks exchange tensors through memory that they share
(`pdserve.kernels.cpu.ranks`), or between devices (`pdserve.kernels.torch.ranks`). There is no partial repair: when a
follower ends or is silent, so does the worker, and with it all other ranks.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from pdserve.contracts.codec import to_json
from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.worker_config import WorkerConfig
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.proto.framing import encode_frame, receive_frame
from pdserve.proto.v1.kv_pb2 import RankPool
from pdserve.proto.v1.transfer_pb2 import Copied, CopyOrder, EngineToTransfer, ExportedPools, LinkOrder

if TYPE_CHECKING:  # they import torch
    from pdserve.kv_transfer.group_copies import GroupCopies
    from pdserve.kv_transfer.host_staging import Staging
    from pdserve.kv_transfer.ipc_copies import IpcCopies
    from pdserve.model.executors.rank_model import PackedStep

PULSE_S = 0.1
"""Interval between the leader's pulses, which a thread of every follower answers."""
SILENCE_S = 2.0
"""A follower that answers no pulse for this long is lost."""
START_SILENCE_S = 300.0
"""The same before it is ready: imports and the loading of weights hold up its thread for pulses."""
COPY_TIMEOUT_S = 10.0
"""A follower that takes longer for an order to copy blocks is lost."""
STOP_TIMEOUT_S = 2.0

READY = b"ready"
"""Begins the first frame that a follower sends: it has its weights and takes steps. Its `RankPool` follows, if other
workers open it."""
COPIED = b"copied"
"""Begins the answer to an order to copy. Why it was not carried out follows, where that does not end the follower."""

_MODULE = "pdserve.engine.worker.follower"
_log = logging.getLogger(__name__)


class Direction(Enum):
    """Of copies: to the staging file, from it, and between pools of two workers."""

    D2H = "d2h"
    H2D = "h2d"
    D2D = "d2d"


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerConfig:
    """First frame that a follower receives, as JSON."""

    worker: WorkerConfig
    layout: KvLayout
    """Layout of the worker's pool, with the layers and heads of all ranks."""
    rank: int
    num_swap_slots: int
    """Host slots for blocks of the follower's own pool."""
    parent_pid: int
    """Process id of the leader, with which the follower dies."""


class Followers:
    """Ranks 1, 2, ... of a worker. Any thread may call `close`, and one thread at a time everything else."""

    def __init__(
        self,
        config: WorkerConfig,
        memory: PoolMemory,
        shared_fd: int,
        on_loss: Callable[[str], None],
        *,
        num_swap_slots: int = 0,
    ) -> None:
        """Start the processes. The calling thread must live as long as they.

        Args:
            memory: the worker's pool, or its staging file.
            shared_fd: file through which the ranks exchange tensors, or find each other; this object closes it.
            on_loss: called with the reason when a follower is lost, on a thread of this object or in `copying`.
            num_swap_slots: host slots for blocks of each follower's own pool.
        """
        self._on_loss = on_loss
        self.shared_fd = shared_fd
        self.rank_pools: list[RankPool] = []
        """Pool of each follower that is ready, as other workers open it."""
        self._is_closing = False
        self._followers = [
            _Follower(
                FollowerConfig(
                    worker=config,
                    layout=memory.layout,
                    rank=rank,
                    num_swap_slots=num_swap_slots,
                    parent_pid=os.getpid(),
                ),
                (memory.fd, shared_fd),
            )
            for rank in range(1, config.num_ranks)
        ]
        self._watch = threading.Thread(target=self._watch_pulses, name="rank-pulse", daemon=True)
        self._watch.start()

    def wait_until_ready(self) -> None:
        """Wait until every follower takes steps.

        Raises:
            RuntimeError: one ended; its log has the reason.
        """
        self.rank_pools += [follower.expect_ready() for follower in self._followers]

    def send(self, step: PackedStep) -> None:
        """Send a step to every follower. A lost one is found by its pulse."""
        frame = encode_frame(step.encode().tobytes())
        for follower in self._followers:
            try:
                follower.steps.sendall(frame)
            except OSError as error:
                _log.warning("rank %d does not receive a step: %s", follower.rank, error)

    @contextmanager
    def copying(self, direction: Direction, order: bytes) -> Iterator[list[str]]:
        """Let every follower copy its part of blocks; waits for the end. Yields a list to which it then adds why each
        did not, or nothing.

        Args:
            order: a `CopyOrder`, a `LinkOrder`, or the arguments of `pdserve.kv_transfer.host_staging.Staging`, one
                after the other, as 64-bit words.

        Raises:
            RuntimeError: a follower ended.
            TimeoutError: a follower is lost.
        """
        frame = encode_frame(order)
        for follower in self._followers:
            with self._copy_deadline(follower):
                follower.copies[direction].sendall(frame)
        failures: list[str] = []
        yield failures
        for follower in self._followers:
            with self._copy_deadline(follower):
                answer = receive_frame(follower.copies[direction])
                if answer is None:
                    raise RuntimeError(f"rank {follower.rank} ended")
                failures.append(answer.removeprefix(COPIED).decode())

    def start_events(self, send: Callable[[EngineToTransfer], None]) -> None:
        """Pass events of the followers' links on to ``send``, each follower's on a thread of its own."""
        for follower in self._followers:
            threading.Thread(target=follower.read_events, args=(send,), name="rank-events", daemon=True).start()

    @contextmanager
    def _copy_deadline(self, follower: _Follower) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            self._on_loss(f"rank {follower.rank} does not end a copy within {COPY_TIMEOUT_S:g} s")
            raise

    def close(self) -> None:
        """End all followers."""
        self._is_closing = True
        self._watch.join()
        for follower in self._followers:
            follower.close()
        os.close(self.shared_fd)

    def _watch_pulses(self) -> None:
        while not self._is_closing:
            for follower in self._followers:
                follower.send_pulse()
            time.sleep(PULSE_S)
            for follower in self._followers:
                if (loss := follower.loss()) and not self._is_closing:
                    if not follower.is_ready:
                        time.sleep(SILENCE_S)  # `wait_until_ready` says it better, unless a collective holds it up
                    if not self._is_closing:
                        self._on_loss(f"rank {follower.rank} {loss}")
                    return


class RanksStaging:
    """`pdserve.kv_transfer.host_staging.Staging` of a worker whose ranks have pools of their own."""

    def __init__(self, own: Staging, followers: Followers) -> None:
        """
        Args:
            own: the leader's.
        """
        self._own = own
        self._followers = followers

    def copy_d2h(self, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        with self._followers.copying(Direction.D2H, _words((*block_ids, *generations))):
            self._own.copy_d2h(block_ids, generations)

    def copy_h2d(self, block_ids: Sequence[int]) -> None:
        with self._followers.copying(Direction.H2D, _words(block_ids)):
            self._own.copy_h2d(block_ids)

    def release(self, block_ids: Sequence[int]) -> None:
        self._own.release(block_ids)


class RanksCopies:
    """`pdserve.kv_transfer.group_copies.GroupCopies` of a worker whose ranks have pools of their own."""

    def __init__(self, own: GroupCopies, followers: Followers) -> None:
        """
        Args:
            own: the leader's.
        """
        self.shards, self.generations, self.device = own.shards, own.generations, own.device
        self._own = own
        self._followers = followers

    def start(self, send: Callable[[EngineToTransfer], None]) -> None:
        self._own.start(send)
        self._followers.start_events(send)

    def handle(self, order: LinkOrder) -> None:
        with self._followers.copying(Direction.D2D, order.SerializeToString()):
            self._own.handle(order)

    def close(self) -> None:
        self._own.close()


class RanksIpcCopies:
    """Copies of all ranks by CUDA IPC."""

    def __init__(self, own: IpcCopies, followers: Followers | None) -> None:
        """
        Args:
            own: the leader's.
        """
        self.device = "cuda_ipc"
        self.shards, self.generations = own.shards, own.generations
        self._own = own
        self._followers = followers
        self._send: Callable[[EngineToTransfer], None]

    def start(self, send: Callable[[EngineToTransfer], None]) -> None:
        self._send = send
        others = self._followers.rank_pools if self._followers is not None else []
        send(EngineToTransfer(exported=ExportedPools(rank_pools=[self._own.pool, *others])))

    def handle(self, order: CopyOrder) -> None:
        failures: list[str] = []
        with ExitStack() as stack:
            if self._followers is not None:
                failures = stack.enter_context(self._followers.copying(Direction.D2D, order.SerializeToString()))
            failures.append(self._own.carry_out(order))
        if order.rank_pools:
            failure = next(filter(None, failures), "")
            self._send(EngineToTransfer(copied=Copied(copy_id=order.copy_id, failure=failure)))

    def close(self) -> None:
        self._own.close()


def _words(values: Sequence[int]) -> bytes:
    return np.array(values, np.uint64).tobytes()


class _Follower:
    """One process and its sockets."""

    def __init__(self, config: FollowerConfig, memory_fds: tuple[int, int]) -> None:
        self.rank = config.rank
        pairs = [socket.socketpair() for _ in range(2 + len(Direction))]
        self.steps, self.pulse, *copies = [own for own, _ in pairs]
        self.copies = dict(zip(Direction, copies, strict=True))
        for each in self.copies.values():
            each.settimeout(COPY_TIMEOUT_S)
        self.pulse.setblocking(False)
        children = [child for _, child in pairs]
        with ExitStack() as stack:
            for child in children:
                stack.enter_context(child)
            fds = (*(child.fileno() for child in children), *memory_fds)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE, *map(str, fds)], stdin=subprocess.DEVNULL, pass_fds=fds
            )
        self.steps.sendall(encode_frame(to_json(config).encode()))
        self.is_ready = False
        self._answered_s = time.monotonic()
        """Time of the last answered pulse."""

    def send_pulse(self) -> None:
        with suppress(OSError):  # `loss` finds the reason
            self.pulse.send(b".")

    def loss(self) -> str:
        """Why the follower is lost; empty if it is not."""
        with suppress(BlockingIOError):
            try:
                if not self.pulse.recv(64):
                    return "ended"
            except ConnectionError:
                return "ended"
            self._answered_s = time.monotonic()
        limit_s = SILENCE_S if self.is_ready else START_SILENCE_S
        return f"is silent for {limit_s:g} s" if time.monotonic() - self._answered_s > limit_s else ""

    def expect_ready(self) -> RankPool:
        frame = receive_frame(self.steps)
        if frame is None:
            raise RuntimeError(f"rank {self.rank} ended before it was up; its log has the reason")
        self._answered_s = time.monotonic()
        self.is_ready = True
        return RankPool.FromString(frame.removeprefix(READY))

    def read_events(self, send: Callable[[EngineToTransfer], None]) -> None:
        """Pass events on until the follower ends."""
        while (frame := receive_frame(self.steps)) is not None:
            send(EngineToTransfer.FromString(frame))

    def close(self) -> None:
        with suppress(OSError):
            self.steps.shutdown(socket.SHUT_RDWR)  # a thread may be reading
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for each in (self.steps, self.pulse, *self.copies.values()):
            each.close()
