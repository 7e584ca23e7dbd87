"""One worker process: starts its Ray actor and watches it.

The worker id is constant; each actor brings a new epoch.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

from pdserve.contracts.codec import from_plain, to_plain
from pdserve.contracts.placement import WorkerConfig, WorkerEndpoint
from pdserve.deploy.cluster.processes import last_error
from pdserve.deploy.cluster.supervised_process import ProcessState, SupervisedProcess

PING_INTERVAL_S = 0.5
PING_TIMEOUT_S = 10.0
"""Time without an answer to a ping after which a worker counts as hung and is killed."""
_CONCURRENT_CALLS = 4  # so that a worker answers pings while it stops


class WorkerProcess(SupervisedProcess):
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
        super().__init__(config.worker_id)
        self.endpoint: WorkerEndpoint | None = None
        """None unless the worker is up."""
        self.process_id = 0
        """0 until known."""
        self._config = config
        self._worker_class = worker_class
        self._options = {
            "num_cpus": 0,
            "num_gpus": num_gpus,
            "resources": resources,
            "max_concurrency": _CONCURRENT_CALLS,
        }
        self._pinged_at_s = 0.0
        self._log_path: Path | None = None
        self._actor: Any = None
        self._pending: Any = None

    @property
    def address(self) -> str:
        return self.endpoint.address if self.endpoint else ""

    def stop(self) -> Any:
        """Ask the worker to release everything; returns the Ray reference to wait for, ``None`` unless it is up."""
        return self._actor.stop.remote() if self.state is ProcessState.UP else None

    def clear(self) -> None:
        """Forget the actor after its Ray cluster ended; the next `check` starts another at once."""
        self.state = ProcessState.STOPPED
        self.endpoint = self._actor = self._pending = self._log_path = None
        self.process_id = 0

    def end(self) -> None:
        import ray

        # A stopped or spinning process cannot obey Ray, and must not wake up later.
        if self.process_id:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process_id, signal.SIGKILL)
        with contextlib.suppress(Exception):
            ray.kill(self._actor)
        self.clear()

    def _start(self) -> None:
        import ray

        self._actor = ray.remote(self._worker_class).options(**self._options).remote(to_plain(self._config))
        self._pending = self._actor.process_id.remote()

    def _check_starting(self, now_s: float) -> bool:
        if (answer := self._answer()) is None:
            return False
        if not self.process_id:  # before `start`, so that the log of a worker that dies in it is known
            self.process_id = answer
            with contextlib.suppress(OSError):
                self._log_path = Path(f"/proc/{self.process_id}/fd/2").readlink()
            self._pending = self._actor.start.remote()
            return False
        self.endpoint = from_plain(WorkerEndpoint, answer, "the endpoint")
        self._ping(now_s)
        return True

    def _check_up(self, now_s: float) -> None:
        if self._answer() is not None:
            if now_s - self._pinged_at_s >= PING_INTERVAL_S:
                self._ping(now_s)
        elif now_s - self._pinged_at_s > PING_TIMEOUT_S:
            raise TimeoutError(f"no answer for {PING_TIMEOUT_S:.0f} s")

    def _ping(self, now_s: float) -> None:
        self._pending = self._actor.ping.remote()
        self._pinged_at_s = now_s

    def _answer(self) -> Any:
        """Result of the pending call, or its error; ``None`` while it runs."""
        import ray

        done, _ = ray.wait([self._pending], timeout=0, fetch_local=True)
        return ray.get(self._pending, timeout=0) if done else None

    def _reason(self, error: Exception) -> str:
        """The exception that the worker raised, or the last error in its log."""
        from ray.exceptions import RayActorError

        if isinstance(error, RayActorError):
            creation_error = str(error).strip().splitlines()[-1:] if "creation task" in str(error) else []
            reason = last_error(self._log_path) if self._log_path else "".join(creation_error)
            return f"its process ended{f': {reason}' if reason else ''}"
        cause = getattr(error, "cause", None) or error
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        if not lines:
            return type(cause).__name__
        return lines[0] if isinstance(cause, ValueError | TimeoutError) else f"{type(cause).__name__}: {lines[0]}"
