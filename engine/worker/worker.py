"""One worker, assembled: KV memory, block pool, scheduler, executor, step loop, transfer process and gRPC service.

Used by `pdserve.engine.worker.process`. Everything is built on the step loop's thread, which is pinned to the worker's
cores before it imports torch.

A pipeline-parallel worker has as many *micro-batches* as stages, each with its share of the pool's blocks, and a
scheduler, executor, step loop, thread and service of its own: while one micro-batch's step is in the second stage, the
next one's is in the first. The router sees each as a worker. They share the KV memory and the transfer process.

The transfer process is never restarted alone. It holds the state of offered prompts and running pulls, so the worker
ends when it dies, and the supervisor starts both again under a new epoch.
"""

from __future__ import annotations

import itertools
import os
import secrets
import threading
import time
from collections.abc import MutableSequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

from pdserve.contracts.request import HANDLE_BYTES
from pdserve.contracts.step import Executor, ModelLimits
from pdserve.contracts.worker_config import WorkerConfig, WorkerEndpoint
from pdserve.decode_worker.swapping import swap_space
from pdserve.engine.scheduling.interface import PullResult
from pdserve.engine.scheduling.speculation import DRAFT_SHARE, NGRAM_SHARE, Speculation
from pdserve.engine.worker.backend import Backend, BuiltExecutors, choose_backend, end_worker
from pdserve.engine.worker.batches import scheduler_with
from pdserve.engine.worker.live_loop import Inbox, LiveLoop
from pdserve.engine.worker.messages import BlocksRestored, GrammarCompiled, LendPrefix, Message, StartDrain
from pdserve.engine.worker.service import WorkerService
from pdserve.engine.worker.staged_transfer import StagedTransfer
from pdserve.engine.worker.step_times import StepTimes
from pdserve.engine.worker.transfer_messages import message_from_proto
from pdserve.kv_transfer.block_pool import BlockPool
from pdserve.kv_transfer.file_tier import FileTier
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.kv_transfer.transfer_client import TransferProcess
from pdserve.model.weights.digest import model_digest
from pdserve.prefill_worker.restores import TierSpace
from pdserve.proto.v1 import worker_pb2
from pdserve.proto.v1.transfer_pb2 import TransferToEngine

STOP_TIMEOUT_S = 10.0


class _Shared(NamedTuple):
    """What the micro-batches of a worker share."""

    backend: Backend
    memory: PoolMemory
    transfer: TransferProcess | StagedTransfer
    stack: ExitStack
    """Tears the worker down."""


