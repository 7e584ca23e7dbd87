"""A rank of a worker other than its leader: computes the steps that the leader sends.

Started by `pdserve.engine.worker.followers` with descriptors of its sockets, of the KV pool or its staging file, and of
the file through which the ranks exchange tensors or find each other. Ends with its leader, or when the leader closes
the socket of steps. Keeps no state of requests: only weights, and its pool.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from pdserve.contracts.codec import from_json
from pdserve.engine.worker.followers import COPIED, READY, FollowerConfig
from pdserve.engine.worker.ranks import build_follower
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.proto.framing import encode_frame, receive_frame
from pdserve.proto.parent_death import die_with_parent
from pdserve.proto.v1.transfer_pb2 import CopyOrder, EngineToTransfer, LinkOrder

_log = logging.getLogger(__name__)


def main() -> int:
    steps_fd, pulse_fd, d2h_fd, h2d_fd, d2d_fd, pool_fd, shared_fd = map(int, sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    steps = socket.socket(fileno=steps_fd)
    pulse = socket.socket(fileno=pulse_fd)
    first = receive_frame(steps)
    if first is None:
        return 1
    config = from_json(FollowerConfig, first.decode(), "the follower's configuration")
    die_with_parent(parent=config.parent_pid)
    threading.Thread(target=_answer_pulses, args=(pulse,), name="rank-pulse", daemon=True).start()
    memory = PoolMemory.from_fd(pool_fd, config.layout)
    try:
        rank, staging, copies = build_follower(config, memory, shared_fd)
    except BaseException:
        _log.critical("rank %d does not start", config.rank, exc_info=True)
        logging.shutdown()
        os._exit(1)  # a thread of a process group may wait for the other ranks
    if staging is not None:
        _start_copying("d2h", d2h_fd, lambda order: staging.copy_d2h(*_words(order).reshape(2, -1).tolist()))
        _start_copying("h2d", h2d_fd, lambda order: staging.copy_h2d(_words(order).tolist()))

    from pdserve.kv_transfer.ipc_copies import IpcCopies
    from pdserve.model.executors.rank_model import PackedStep

    rank_pool = b""
    if isinstance(copies, IpcCopies):
        rank_pool, carry_out = copies.pool.SerializeToString(), copies.carry_out
        _start_copying("d2d", d2d_fd, lambda order: carry_out(CopyOrder.FromString(order)))
    elif copies is not None:
        handle, sending = copies.handle, threading.Lock()

        def send(event: EngineToTransfer) -> None:
            with sending:
                steps.sendall(encode_frame(event.SerializeToString()))

        copies.start(send)
        _start_copying("d2d", d2d_fd, lambda order: handle(LinkOrder.FromString(order)))
    steps.sendall(encode_frame(READY + rank_pool))

    while (frame := receive_frame(steps)) is not None:
        rank.follow(PackedStep.decode(np.frombuffer(bytearray(frame), np.int32)))
    return 0


def _words(order: bytes) -> npt.NDArray[np.uint64]:
    return np.frombuffer(order, np.uint64)


def _start_copying(name: str, fd: int, copy: Callable[[bytes], str | None]) -> None:
    """Answer each frame of ``fd`` once ``copy`` has made its copies, or with why it has not. The process ends if it
    raises."""

    def run() -> None:
        try:
            with socket.socket(fileno=fd) as leader:
                while (frame := receive_frame(leader)) is not None:
                    leader.sendall(encode_frame(COPIED + (copy(frame) or "").encode()))
        except BaseException:
            _log.critical("KV was not copied", exc_info=True)
            os._exit(1)

    threading.Thread(target=run, name=f"kv-{name}", daemon=True).start()


def _answer_pulses(pulse: socket.socket) -> None:
    with suppress(OSError):
        while received := pulse.recv(64):
            pulse.send(received)
    os._exit(0)  # the leader is gone


if __name__ == "__main__":
    raise SystemExit(main())
