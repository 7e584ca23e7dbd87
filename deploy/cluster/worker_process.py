"""One worker process: starts its actor, watches it, and restarts it when it fails.

The supervisor calls `WorkerProcess.check` from its loop, about ten times a second; no call waits. The worker id is
constant; each actor brings a new epoch.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from enum import Enum
from pathlib import Path
from typing import Any

from pdserve.contracts.codec import from_plain, to_plain
from pdserve.contracts.placement import WorkerConfig, WorkerEndpoint
from pdserve.deploy.cluster.processes import last_error

PING_INTERVAL_S = 0.5
PING_TIMEOUT_S = 10.0
"""Time without an answer to a ping after which a worker counts as hung and is killed."""
STABLE_S = 30.0
"""Uptime after which the count of failures starts anew."""
_MAX_DELAY_S = 15.0
_CONCURRENT_CALLS = 4  # so that a worker answers pings while it stops


class WorkerState(Enum):
    """``STOPPED -> STARTING -> UP``, and back to ``STOPPED`` on a failure."""

    STOPPED = "stopped"
    STARTING = "starting"
    UP = "up"


def restart_delay_s(num_failures: int, jitter: float) -> float:
    """Delay after the ``num_failures``-th failure in a row: none at first, then doubling.

    Args:
        jitter: in [0, 1); spreads the delay over +-25 %, so that workers that failed together restart apart.
    """
    if num_failures <= 1:
        return 0.0
    return min(_MAX_DELAY_S, 0.5 * 2.0 ** (num_failures - 2)) * (0.75 + 0.5 * jitter)


class WorkerProcess:
    def __init__(
        self, config: WorkerConfig, worker_class: type, resources: dict[str, float], num_gpus: float = 0.0
    ) -> None:
        """Prepare a worker; the first `check` starts it.

        Args:
            worker_class: class of the actor, which takes its name; has the methods of
                `pdserve.engine.worker.process.WorkerActor`.
            resources: Ray resources that the actor requests.
            num_gpus: GPUs, or the share of one, that the actor requests; Ray shows it no others.
        """
        self.config = config
        self.state = WorkerState.STOPPED
        self.endpoint: WorkerEndpoint | None = None
        """None unless the worker is up."""
        self.process_id = 0
        """0 until known."""
        self.failure = ""
        """Reason of the last failure, in one line."""
        self.num_restarts = 0
        self._worker_class = worker_class
        self._resources = resources
        self._num_gpus = num_gpus
        self._num_failures = 0
        self._retry_at_s = 0.0
        self._up_since_s = 0.0
        self._pinged_at_s = 0.0
        self._log_path: Path | None = None
        self._actor: Any = None
        self._pending: Any = None

    @property
    def worker_id(self) -> str:
        return self.config.worker_id

    def check(self, now_s: float) -> bool:
        """Do what is due, without waiting; returns whether `endpoint` changed."""
        if self.state is WorkerState.STOPPED:
            if now_s >= self._retry_at_s:
                self._start()
            return False
        if self.state is WorkerState.STARTING:
            return self._check_starting(now_s)
        return self._check_up(now_s)

    def stop(self) -> Any:
        """Ask the worker to release everything; returns the Ray reference to wait for, ``None`` unless it is up."""
        return self._actor.stop.remote() if self.state is WorkerState.UP else None

    def clear(self) -> None:
        """Forget the actor after its Ray cluster ended; the next `check` starts another at once."""
        self.state = WorkerState.STOPPED
        self.endpoint = self._actor = self._pending = self._log_path = None
        self.process_id = 0

    def _start(self) -> None:
        import ray

        options = {
            "num_cpus": 0,
            "num_gpus": self._num_gpus,
            "resources": self._resources,
            "max_concurrency": _CONCURRENT_CALLS,
        }
        self._actor = ray.remote(self._worker_class).options(**options).remote(to_plain(self.config))
        self._pending = self._actor.process_id.remote()
        self.state = WorkerState.STARTING

    def _check_starting(self, now_s: float) -> bool:
        try:
            if not _is_done(self._pending):
                return False
            result = _result(self._pending)
        except Exception as error:  # any error of the worker, or its death
            self._fail(now_s, error)
            return False
        if not self.process_id:  # before `start`, so that the log of a worker that dies in it is known
            self.process_id = result
            with contextlib.suppress(OSError):
                self._log_path = Path(f"/proc/{self.process_id}/fd/2").readlink()
            self._pending = self._actor.start.remote()
            return False
        self.endpoint = from_plain(WorkerEndpoint, result, "the endpoint")
        self.state = WorkerState.UP
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
        except Exception as error:  # any error of the worker, or its death
            self._fail(now_s, error)
            return True
        return False

    def _ping(self, now_s: float) -> None:
        self._pending = self._actor.ping.remote()
        self._pinged_at_s = now_s

    def _fail(self, now_s: float, error: Exception) -> None:
        self.failure = describe_failure(error, self._log_path)
        self._num_failures += 1
        self.num_restarts += 1
        self._retry_at_s = now_s + restart_delay_s(self._num_failures, random.random())
        self._kill()
        self.clear()

    def _kill(self) -> None:
        import ray

        # A stopped or spinning process cannot obey Ray, and must not wake up later.
        if self.process_id:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process_id, signal.SIGKILL)
        with contextlib.suppress(Exception):
            ray.kill(self._actor)


def describe_failure(error: Exception, log_path: Path | None) -> str:
    """Reason of a worker's failure in one line: the exception that it raised, or the last error in its log."""
    from ray.exceptions import RayActorError

    if isinstance(error, RayActorError):
        reason = last_error(log_path) if log_path else _creation_error(str(error))
        return f"its process ended{f': {reason}' if reason else ''}"
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    if not lines:
        return type(cause).__name__
    return lines[0] if isinstance(cause, ValueError | TimeoutError) else f"{type(cause).__name__}: {lines[0]}"


def _creation_error(message: str) -> str:
    """Exception of an actor whose creation failed; Ray's message ends with its traceback."""
    return message.strip().splitlines()[-1] if "creation task" in message else ""


def _is_done(reference: Any) -> bool:
    import ray

    done, _ = ray.wait([reference], timeout=0, fetch_local=True)
    return bool(done)


def _result(reference: Any) -> Any:
    import ray

    return ray.get(reference, timeout=0)
