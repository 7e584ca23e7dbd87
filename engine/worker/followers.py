"""The other ranks of a worker, as its leader sees them: processes that compute the steps it sends.

The leader is the worker itself, rank 0: it alone has sessions, schedulers and block pools. A follower is a child
process on the same host (`pdserve.engine.worker.follower`) with its share of the weights. It maps the worker's KV pool
and computes the KV of its layers and heads there, so block tables, prefix cache, swapping and transfers know nothing of
ranks.

Each follower has two socket pairs, which no other process can open: one for steps, one for its pulse. A step is a
32-bit length, then the words of a `pdserve.model.executors.rank_model.PackedStep`. The ranks exchange tensors through
memory that they share (`pdserve.kernels.cpu.ranks`). There is no partial repair: when a follower ends or is silent, so
does the worker, and with it all other ranks.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.contracts.codec import to_json
from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.placement import WorkerConfig
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.kv_transfer.transfer_client import encode_frame, receive_frame

if TYPE_CHECKING:  # it imports torch
    from pdserve.model.executors.rank_model import PackedStep

PULSE_S = 0.1
"""Interval between the leader's pulses, which a thread of every follower answers."""
SILENCE_S = 2.0
"""A follower that answers no pulse for this long is lost."""
STOP_TIMEOUT_S = 2.0

READY = b"ready"
"""The only frame that a follower sends: it has its weights and takes steps."""

_MODULE = "pdserve.engine.worker.follower"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerConfig:
    """First frame that a follower receives, as JSON."""

    worker: WorkerConfig
    layout: KvLayout
    """Layout of the worker's pool, with the layers and heads of all ranks."""
    rank: int
    parent_pid: int
    """Process id of the leader, with which the follower dies."""


def rank_cores(cores: Sequence[int], rank: int, num_ranks: int) -> tuple[int, ...]:
    """Share a worker's cores out to its ranks, in contiguous runs; with fewer cores than ranks each uses all."""
    if len(cores) < num_ranks:
        return tuple(cores)
    return tuple(cores[rank * len(cores) // num_ranks : (rank + 1) * len(cores) // num_ranks])


class Followers:
    """Ranks 1, 2, ... of a worker. Any thread may call `close`, and one thread at a time everything else."""

    def __init__(
        self, config: WorkerConfig, memory: PoolMemory, shared_fd: int, on_loss: Callable[[str], None]
    ) -> None:
        """Start the processes. The calling thread must live as long as they.

        Args:
            memory: the worker's pool.
            shared_fd: memory that the ranks share; this object closes it.
            on_loss: called once with the reason, on a thread of this object, when a follower is lost after
                `wait_until_ready`.
        """
        self._on_loss = on_loss
        self.shared_fd = shared_fd
        self._is_closing = False
        self._followers = [
            _Follower(
                FollowerConfig(worker=config, layout=memory.layout, rank=rank, parent_pid=os.getpid()),
                (memory.fd, shared_fd),
            )
            for rank in range(1, config.tensor_parallel * config.pipeline_parallel)
        ]
        self._watch = threading.Thread(target=self._watch_pulses, name="rank-pulse", daemon=True)

    def wait_until_ready(self) -> None:
        """Wait until every follower takes steps, and watch them from then on.

        Raises:
            RuntimeError: one ended; its log has the reason.
        """
        for follower in self._followers:
            follower.expect_ready()
        self._watch.start()

    def send(self, step: PackedStep) -> None:
        """Send a step to every follower. A lost one is found by its pulse."""
        frame = encode_frame(step.encode().tobytes())
        for follower in self._followers:
            try:
                follower.steps.sendall(frame)
            except OSError as error:
                _log.warning("rank %d does not receive a step: %s", follower.rank, error)

    def close(self) -> None:
        """End all followers."""
        self._is_closing = True
        if self._watch.is_alive():
            self._watch.join()
        for follower in self._followers:
            follower.close()
        os.close(self.shared_fd)

    def _watch_pulses(self) -> None:
        started_s = time.monotonic()
        for follower in self._followers:
            follower.answered_s = started_s
        while not self._is_closing:
            for follower in self._followers:
                follower.send_pulse()
            time.sleep(PULSE_S)
            for follower in self._followers:
                if (loss := follower.loss()) and not self._is_closing:
                    self._on_loss(f"rank {follower.rank} {loss}")
                    return


class _Follower:
    """One process and its sockets."""

    def __init__(self, config: FollowerConfig, memory_fds: tuple[int, int]) -> None:
        self.rank = config.rank
        self.steps, child_steps = socket.socketpair()
        self.pulse, child_pulse = socket.socketpair()
        self.pulse.setblocking(False)
        with child_steps, child_pulse:
            fds = (child_steps.fileno(), child_pulse.fileno(), *memory_fds)
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, *map(str, fds)], stdin=subprocess.DEVNULL, pass_fds=fds
            )
        self.steps.sendall(encode_frame(to_json(config).encode()))
        self.answered_s = 0.0
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
            self.answered_s = time.monotonic()
        return f"is silent for {SILENCE_S:g} s" if time.monotonic() - self.answered_s > SILENCE_S else ""

    def expect_ready(self) -> None:
        if receive_frame(self.steps) != READY:
            raise RuntimeError(f"rank {self.rank} ended before it was up; its log has the reason")

    def close(self) -> None:
        self.steps.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.pulse.close()
