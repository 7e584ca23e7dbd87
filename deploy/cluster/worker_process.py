"""One worker process: starts its Ray actor and watches it.

The worker id is constant; each actor brings a new epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from pdserve.contracts.codec import from_plain, to_plain
from pdserve.contracts.worker_config import WorkerConfig, WorkerEndpoint, WorkerRole
from pdserve.deploy.cluster.hosts import Host
from pdserve.deploy.cluster.processes import last_error
from pdserve.deploy.cluster.ray_desk import RayDesk
from pdserve.deploy.cluster.supervised_process import ProcessState, SupervisedProcess

PING_INTERVAL_S = 0.5
PING_TIMEOUT_S = 10.0
"""Time without an answer to a ping after which a worker counts as hung and is killed."""
MIN_START_TIMEOUT_S = 120.0
_CONCURRENT_CALLS = 4  # so that a worker answers pings while it stops


class WorkerProcess(SupervisedProcess):
    def __init__(
        self,
        desk: RayDesk,
        config: WorkerConfig,
        worker_class: type,
        resources: dict[str, float],
        host: Host,
        num_gpus: float = 0.0,
        start_timeout_s: float = MIN_START_TIMEOUT_S,
    ) -> None:
        """Prepare a worker; the first `check` starts it.

        Args:
            worker_class: class of the actor; has the methods of `pdserve.engine.worker.process.WorkerActor`.
            resources: Ray resources that the actor requests.
            host: where the actor runs.
            num_gpus: GPUs, or the share of one, that the actor requests; Ray shows it no others.
            start_timeout_s: time without progress after which a worker that starts counts as hung.
        """
        super().__init__(config.worker_id)
        self.role = config.role
        """Its present one; its name has the first."""
        self.endpoints: list[WorkerEndpoint] = []
        """One of each micro-batch; none unless the worker is up."""
        self.process_id = 0
        """0 until known."""
        self.is_leaving = False
        """True once a change is to end it for good."""
        self._desk = desk
        self.host = host
        self._config = config
        self._worker_class = worker_class
        self._options = {
            "num_cpus": 0,
            "num_gpus": num_gpus,
            "resources": resources,
            "max_concurrency": _CONCURRENT_CALLS,
        }
        self._start_timeout_s = start_timeout_s
        self._called_at_s = 0.0
        self._log_path: Path | None = None
        self._actor: Any = None
        self._pending: Future[Any] | None = None

    @property
    def address(self) -> str:
        return ", ".join(endpoint.address for endpoint in self.endpoints)

    def stop(self) -> Future[Any] | None:
        """Ask the worker to release everything; returns what to wait for, ``None`` unless it is up."""
        actor = self._actor
        return self._desk.submit(lambda: actor.stop.remote()) if self.state is ProcessState.UP else None

    def drain(self, timeout_s: float) -> Future[Any]:
        """Ask the worker, which is up, to take no more requests; the future is done once it has none."""
        actor = self._actor
        return self._desk.submit(lambda: actor.drain.remote(timeout_s))

    def move(self, host: Host, config: WorkerConfig) -> None:
        """Start the next actor on another host, with a configuration for it."""
        self.host, self._config = host, replace(config, role=self.role)

    def relabel(self, role: WorkerRole) -> None:
        """Have the worker be of another role to routers, now and after a restart; its process goes on."""
        self.role = role
        self._config = replace(self._config, role=role)
        self.endpoints = [replace(endpoint, role=role) for endpoint in self.endpoints]

    @property
    def may_decode(self) -> bool:
        """As in `WorkerConfig`."""
        return self._config.may_decode

    def abandon_start(self, now_s: float) -> None:
        """End a start that cannot succeed."""
        self._fail(now_s, TimeoutError("its host was lost while it started"))

    def clear(self) -> None:
        """Forget the actor after its Ray cluster ended; the next `check` starts another at once."""
        self.state = ProcessState.STOPPED
        self.endpoints = []
        self._actor = self._pending = self._log_path = None
        self.process_id = 0

    def end(self) -> None:
        # A stopped or spinning process cannot obey Ray, and must not wake up later.
        self.kill()
        if (actor := self._actor) is not None:
            self._desk.submit(lambda: _kill_actor(actor))
        self.clear()

    def kill(self) -> None:
        """Kill the process, without Ray's actor calls."""
        if self.process_id:
            self.host.kill(self.process_id)

    def _start(self) -> None:
        self._call(self._create, time.monotonic())

    def _create(self) -> Any:
        import ray

        named = type(self.name, (self._worker_class,), {})  # the process bears the name of its actor's class
        return ray.remote(named).options(**self._options, **self.host.actor_options).remote(to_plain(self._config))

    def _check_starting(self, now_s: float) -> bool:
        if (answer := self._answer(now_s, self._start_timeout_s)) is None:
            return False
        if self._actor is None:
            self._actor = actor = answer
            self._call(lambda: actor.process_id.remote(), now_s)
            return False
        actor = self._actor
        if not self.process_id:  # before `start`, so that the log of a worker that dies in it is known
            self.process_id = answer
            self._log_path = self.host.log_path(self.process_id)
            self._call(lambda: actor.start.remote(), now_s)
            return False
        self.endpoints = [from_plain(WorkerEndpoint, each, "the endpoint") for each in answer]
        self.relabel(self.role)  # it may have changed since the actor was made
        self._ping(now_s)
        return True

    def _check_up(self, now_s: float) -> None:
        called_at_s = self._called_at_s
        if self._answer(now_s, PING_TIMEOUT_S) is not None and now_s - called_at_s >= PING_INTERVAL_S:
            self._ping(now_s)

    def _ping(self, now_s: float) -> None:
        actor = self._actor
        self._call(lambda: actor.ping.remote(), now_s)

    def _call(self, call: Callable[[], Any], now_s: float) -> None:
        self._pending = self._desk.submit(call)
        self._called_at_s = now_s

    def _answer(self, now_s: float, timeout_s: float) -> Any:
        """Result of the pending call; ``None`` while it runs.

        Raises:
            TimeoutError: the worker did not answer for ``timeout_s``, in which Ray did.
        """
        assert self._pending is not None
        if self._pending.done():
            return self._pending.result()
        if self._desk.is_stuck:
            self._called_at_s = now_s
        elif now_s - self._called_at_s > timeout_s:
            is_up = self.state is ProcessState.UP
            raise TimeoutError(
                f"no answer for {timeout_s:.0f} s" if is_up else f"did not start within {timeout_s:.0f} s"
            )
        return None

    def _reason(self, error: Exception) -> str:
        """The exception that the worker raised, or the last error in its log."""
        from ray.exceptions import RayActorError

        if isinstance(error, RayActorError):
            if "creation task" in str(error):
                return str(error).strip().splitlines()[-1]
            reason = last_error(self._log_path) if self._log_path else ""
            return f"its process ended{f': {reason}' if reason else ''}"
        cause = getattr(error, "cause", None) or error
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        if not lines:
            return type(cause).__name__
        return lines[0] if isinstance(cause, ValueError | TimeoutError) else f"{type(cause).__name__}: {lines[0]}"


def _kill_actor(actor: Any) -> None:
    import ray

    ray.kill(actor)
