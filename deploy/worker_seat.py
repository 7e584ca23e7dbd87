"""One worker's seat: keeps an actor in it, watches it, and fills it again with a new one when it fails.

The supervisor calls `WorkerSeat.check` from its loop, about ten times a second; nothing here waits. A seat keeps its
worker id for life; each actor in it brings a new epoch.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from enum import Enum
from typing import Any

from pdserve.contracts.codec import from_plain, to_plain
from pdserve.contracts.placement import WorkerConfig, WorkerEndpoint

PING_INTERVAL_S = 0.5
PING_TIMEOUT_S = 10.0
"""A worker that answers no ping for this long hangs, and is killed."""
STABLE_S = 30.0
"""A worker that has been up for this long starts the count of failures anew."""
_MAX_DELAY_S = 15.0
_CONCURRENT_CALLS = 4  # so that a ping is answered while a drain runs


class SeatState(Enum):
    """``EMPTY -> STARTING -> UP``, and back to ``EMPTY`` on a failure."""

    EMPTY = "empty"
    STARTING = "starting"
    UP = "up"


def restart_delay_s(num_failures: int, jitter: float) -> float:
    """Seconds to wait after the ``num_failures``-th failure in a row: none at first, then doubling.

    Args:
        jitter: in [0, 1); spreads the delay over +-25 %, so that seats that failed together start apart.
    """
    if num_failures <= 1:
        return 0.0
    return min(_MAX_DELAY_S, 0.5 * 2.0 ** (num_failures - 2)) * (0.75 + 0.5 * jitter)


class WorkerSeat:
    """See the module."""

    def __init__(
        self, config: WorkerConfig, worker_class: type, resources: dict[str, float], num_gpus: float = 0.0
    ) -> None:
        """An empty seat; `check` fills it.

        Args:
            worker_class: becomes the actor, and gives it its name; its methods are those of
                `pdserve.engine.actor.WorkerActor`.
            resources: Ray resources that its actor asks for.
            num_gpus: GPUs, or a share of one, that it asks for; Ray shows the actor no others.
        """
        self.config = config
        self.state = SeatState.EMPTY
        self.endpoint: WorkerEndpoint | None = None
        """Of the worker in the seat, once it is up."""
        self.process_id = 0
        """Of the worker in the seat, 0 until known."""
        self.failure = ""
        """Why the last worker failed, in one line."""
        self.num_restarts = 0
        self._worker_class = worker_class
        self._resources = resources
        self._num_gpus = num_gpus
        self._num_failures = 0
        self._retry_at_s = 0.0
        self._up_since_s = 0.0
        self._pinged_at_s = 0.0
        self._actor: Any = None
        self._pending: Any = None
        self._pending_process_id: Any = None

    @property
    def worker_id(self) -> str:
        return self.config.worker_id

    def check(self, now_s: float) -> bool:
        """Do what is due, without waiting. Returns whether `endpoint` changed."""
        if self.state is SeatState.EMPTY:
            if now_s >= self._retry_at_s:
                self._fill()
            return False
        if self.state is SeatState.STARTING:
            return self._check_starting(now_s)
        return self._check_up(now_s)

    def drain(self, timeout_s: float) -> Any:
        """Ask the worker to finish what runs; returns what to wait for, ``None`` if the seat has no worker up."""
        return self._actor.drain.remote(timeout_s) if self.state is SeatState.UP else None

    def stop(self) -> Any:
        """Ask the worker to release everything; returns what to wait for, ``None`` if the seat has no worker up."""
        return self._actor.stop.remote() if self.state is SeatState.UP else None

    def vacate(self) -> None:
        """Forget the worker, as after the end of its Ray cluster; the next `check` fills the seat at once."""
        self.state = SeatState.EMPTY
        self.endpoint = self._actor = self._pending = self._pending_process_id = None
        self.process_id = 0

    def _fill(self) -> None:
        import ray

        options = {
            "num_cpus": 0,
            "num_gpus": self._num_gpus,
            "resources": self._resources,
            "max_concurrency": _CONCURRENT_CALLS,
        }
        self._actor = ray.remote(self._worker_class).options(**options).remote(to_plain(self.config))
        self._pending_process_id = self._actor.process_id.remote()
        self._pending = self._actor.start.remote()
        self.state = SeatState.STARTING

    def _check_starting(self, now_s: float) -> bool:
        try:
            if not self.process_id:
                if not _is_done(self._pending_process_id):
                    return False
                self.process_id = _result(self._pending_process_id)
            if not _is_done(self._pending):
                return False
            endpoint = _result(self._pending)
        except Exception as error:  # whatever the worker raised, or how it died
            self._fail(now_s, error)
            return False
        self.endpoint = from_plain(WorkerEndpoint, endpoint, "the endpoint")
        self.state = SeatState.UP
        self._up_since_s = now_s
        self._ping(now_s)
        return True

    def _check_up(self, now_s: float) -> bool:
        if now_s - self._up_since_s > STABLE_S:
            self._num_failures = 0
        try:
            if _is_done(self._pending):
                _result(self._pending)
                if now_s - self._pinged_at_s >= PING_INTERVAL_S:
                    self._ping(now_s)
            elif now_s - self._pinged_at_s > PING_TIMEOUT_S:
                raise TimeoutError(f"no answer for {PING_TIMEOUT_S:.0f} s")
        except Exception as error:  # the same
            self._fail(now_s, error)
            return True
        return False

    def _ping(self, now_s: float) -> None:
        self._pending = self._actor.ping.remote()
        self._pinged_at_s = now_s

    def _fail(self, now_s: float, error: Exception) -> None:
        self.failure = describe_failure(error)
        self._num_failures += 1
        self.num_restarts += 1
        self._retry_at_s = now_s + restart_delay_s(self._num_failures, random.random())
        self._kill()
        self.vacate()

    def _kill(self) -> None:
        import ray

        # A stopped or spinning process cannot obey Ray, and must not wake up later and go on.
        if self.process_id:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process_id, signal.SIGKILL)
        with contextlib.suppress(Exception):
            ray.kill(self._actor)


def describe_failure(error: Exception) -> str:
    """One line on why a worker failed: what it raised itself where it did."""
    from ray.exceptions import RayActorError

    if isinstance(error, RayActorError):
        return "its process ended"
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    if not lines:
        return type(cause).__name__
    return lines[0] if isinstance(cause, ValueError | TimeoutError) else f"{type(cause).__name__}: {lines[0]}"


def _is_done(reference: Any) -> bool:
    import ray

    done, _ = ray.wait([reference], timeout=0, fetch_local=True)
    return bool(done)


def _result(reference: Any) -> Any:
    import ray

    return ray.get(reference, timeout=0)
