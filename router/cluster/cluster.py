"""The cluster as the HTTP edge and the admin port see it: its workers, and whether it serves.

Owns the sessions with all targets, which the supervisor sets through the admin port, and the periodic work that the
dispatch core has no clock for: the deadline sweep, the wait for a drain, and readiness, which begins with a real round
trip through both phases and lasts while requests would be served.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from pdserve.contracts import metrics as names
from pdserve.contracts.request import SamplingParams
from pdserve.contracts.worker_config import TlsFiles, WorkerEndpoint, WorkerRole, whole_worker_id
from pdserve.proto.v1 import worker_pb2
from pdserve.router.cluster.remote_worker import RemoteWorker, SessionRefusedError
from pdserve.router.metrics import ABORTED, RouterMetrics
from pdserve.router.requests.dispatch import Dispatcher
from pdserve.router.requests.request import GenerationError, RequestSpec
from pdserve.router.requests.settings import SWEEP_S
from pdserve.router.token_stream import TokenStream

log = logging.getLogger(__name__)

PROBE_PROMPT = (1, 2, 1)
"""Token ids that exist in every vocabulary."""
PROBE_SAMPLING = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
PROBE_POLL_S = 0.05
PROBE_RETRY_S = 0.5
PROBE_TIMEOUT_S = 30.0


class Cluster:
    """All targets, with one session each, and the requests that they serve."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        metrics: RouterMetrics,
        *,
        cluster_token: str = "",
        tls: TlsFiles | None = None,
        stall_timeout_s: float = 2.5,
    ) -> None:
        """
        Args:
            cluster_token: bearer token that workers require.
            tls: encrypts the sessions with workers.
            stall_timeout_s: seconds of silence after which a session is broken; workers send at least every half
                second.
        """
        self.dispatcher = dispatcher
        self.metrics = metrics
        self.cluster_token = cluster_token
        self.tls = tls
        self.stall_timeout_s = stall_timeout_s
        self.router_id = secrets.token_hex(8)
        """Identity towards workers, constant for the life of the process."""
        self.workers: dict[str, RemoteWorker] = {}
        """All targets, up or not, by id."""
        self._epochs: dict[str, int] = {}
        """Last known, of every whole worker that there ever was: one leaves the targets before it comes back."""
        self._model: worker_pb2.Welcome | None = None
        self._unproven = asyncio.Event()
        """Set until a round trip has succeeded since workers that serve whole requests were last lost."""
        self._unproven.set()
        self._has_served = False
        """A round trip through both phases has succeeded."""
        self._is_changing = asyncio.Lock()

    @property
    def is_ready(self) -> bool:
        """Whether a real round trip has succeeded, and a request sent now would be served."""
        return not self._unproven.is_set() and not self.dispatcher.admission.is_draining and self._serves()

    @property
    def max_model_len(self) -> int | None:
        """Maximum tokens of prompt and answer together; ``None`` until the first worker has connected."""
        return None if self._model is None else self._model.max_model_len

    # Requests

    async def sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.dispatcher.sweep()

    async def wait_idle(self) -> None:
        while self.dispatcher.num_in_flight:  # noqa: ASYNC110  # the core knows no event loop
            await asyncio.sleep(SWEEP_S)

    async def keep_proven(self) -> None:
        """Send a probe request whenever workers would serve it and are unproven: at startup, once both phases are up,
        and after a loss. A probe generates two tokens: one from a prefill worker and, after a handoff, one from a
        decode worker, or both from one worker. Probes count in the metrics like any other request."""
        while True:
            await self._unproven.wait()
            await asyncio.sleep(PROBE_POLL_S)
            if self.dispatcher.admission.is_draining or not self._serves():
                continue
            if await self.round_trip():
                self._has_served = True
                if self._serves():
                    self._unproven.clear()
            else:
                await asyncio.sleep(PROBE_RETRY_S)

    async def round_trip(self) -> bool:
        """Whether a probe request completed."""
        spec = RequestSpec(
            prompt_tokens=PROBE_PROMPT, sampling=PROBE_SAMPLING, arrived_s=time.monotonic(), is_probe=True
        )
        stream = TokenStream(self.dispatcher, spec)
        try:
            self.dispatcher.start(stream)
        except GenerationError as error:
            log.warning("no round trip: %s", error.message)
            return False
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                return len([token async for token in stream]) == PROBE_SAMPLING.max_tokens
        except (GenerationError, TimeoutError) as error:
            log.warning("the round trip failed: %s", error)
            return False
        finally:
            stream.cancel()

    # Workers

    async def set_targets(self, endpoints: Iterable[WorkerEndpoint]) -> None:
        """Replace the targets: open sessions to new incarnations, close those to absent ones, and have those take their
        roles that have another one than before. Of overlapping calls, the last one's list wins.

        Raises:
            ValueError: two targets share a worker id.
        """
        listed = list(endpoints)
        wanted = {endpoint.worker_id: endpoint for endpoint in listed}
        if len(wanted) != len(listed):
            raise ValueError("two targets have the same worker_id; list each worker once")
        async with self._is_changing:
            self._relabel(wanted)
            gone = [worker for worker in self.workers.values() if wanted.get(worker.worker_id) != worker.endpoint]
            for worker in gone:
                del self.workers[worker.worker_id]
            await asyncio.gather(*(worker.close() for worker in gone))
            for worker in gone:
                worker.metrics.remove()
            for endpoint in wanted.values():
                worker_id = whole_worker_id(endpoint.worker_id)
                if self._epochs.get(worker_id, endpoint.epoch) != endpoint.epoch:
                    self.metrics[names.RESTARTS].labels(endpoint.role.value).inc()
                self._epochs[worker_id] = endpoint.epoch
                if endpoint.worker_id not in self.workers:
                    self.workers[endpoint.worker_id] = worker = RemoteWorker(endpoint, self)
                    worker.start()

    def _relabel(self, wanted: Mapping[str, WorkerEndpoint]) -> None:
        """Have workers take the roles of their endpoints, all before anything is placed."""
        for worker in self.workers.values():
            endpoint = wanted.get(worker.worker_id)
            if endpoint is not None and endpoint != worker.endpoint == replace(endpoint, role=worker.role):
                worker.relabel(endpoint)

    async def close(self) -> None:
        await self.set_targets([])

    def check_model(self, worker: RemoteWorker, welcome: worker_pb2.Welcome) -> None:
        """Check a worker's model against the cluster's: that of the first worker, for as long as any other is up.

        Raises:
            SessionRefusedError: ``worker`` has another model, or a smaller ``max_model_len``.
        """
        others_up = any(other.is_up for other in self.workers.values() if other is not worker)
        if self._model is None or not others_up:
            self._model = welcome
        elif (welcome.model_hash, welcome.block_size) != (self._model.model_hash, self._model.block_size):
            raise SessionRefusedError(
                f"it holds another model ({welcome.model_hash}, block size {welcome.block_size}) than the cluster "
                f"({self._model.model_hash}, block size {self._model.block_size})"
            )
        elif welcome.max_model_len < self._model.max_model_len:
            raise SessionRefusedError(
                f"its max_model_len {welcome.max_model_len} is below the cluster's {self._model.max_model_len}"
            )

    def worker_at(self, kv_address: str) -> str:
        """Id of the worker whose transfer process listens at ``kv_address``; its micro-batches share it."""
        ids = (worker.worker_id for worker in self.workers.values() if worker.kv_address == kv_address)
        return whole_worker_id(next(ids, "unknown"))

    def prefix_pulled(self, worker: RemoteWorker, report: worker_pb2.TransferReport) -> None:
        """A pull of a prefix by ``worker`` has ended. A source that failed is left alone for a while."""
        source, num_tokens = self.workers.get(self.worker_at(report.source)), report.num_tokens
        if source is None:
            return
        cost = self.dispatcher.costs[worker.role]
        prefill_s = cost.prompt_s(num_tokens, 0, worker.max_batch_tokens) if num_tokens else 0.0
        self.metrics.observe_prefix(report, source.role, prefill_s * worker.load.prefill_correction)
        if report.failure_stage not in ("", ABORTED):
            self.dispatcher.prefix_failed(source)

    def worker_lost(self, worker: RemoteWorker) -> None:
        """A worker's session broke; the cluster is unproven if those left serve no requests."""
        self.dispatcher.worker_lost(worker)
        if not self._serves():
            self._unproven.set()

    def _serves(self) -> bool:
        """Whether workers accept whole requests now: mixed ones, prefill and decode workers, or decode workers, which
        then prefill too, but not before both phases have served: prefill workers may be about to start."""
        roles = {worker.role for worker in self.workers.values() if worker.takes_work}
        has_prefill = self._has_served or WorkerRole.PREFILL in roles
        return WorkerRole.MIXED in roles or (has_prefill and WorkerRole.DECODE in roles)