class EngineWorker:
    """A worker inside this process. Any thread may call its methods."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._inboxes = [Inbox() for _ in range(config.pipeline_parallel)]
        """One of each micro-batch."""
        self.epoch = secrets.randbits(63)
        """Random id of this worker incarnation."""
        self._loops: list[LiveLoop] = []
        self._endpoints: Future[list[WorkerEndpoint]] = Future()
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)

    def start(self) -> list[WorkerEndpoint]:
        """Build everything and serve; returns the endpoint of each micro-batch once sessions can be opened.

        Raises:
            ValueError: the configuration cannot be served; the message names the remedy.
            RuntimeError: the transfer process does not start.
        """
        self._thread.start()
        return self._endpoints.result()

    def is_healthy(self) -> bool:
        """Whether every step loop turns."""
        return self._thread.is_alive() and bool(self._loops) and all(loop.is_healthy() for loop in self._loops)

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for running ones; returns whether they finished in time."""
        assert self._loops, "start comes first"
        self._put_to_all(StartDrain())
        deadline_s = time.monotonic() + timeout_s
        return all(loop.drained.wait(deadline_s - time.monotonic()) for loop in self._loops)

    def stop(self) -> None:
        """Stop the loop, the service and the transfer process; running requests are dropped."""
        self._stop_loops()
        self._thread.join(STOP_TIMEOUT_S)

    def _stop_loops(self, failure: str = "") -> None:
        for inbox in self._inboxes:
            inbox.stop(failure)

    def _run(self) -> None:
        with ExitStack() as stack:
            try:
                loops, addresses = self._build(stack)
            except BaseException as error:
                self._endpoints.set_exception(error)
                return
            self._loops = loops
            threads = [
                threading.Thread(target=self._run_loop, args=(loop,), name=f"step-loop-{index}", daemon=True)
                for index, loop in enumerate(loops[1:], 1)
            ]
            for thread in threads:
                thread.start()
            role, epoch = self._config.role, self.epoch
            self._endpoints.set_result(
                [
                    WorkerEndpoint(worker_id=worker_id, role=role, address=address, epoch=epoch)
                    for worker_id, address in addresses.items()
                ]
            )
            self._run_loop(loops[0])
            for thread in threads:
                thread.join()

    def _run_loop(self, loop: LiveLoop) -> None:
        try:
            loop.run()
        except BaseException:
            end_worker(f"the step loop of {self._config.worker_id} died", exc_info=True)

    def _build(self, stack: ExitStack) -> tuple[list[LiveLoop], dict[str, str]]:
        """Assemble the worker on its loop's thread. ``stack`` tears it down in reverse order.

        Returns the loop of each micro-batch, ready to run, and by its id the ``host:port`` of its service.
        """
        config = self._config
        if config.cpu_cores:
            os.sched_setaffinity(0, config.cpu_cores)
        if config.model_digest and (found := model_digest(Path(config.model_path))) != config.model_digest:
            fault = "is not the one with which the cluster started" if found else "cannot be read"
            raise ValueError(f"the model in {config.model_path} {fault}; put that back, or start the cluster again")
        backend = choose_backend(config)
        memory = PoolMemory.create(backend.layout)
        stack.callback(memory.close)
        backend.grammars.on_compiled = lambda grammar: self._put_to_all(GrammarCompiled(grammar))
        stack.callback(backend.grammars.close)
        built = backend.build_executors(memory)
        if built.followers is not None:
            stack.callback(built.followers.close)
        for executor in built.executors:
            stack.callback(executor.close)
        transfer = self._start_transfer(memory, built, backend.limits)
        stack.callback(transfer.close)
        shared, loops, addresses = _Shared(backend, memory, transfer, stack), [], {}
        for index, executor in enumerate(built.executors):
            own = micro_batch_config(config, index)
            loop, service = self._build_loop(own, index, executor, shared)
            loops.append(loop)
            addresses[own.worker_id] = service.start()
            stack.callback(service.stop)
        return loops, addresses

    def _build_loop(
        self, config: WorkerConfig, index: int, executor: Executor, shared: _Shared
    ) -> tuple[LiveLoop, WorkerService]:
        """Build the loop and service of a micro-batch with its own ``config``."""
        backend, transfer = shared.backend, shared.transfer
        num_blocks = backend.layout.num_blocks // config.pipeline_parallel
        # typeshed does not count a memoryview as a MutableSequence.
        generations = cast(MutableSequence[int], shared.memory.generations)
        pool = BlockPool(num_blocks, config.block_size, generations, first_block=index * num_blocks)
        tier = self._build_tier(config, index, pool, shared)
        num_tier_blocks = 0 if tier is None else tier.num_slots
        service = WorkerService(
            config,
            backend.limits,
            self._welcome(config, backend, num_blocks, num_tier_blocks, transfer.address),
            self._inboxes[index],
            is_healthy=self.is_healthy,
            announce=backend.grammars.find,
        )
        times = StepTimes(backend.cost, backend.draft_cost)
        scheduler = scheduler_with(config.batching)(
            pool,
            backend.limits,
            mint_handle=lambda: secrets.token_bytes(HANDLE_BYTES),
            max_batch_tokens=config.max_batch_tokens,
            max_batch_size=config.max_batch_size,
            park_timeout_s=config.park_timeout_s,
            swap_space=swap_space(backend.cost, backend.num_swap_slots, config.max_batch_tokens),
            tier_space=TierSpace(
                tier=tier,
                compute_s=lambda num_tokens, num_cached: (
                    backend.cost.prompt_s(num_tokens, num_cached, config.max_batch_tokens) * times.prefill.factor
                ),
            ),
            mixed_s=times.mixed_s,
            speculation=speculation_of(config, times, plans_ahead=executor.pipeline_depth > 1),
            ids=itertools.count(index, config.pipeline_parallel),  # micro-batches share a transfer process
        )
        loop = LiveLoop(
            scheduler=scheduler,
            pool=pool,
            executor=executor,
            inbox=self._inboxes[index],
            sink=service,
            send_order=transfer.send,
            times=times,
            grammars=backend.grammars,
            emulated_pull_s=backend.emulated_pull_s,
            tier=tier,
        )
        return loop, service

    def _build_tier(self, config: WorkerConfig, index: int, pool: BlockPool, shared: _Shared) -> FileTier | None:
        if not config.kv_tier_path:
            return None
        tier = FileTier(
            Path(config.kv_tier_path) / f"{config.worker_id}.kv",
            shared.memory,
            pool,
            size_bytes=config.kv_tier_bytes,
            max_model_len=shared.backend.limits.max_model_len,
            secret=config.cluster_token,
            on_restored=lambda restore_id: self._inboxes[index].put(BlocksRestored(restore_id)),
        )
        tier.start(config.transfer_cpu_cores)
        shared.stack.callback(tier.close)
        return tier

    def _put_to_all(self, message: Message) -> None:
        for inbox in self._inboxes:
            inbox.put(message)

    def _received(self, message: Message) -> None:
        """Pass on a message of the transfer process. Only one micro-batch knows a handle; the others ignore it."""
        if isinstance(message, PullResult):
            self._inboxes[message.pull_id % len(self._inboxes)].put(message)
        elif isinstance(message, LendPrefix):  # routers name no pipelined worker: one inbox is all there are
            self._inboxes[0].put(message)
        else:
            self._put_to_all(message)

    def _start_transfer(
        self, memory: PoolMemory, built: BuiltExecutors, limits: ModelLimits
    ) -> TransferProcess | StagedTransfer:
        config = self._config

        def on_message(message: TransferToEngine) -> None:
            self._received(message_from_proto(message, limits))

        start = partial(
            TransferProcess.start,
            memory=memory,
            worker_epoch=self.epoch,
            host=config.host,
            ports=config.ports,
            cluster_token=config.cluster_token,
            tls=config.tls,
            transport="auto" if built.copies is not None else config.transport,  # where no group reaches
            cpu_cores=config.transfer_cpu_cores,
            on_death=lambda: self._stop_loops("the transfer process died"),
            device=built.copies.device if built.copies is not None else "",
            shards=built.copies.shards if built.copies is not None else (),
        )
        if built.staging is None:
            return start(on_message=on_message)
        on_failure = partial(self._stop_loops, "copies of KV blocks failed")
        return StagedTransfer(built.staging, start, on_message, on_failure, built.copies)

    def _welcome(
        self, config: WorkerConfig, backend: Backend, num_blocks: int, num_tier_blocks: int, kv_address: str
    ) -> worker_pb2.Welcome:
        return worker_pb2.Welcome(
            worker_id=config.worker_id,
            worker_epoch=self.epoch,
            kv_address=kv_address,
            model_hash=backend.layout.model_hash,
            max_model_len=backend.limits.max_model_len,
            block_size=config.block_size,
            num_blocks=num_blocks,
            num_tier_blocks=num_tier_blocks,
            max_batch_tokens=config.max_batch_tokens,
            max_batch_size=config.max_batch_size,
            hardware=backend.cost.hardware.name,
            tensor_parallel=config.tensor_parallel,
            pipeline_parallel=config.pipeline_parallel,
            products=backend.products,
            **asdict(config.precision),
        )


def speculation_of(config: WorkerConfig, times: StepTimes, *, plans_ahead: bool = False) -> Speculation | None:
    """What chooses the guesses of a worker's steps; ``None`` if it makes none. ``plans_ahead``: as `Speculation`'s."""
    if config.speculation == "none":
        return None
    first_share = DRAFT_SHARE if config.speculation == "draft" else NGRAM_SHARE
    return Speculation(times.by_guesses, first_share, plans_ahead=plans_ahead)


def micro_batch_config(config: WorkerConfig, index: int) -> WorkerConfig:
    """Configuration of one of a worker's micro-batches: the worker's own if it is the only one."""
    count = config.pipeline_parallel
    if count == 1:
        return config
    max_batch_size = max(1, config.max_batch_size // count)
    return replace(config, worker_id=f"{config.worker_id}.{index}", max_batch_size=max_batch_size)
