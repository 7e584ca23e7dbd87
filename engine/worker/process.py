"""A worker in its own process: a Ray actor, or ``python -m pdserve.engine.worker.process --config JSON``.

`WorkerActor` lets Ray start, ping and stop a worker. Tokens and KV never pass through it. The class is plain: the
deployment decorates it with ``ray.remote``, ``num_cpus=0`` and a ``max_concurrency`` of at least 2, so that
`WorkerActor.ping` answers while `WorkerActor.drain` waits.

`main` prints each endpoint as a line of JSON and serves. SIGTERM or SIGINT drains and exits 0. A second signal, or a
drain that times out, drops running requests and exits 1, as does a dead step loop.
"""

from __future__ import annotations

import argparse
import logging
import os
import queue
import signal
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

from pdserve.contracts.codec import from_json, from_plain, to_json, to_plain
from pdserve.contracts.worker_config import WorkerConfig
from pdserve.engine.worker.worker import EngineWorker
from pdserve.proto.parent_death import die_with_parent

DRAIN_TIMEOUT_S = 30.0

_PROGRAM = "python -m pdserve.engine.worker.process"


class WorkerActor:
    """One worker in an actor's process. If the step loop dies, so do the process and the actor."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """
        Args:
            config: a `WorkerConfig` as JSON values.

        Raises:
            ValueError: the configuration is invalid.
        """
        self._worker = EngineWorker(from_plain(WorkerConfig, config, "the worker's configuration"))

    def process_id(self) -> int:
        return os.getpid()

    def start(self) -> list[dict[str, Any]]:
        """Serve; returns the fields of each `WorkerEndpoint`.

        Raises:
            ValueError: the configuration cannot be served; the message names the remedy.
        """
        endpoints: list[dict[str, Any]] = to_plain(self._worker.start())
        return endpoints

    def ping(self) -> int:
        """The worker's epoch.

        Raises:
            RuntimeError: the step loop does not turn.
        """
        if not self._worker.is_healthy():
            raise RuntimeError("the step loop does not turn")
        return self._worker.epoch

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for running ones; returns whether they finished in time."""
        return self._worker.drain(timeout_s)

    def stop(self) -> None:
        """Stop the worker and drop running requests."""
        self._worker.stop()


def main() -> int:
    """Run a worker until a signal stops it; returns the exit status."""
    arguments = _parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if arguments.die_with_parent:
        die_with_parent()
    stop_signals = _catch_stop_signals()
    try:
        # Every user of the host can read a command line, and the configuration holds the cluster token.
        text = sys.stdin.readline() if arguments.config == "-" else arguments.config
        worker = EngineWorker(from_json(WorkerConfig, text, "the worker's configuration"))
        endpoints = worker.start()
    except (ValueError, RuntimeError, OSError) as error:
        sys.stderr.write(f"{_PROGRAM}: {' '.join(str(error).split())}\n")
        return 1
    sys.stdout.write("".join(f"{to_json(endpoint)}\n" for endpoint in endpoints))
    sys.stdout.flush()
    stop_signals.get()
    is_drained = worker.drain(arguments.drain_timeout_s)
    worker.stop()
    return 0 if is_drained else 1


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=_PROGRAM, description="One worker of a pdserve cluster, as a plain process.")
    parser.add_argument(
        "--config", required=True, help="the worker's configuration as a JSON object; - reads a line from stdin"
    )
    parser.add_argument("--die-with-parent", action="store_true", help="end as soon as the starting process is gone")
    parser.add_argument("--drain-timeout-s", type=float, default=DRAIN_TIMEOUT_S, help="seconds a drain may last")
    return parser.parse_args()


def _catch_stop_signals() -> queue.SimpleQueue[int]:
    """Queue the first SIGTERM or SIGINT; the second ends the process immediately."""
    received: queue.SimpleQueue[int] = queue.SimpleQueue()  # its put may interrupt its get

    def receive(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, lambda number, frame: os._exit(1))
        received.put(number)

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, receive)
    return received


if __name__ == "__main__":
    sys.exit(main())
