"""A rank of a worker other than its leader: computes the steps that the leader sends.

Started by `pdserve.engine.worker.followers` with descriptors of its two sockets, of the KV pool and of the memory that
the ranks share. Ends with its leader, or when the leader closes the socket of steps. Keeps no state of requests: only
weights, and the pool that it maps.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import threading
from contextlib import suppress

import numpy as np

from pdserve.contracts.codec import from_json
from pdserve.engine.worker.backend import build_follower
from pdserve.engine.worker.followers import READY, FollowerConfig
from pdserve.kv_transfer.parent_death import die_with_parent
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.kv_transfer.transfer_client import encode_frame, receive_frame


def main() -> int:
    parser = argparse.ArgumentParser(description="A rank of a worker; started by the worker.")
    for name in ("steps", "pulse", "pool", "shared"):
        parser.add_argument(f"{name}_fd", type=int, help="an inherited descriptor")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    steps = socket.socket(fileno=arguments.steps_fd)
    pulse = socket.socket(fileno=arguments.pulse_fd)
    first = receive_frame(steps)
    if first is None:
        return 1
    config = from_json(FollowerConfig, first.decode(), "the follower's configuration")
    die_with_parent(parent=config.parent_pid)
    threading.Thread(target=_answer_pulses, args=(pulse,), name="rank-pulse", daemon=True).start()
    memory = PoolMemory.from_fd(arguments.pool_fd, config.layout)
    rank = build_follower(config.worker, memory, arguments.shared_fd, config.rank)
    steps.sendall(encode_frame(READY))

    from pdserve.model.executors.rank_model import PackedStep

    while (frame := receive_frame(steps)) is not None:
        rank.follow(PackedStep.decode(np.frombuffer(bytearray(frame), np.int32)))
    return 0


def _answer_pulses(pulse: socket.socket) -> None:
    with suppress(OSError):
        while received := pulse.recv(64):
            pulse.send(received)
    os._exit(0)  # the leader is gone


if __name__ == "__main__":
    raise SystemExit(main())
