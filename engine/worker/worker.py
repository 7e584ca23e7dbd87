"""One worker, assembled: KV memory, block pool, scheduler, executor, step loop, transfer process and gRPC service.

Used by the process entry (`pdserve.engine.worker.process`) and by the Ray actors, which pass the scheduler of their
phase. Everything is built on the step loop's thread, which is pinned to the worker's cores before it imports torch.

The transfer process is never restarted alone. It holds the state of offered prompts and running pulls, so the worker
ends when it dies, and the supervisor starts both again under a new epoch.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable, MutableSequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, cast

from pdserve.contracts.placement import WorkerConfig, WorkerEndpoint
from pdserve.contracts.step import ModelLimits
from pdserve.engine.scheduling.interface import Scheduler
from pdserve.engine.worker.backend import Backend, choose_backend
from pdserve.engine.worker.live_loop import Inbox, LiveLoop, message_from_proto
from pdserve.engine.worker.loop import GrammarCompiled, StartDrain, StepTimes
from pdserve.engine.worker.service import WorkerService
from pdserve.engine.worker.staged_transfer import StagedTransfer
from pdserve.kv_transfer.block_pool import BlockPool
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.kv_transfer.transfer_client import TransferProcess
from pdserve.proto.v1 import worker_pb2
from pdserve.proto.v1.transfer_pb2 import TransferToEngine

if TYPE_CHECKING:  # it imports torch
    from pdserve.kv_transfer.host_staging import HostStaging

STOP_TIMEOUT_S = 10.0

_log = logging.getLogger(__name__)


SchedulerFactory = Callable[[BlockPool, Backend, WorkerConfig], Scheduler]
"""Builds the scheduler of a phase over a worker's pool."""


def end_process() -> None:
    """End a worker whose loop died: the end of the process is the most reliable signal."""
    logging.shutdown()
    os._exit(1)


class EngineWorker:
    """A worker inside this process. Any thread may call its methods."""

    def __init__(self, config: WorkerConfig, scheduler_factory: SchedulerFactory) -> None:
        self._config = config
        self._scheduler_factory = scheduler_factory
        self._inbox = Inbox()
        self._epoch = secrets.randbits(63)
        self._loop: LiveLoop | None = None
        self._endpoint: Future[WorkerEndpoint] = Future()
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)

    def start(self) -> WorkerEndpoint:
        """Build everything and serve; returns once sessions can be opened.

        Raises:
            ValueError: the configuration cannot be served; the message names the remedy.
            RuntimeError: the transfer process does not start.
        """
        self._thread.start()
        return self._endpoint.result()

    @property
    def epoch(self) -> int:
        """Random id of this worker incarnation."""
        return self._epoch

    def is_healthy(self) -> bool:
        """Whether the step loop turns."""
        return self._thread.is_alive() and self._loop is not None and self._loop.is_healthy()

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for running ones; returns whether they finished in time."""
        assert self._loop is not None, "start comes first"
        self._inbox.put(StartDrain())
        return self._loop.drained.wait(timeout_s)

    def stop(self) -> None:
        """Stop the loop, the service and the transfer process; running requests are dropped."""
        self._inbox.stop()
        self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        with ExitStack() as stack:
            try:
                loop, address = self._build(stack)
            except BaseException as error:
                self._endpoint.set_exception(error)
                return
            self._loop = loop
            config = self._config
            self._endpoint.set_result(
                WorkerEndpoint(worker_id=config.worker_id, role=config.role, address=address, epoch=self._epoch)
            )
            try:
                loop.run()
            except BaseException:
                _log.critical("the step loop of %s died", self._config.worker_id, exc_info=True)
                end_process()

    def _build(self, stack: ExitStack) -> tuple[LiveLoop, str]:
        """Assemble the worker on its loop's thread. ``stack`` tears it down in reverse order.

        Returns the loop, ready to run, and the ``host:port`` of the service.
        """
        config = self._config
        if config.cpu_cores:
            os.sched_setaffinity(0, config.cpu_cores)
        backend = choose_backend(config)
        memory = PoolMemory.create(backend.layout)
        stack.callback(memory.close)
        grammars = backend.grammars
        grammars.on_compiled = lambda grammar: self._inbox.put(GrammarCompiled(grammar))
        stack.callback(grammars.close)
        executor, staging, followers = backend.build_executor(memory)
        if followers is not None:
            stack.callback(followers.close)
        stack.callback(executor.close)
        transfer = self._start_transfer(memory, staging, backend.limits)
        stack.callback(transfer.close)
        # typeshed does not count a memoryview as a MutableSequence.
        generations = cast(MutableSequence[int], memory.generations)
        pool = BlockPool(backend.layout.num_blocks, config.block_size, generations)
        service = WorkerService(
            config,
            backend.limits,
            self._welcome(backend, transfer.address),
            self._inbox,
            is_healthy=self.is_healthy,
            announce=grammars.find,
        )
        loop = LiveLoop(
            scheduler=self._scheduler_factory(pool, backend, config),
            pool=pool,
            executor=executor,
            inbox=self._inbox,
            sink=service,
            send_order=transfer.send,
            times=StepTimes(backend.cost),
            grammars=grammars,
            emulated_pull_s=backend.emulated_pull_s,
        )
        address = service.start()
        stack.callback(service.stop)
        return loop, address

    def _start_transfer(
        self, memory: PoolMemory, staging: HostStaging | None, limits: ModelLimits
    ) -> TransferProcess | StagedTransfer:
        config = self._config

        def on_message(message: TransferToEngine) -> None:
            self._inbox.put(message_from_proto(message, limits))

        start = partial(
            TransferProcess.start,
            memory=memory,
            worker_epoch=self._epoch,
            host=config.host,
            cluster_token=config.cluster_token,
            tls=config.tls,
            transport=config.transport,
            cpu_cores=config.transfer_cpu_cores,
            on_death=lambda: self._inbox.stop("the transfer process died"),
        )
        if staging is None:
            return start(on_message=on_message)
        return StagedTransfer(
            staging, start, on_message, on_failure=lambda: self._inbox.stop("host staging of the KV pool died")
        )

    def _welcome(self, backend: Backend, kv_address: str) -> worker_pb2.Welcome:
        config = self._config
        return worker_pb2.Welcome(
            worker_id=config.worker_id,
            worker_epoch=self._epoch,
            role=config.role.value,
            kv_address=kv_address,
            model_hash=backend.layout.model_hash,
            max_model_len=backend.limits.max_model_len,
            block_size=config.block_size,
            num_blocks=backend.layout.num_blocks,
            max_batch_tokens=config.max_batch_tokens,
            max_batch_size=config.max_batch_size,
            hardware=backend.cost.hardware.name,
            tensor_parallel=config.tensor_parallel,
            dtype=config.precision.dtype,
            kv_dtype=config.precision.kv_dtype,
            quantization=config.precision.quantization,
        )
