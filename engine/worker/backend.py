"""Executor of a worker: the real model on a CPU or a GPU, or an emulated GPU. Chosen once, at startup.

Runs on the step loop's thread, after that thread was pinned. Torch is imported for the real model only, after the
rest of the configuration was validated. Nothing large is allocated before the executor is built.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pdserve.contracts.codec import from_json
from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.step import Executor, ModelLimits
from pdserve.contracts.worker_config import DIRECT_TRANSPORTS, WorkerConfig
from pdserve.engine.worker.draft import Draft, read_draft
from pdserve.engine.worker.followers import (
    FollowerConfig,
    Followers,
    RanksCopies,
    RanksIpcCopies,
    RanksStaging,
    rank_cores,
)
from pdserve.engine.worker.grammars import Grammars
from pdserve.engine.worker.live_loop import stall_limit_s
from pdserve.engine.worker.pool_size import check_pool_fits, check_staging_fits, num_kv_blocks, num_swap_slots
from pdserve.kv_transfer.pool_memory import PoolMemory, available_memory_bytes
from pdserve.kv_transfer.resharding import KvShard
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.config.model_hash import model_hash
from pdserve.model.config.quantisation import served_scheme
from pdserve.model.config.sharding import Place, check_groups, shard_of
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.hardware import Hardware, hardware, slowed
from pdserve.model.cost.stage import Stage
from pdserve.model.executors.drafting import Drafter, NgramDrafter
from pdserve.model.executors.emulated import EmulatedExecutor
from pdserve.model.sampling.grammars import GrammarMatchers
from pdserve.model.weights.files import check_weights

if TYPE_CHECKING:  # they import torch
    import torch

    from pdserve.kernels.cpu.ranks import RankMemory
    from pdserve.kernels.kv_pool import KvPool
    from pdserve.kv_transfer.group_copies import GroupCopies
    from pdserve.kv_transfer.host_staging import HostStaging, Staging
    from pdserve.kv_transfer.ipc_copies import IpcCopies
    from pdserve.model.decoder.ranks import Ranks
    from pdserve.model.executors.rank_model import RankModel

MIN_RANK_WAIT_S = 30.0

_log = logging.getLogger(__name__)


class BuiltExecutors(NamedTuple):
    executors: list[Executor]
    """One of each micro-batch."""
    staging: Staging | None = None
    """Copies blocks between a GPU pool and the memory the transfer process maps; ``None`` on a CPU."""
    followers: Followers | None = None
    """Other ranks, to close after the executors."""
    copies: GroupCopies | RanksCopies | RanksIpcCopies | None = None
    """Copies blocks between the GPU pools of two workers, where that is possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """Executors of a worker and the dimensions of its pool, which micro-batches divide among them."""

    limits: ModelLimits
    layout: KvLayout
    cost: CostModel
    draft_cost: CostModel | None
    """Of the draft model, if there is one."""
    num_swap_slots: int
    """Host slots of each micro-batch for KV blocks of preempted sequences."""
    grammars: Grammars
    build_executors: Callable[[PoolMemory], BuiltExecutors]
    """Takes the memory mapped by the transfer process."""
    products: str = ""
    """Dtype in which a CPU multiplies activations and weights; empty where no CPU does."""
    emulated_pull_s: Callable[[int], float] | None = None
    """Minimum duration of a pull of this many blocks, in seconds; ``None`` when nothing is emulated."""


def choose_backend(config: WorkerConfig) -> Backend:
    """Choose the executor. Raises ValueError with the remedy if the model cannot be served with this configuration."""
    return _emulated_backend(config) if config.emulate else _model_backend(config)


def _model_backend(config: WorkerConfig) -> Backend:
    """Serve the checkpoint on this host's CPU or on a GPU."""
    folder = Path(config.model_path)
    model, limits = _model(config)
    _cost(config, model)  # raises what is wrong before torch is imported
    scheme = served_scheme(config.precision.quantization, model.shape.scheme)
    check_groups(model.shape, scheme, config.tensor_parallel, expert_parallel=config.expert_parallel)
    check_weights(folder, model.shape)
    draft = read_draft(config, model)
    content_hash = model_hash(folder, f"{model.layers} {config.precision.dtype} {scheme}")
    _configure_openmp(config)

    from pdserve.engine.worker.model_device import (
        build_copies,
        build_pool,
        check_kv_dtype,
        choose_device,
        is_in_host_memory,
        kv_memory_of,
    )
    from pdserve.kernels.cpu.threads import use_cores
    from pdserve.model.decoder.ranks import ONE_RANK
    from pdserve.model.executors.model import ModelExecutor
    from pdserve.model.weights.decoder_weights import products_of

    device = choose_device(config)
    is_on_host = is_in_host_memory(device)
    cost = _cost(_as_computed(config, is_on_host), model)
    num_ranks = config.tensor_parallel * config.pipeline_parallel
    _check_ranks(config, is_on_host)
    _check_transport(config, is_on_host)
    _check_speculation(config, is_on_host)
    _check_tier(config, is_on_host)
    check_kv_dtype(device, cost.kv_dtype)
    draft_bytes = 0 if draft is None else draft.cost.weight_bytes
    memory = kv_memory_of(device, config, cost, max(0, available_memory_bytes() - draft_bytes))
    block_bytes = cost.kv_bytes_per_token * config.block_size
    held_bytes = block_bytes + (0 if draft is None else draft.cost.kv_bytes_per_token * config.block_size)
    num_blocks = num_kv_blocks(config, limits, held_bytes, memory.auto_bytes)
    check_pool_fits(num_blocks * held_bytes, memory.max_bytes)
    if not is_on_host:
        check_staging_fits(num_blocks * held_bytes, memory.host_bytes)
    swap_bytes = memory.host_bytes - num_blocks * held_bytes
    # Ranks with pools of their own swap what they hold, and several may hold the same KV heads.
    slot_bytes = block_bytes if is_on_host else int(cost.rank_kv_bytes_per_token * config.block_size) * num_ranks
    num_slots = num_swap_slots(config, num_blocks, slot_bytes, swap_bytes) // config.pipeline_parallel
    layout = model.kv_layout(num_blocks, config.block_size, cost.kv_dtype, content_hash)
    grammars = Grammars(folder, limits, config.transfer_cpu_cores)

    def build_executors(memory: PoolMemory) -> BuiltExecutors:
        followers, ranks = None, ONE_RANK
        if num_ranks > 1:
            followers = Followers(
                config,
                memory,
                _create_shared_file(config, model, is_on_host),
                on_loss=_end_worker,
                num_swap_slots=0 if is_on_host else num_slots,
            )
            ranks = _ranks(config, model, device, followers.shared_fd, 0)
        if is_on_host:
            use_cores(_rank_cores(config, 0))
        shards = _kv_shards(config, model)
        pool = build_pool(device, memory, shards[0])
        executor = ModelExecutor(
            folder=folder,
            config=model,
            layout=layout,
            pool=pool,
            precision=config.precision,
            num_swap_slots=num_slots,
            max_captured_rows=_max_captured_rows(config, is_on_host),
            matchers=_matchers(grammars, limits),
            drafter=_drafter(config) if draft is None else _draft_model(config, draft, layout, limits),
            ranks=ranks,
            send=None if followers is None else followers.send,
        )
        if followers is not None:
            followers.wait_until_ready()
            ranks.limit_waits(_longest_wait_s(config, cost, layout))
        if is_on_host and config.core_board and followers is None:
            return BuiltExecutors([_lending_cores(executor, config)])
        others = range(1, config.pipeline_parallel)
        more = [executor.for_micro_batch(number, _matchers(grammars, limits), _drafter(config)) for number in others]
        if is_on_host:
            return BuiltExecutors([executor, *more], followers=followers)
        staging = _staging(pool, memory, shards[0], followers)
        copies = build_copies(config, pool.blocks, memory, shards)
        return BuiltExecutors([executor, *more], staging, followers, _copies_of_ranks(copies, followers))

    return Backend(
        limits=limits,
        layout=layout,
        cost=cost,
        draft_cost=None if draft is None else draft.cost,
        num_swap_slots=num_slots,
        grammars=grammars,
        build_executors=build_executors,
        products=products_of(config.precision) if is_on_host else "",
    )


def _matchers(grammars: Grammars, limits: ModelLimits) -> GrammarMatchers:
    return GrammarMatchers(grammars.compiled, vocab_size=limits.vocab_size, eos_token_ids=limits.eos_token_ids)


def _drafter(config: WorkerConfig) -> Drafter | None:
    return NgramDrafter() if config.speculation == "ngram" else None


def _draft_model(config: WorkerConfig, draft: Draft, layout: KvLayout, limits: ModelLimits) -> Drafter:
    from pdserve.model.executors.draft_model import DraftModel

    return DraftModel(
        folder=draft.folder,
        config=draft.config,
        layout=draft.config.kv_layout(layout.num_blocks, layout.block_size, draft.cost.kv_dtype, layout.model_hash),
        precision=draft.precision,
        vocab_size=limits.vocab_size,
        max_batch_tokens=config.max_batch_tokens,
    )


def _model(config: WorkerConfig) -> tuple[DecoderConfig, ModelLimits]:
    """The checkpoint's configuration at the worker's context length, and its limits."""
    model = DecoderConfig.from_folder(Path(config.model_path))
    limits = model.limits(config.max_model_len)
    return model.at_length(limits.max_model_len), limits


def _as_computed(config: WorkerConfig, is_on_host: bool) -> WorkerConfig:
    """The configuration with figures of the CPU if it has those of a GPU, and the worker computes on the CPU."""
    expects_gpu = not _device(config).name.startswith("cpu")
    return replace(config, hardware="") if is_on_host and expects_gpu else config


def _cost(config: WorkerConfig, model: DecoderConfig) -> CostModel:
    return _cost_on(_device(config), config, model)


def _cost_on(device: Hardware, config: WorkerConfig, model: DecoderConfig) -> CostModel:
    return CostModel(
        model.shape,
        device,
        config.precision,
        config.tensor_parallel,
        config.pipeline_parallel,
        config.transport,
        expert_parallel=config.expert_parallel,
    )


def _check_ranks(config: WorkerConfig, is_on_host: bool) -> None:
    """Raise ValueError if ranks of this worker cannot share a model."""
    from pdserve.kernels.cpu.build import load_library

    if config.tensor_parallel * config.pipeline_parallel > 1 and is_on_host and load_library() is None:
        raise ValueError(
            f"tensor_parallel is {config.tensor_parallel} and pipeline_parallel {config.pipeline_parallel}, which "
            "needs compiled kernels: install g++, or set both to 1"
        )


def _check_transport(config: WorkerConfig, is_on_host: bool) -> None:
    """Raise ValueError if the worker's transport is impossible for a pool in host memory, or in that of GPUs."""
    if config.transport in DIRECT_TRANSPORTS and is_on_host:
        raise ValueError(
            f"kv_transfer.transport is {config.transport}, which copies KV between GPUs, and there is none: use auto"
        )
    settings = [os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")]
    if config.transport == "cuda_ipc" and any("expandable_segments:True" in each for each in settings):
        raise ValueError(
            "kv_transfer.transport is cuda_ipc, and other processes may not open memory in expandable segments: remove "
            "expandable_segments from PYTORCH_CUDA_ALLOC_CONF, or use auto"
        )


def _check_tier(config: WorkerConfig, is_on_host: bool) -> None:
    """Raise ValueError where the worker's pool can have no tier below it."""
    if config.kv_tier_path and (not is_on_host or config.pipeline_parallel > 1):
        where = "pipelines have" if is_on_host else "GPUs, emulated ones too, have"
        raise ValueError(f"{config.role.value}.kv_tier is set, and {where} no tier so far: leave it out")


def _check_speculation(config: WorkerConfig, is_on_host: bool) -> None:
    """Raise ValueError on a GPU, where a step is planned before the tokens that its guesses would follow are known."""
    if config.speculation != "none" and not is_on_host:
        raise ValueError(
            f"{config.role.value}.speculation is {config.speculation}, and guesses are made on CPUs only so far: "
            "set it to none"
        )


def _max_captured_rows(config: WorkerConfig, is_on_host: bool) -> int:
    """Captured steps are useless on a worker that never decodes and on a CPU."""
    return config.max_batch_size if config.may_decode and not is_on_host else 0


def _staging(pool: KvPool, memory: PoolMemory, shard: KvShard, followers: Followers | None) -> Staging:
    from pdserve.kv_transfer.host_staging import HostStaging

    own = HostStaging(pool.blocks, memory, shard)
    return own if followers is None else RanksStaging(own, followers)


def _kv_shards(config: WorkerConfig, model: DecoderConfig) -> list[KvShard]:
    """Part of every block that each rank holds, in a pool of its own."""
    num_ranks = config.tensor_parallel * config.pipeline_parallel
    places = (_place(config, rank) for rank in range(num_ranks))
    return [KvShard(shard.kv_heads, shard.layers) for shard in (shard_of(model.shape, place) for place in places)]


def _place(config: WorkerConfig, rank: int) -> Place:
    return Place.of(rank, config.tensor_parallel, config.pipeline_parallel, config.expert_parallel)


def _copies_of_ranks(
    own: GroupCopies | IpcCopies | None, followers: Followers | None
) -> GroupCopies | RanksCopies | RanksIpcCopies | None:
    """Copies of all ranks; ``own`` are the leader's."""
    from pdserve.kv_transfer.ipc_copies import IpcCopies

    if isinstance(own, IpcCopies):
        return RanksIpcCopies(own, followers)
    return own if own is None or followers is None else RanksCopies(own, followers)


def _rank_cores(config: WorkerConfig, rank: int) -> tuple[int, ...]:
    cores = config.cpu_cores or sorted(os.sched_getaffinity(0))
    return rank_cores(cores, rank, config.tensor_parallel * config.pipeline_parallel)


def _rank_memory(config: WorkerConfig, model: DecoderConfig) -> RankMemory:
    """Memory of the worker's ranks, with room for the activations of the largest step."""
    from pdserve.kernels.cpu.ranks import RankMemory

    message_bytes = (config.max_batch_tokens + config.max_batch_size) * model.shape.hidden_size * 4  # float32
    return RankMemory(config.tensor_parallel, config.pipeline_parallel, message_bytes)


def _create_shared_file(config: WorkerConfig, model: DecoderConfig, is_on_host: bool) -> int:
    """Create the file of `_ranks`; returns its descriptor."""
    from pdserve.kernels.torch.ranks import create_meeting_file

    return _rank_memory(config, model).create() if is_on_host else create_meeting_file()


def _ranks(config: WorkerConfig, model: DecoderConfig, device: torch.device, shared_fd: int, rank: int) -> Ranks:
    """The ranks as ``rank`` sees them, which exchange tensors through memory or between their devices."""
    from pdserve.engine.worker.model_device import is_in_host_memory
    from pdserve.model.decoder.ranks import Ranks, ranks_of_devices

    place = _place(config, rank)
    if not is_in_host_memory(device):
        if config.transport == "nccl":
            # NCCL takes one interface for all groups of a process, and links reach other hosts: not the loopback.
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "")
        return ranks_of_devices(place, shared_fd, device)
    memory = _rank_memory(config, model)
    return Ranks(
        place,
        memory.group(shared_fd, place.stage, place.tensor_rank) if config.tensor_parallel > 1 else None,
        partial(memory.channels, shared_fd) if config.pipeline_parallel > 1 else None,
    )


def _longest_wait_s(config: WorkerConfig, cost: CostModel, layout: KvLayout) -> float:
    """Seconds of a rank's wait for another after which a step hangs, whatever the step. One that has ended is found by
    its pulse; the other may compile a kernel or load a library."""
    num_cached = layout.num_blocks * config.block_size
    step_s = cost.mixed_s(config.max_batch_tokens, num_cached, config.max_batch_size, num_cached)
    return max(MIN_RANK_WAIT_S, stall_limit_s(step_s))


def build_follower(
    follower: FollowerConfig, memory: PoolMemory, shared_fd: int
) -> tuple[RankModel, HostStaging | None, GroupCopies | IpcCopies | None]:
    """Build the model of a rank other than the leader, and on a GPU the copies of its pool.

    Args:
        memory: the worker's pool, or its staging file.
        shared_fd: inherited from the leader.

    Raises:
        ValueError: the rank's GPU has no room for its share.
    """
    config, rank = follower.worker, follower.rank
    _configure_openmp(config)

    import torch

    from pdserve.engine.worker.model_device import (
        build_copies,
        build_pool,
        choose_device,
        is_in_host_memory,
        kv_memory_of,
    )
    from pdserve.kernels.cpu.threads import use_cores
    from pdserve.kv_transfer.host_staging import HostStaging
    from pdserve.model.executors.rank_model import RankModel

    model, _ = _model(config)
    device = choose_device(config, rank)
    is_on_host = is_in_host_memory(device)
    cost = _cost(_as_computed(config, is_on_host), model)
    if is_on_host:
        use_cores(_rank_cores(config, rank))
    else:
        memory_of_gpu = kv_memory_of(device, config, cost, available_memory_bytes())
        check_pool_fits(memory.layout.pool_bytes, memory_of_gpu.max_bytes)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ranks = _ranks(config, model, device, shared_fd, rank)
    shards = _kv_shards(config, model)
    pool = build_pool(device, memory, shards[rank])
    rank_model = RankModel(
        folder=Path(config.model_path),
        config=model,
        layout=memory.layout,
        pool=pool,
        precision=config.precision,
        num_swap_slots=follower.num_swap_slots,
        max_captured_rows=_max_captured_rows(config, is_on_host),
        ranks=ranks,
    )
    ranks.limit_waits(_longest_wait_s(config, cost, memory.layout))
    if is_on_host:
        return rank_model, None, None
    copies = build_copies(config, pool.blocks, memory, shards, rank)
    return rank_model, HostStaging(pool.blocks, memory, shards[rank]), copies


def _end_worker(reason: str) -> None:
    _log.critical("the worker ends: %s", reason)
    logging.shutdown()
    os._exit(1)


def _lending_cores(executor: Executor, config: WorkerConfig) -> Executor:
    from pdserve.model.executors.core_sharing import CoreBoard, CoreSharingExecutor

    return CoreSharingExecutor(executor, CoreBoard(Path(config.core_board), config.core_index, config.core_sets))


def _emulated_backend(config: WorkerConfig) -> Backend:
    """Emulate a GPU: its step times, its transfer times, and as many blocks as its memory would hold."""
    _check_transport(config, is_on_host=True)
    _check_speculation(config, _device(config).is_host)
    _check_tier(config, is_on_host=False)
    model = DecoderConfig.from_folder(Path(config.model_path))
    read_draft(config, model)  # refuses one
    limits = model.limits(config.max_model_len)
    is_instant = config.time_scale == 0
    cost = _cost_on(_device(config) if is_instant else slowed(_device(config), config.time_scale), config, model)
    max_blocks = cost.max_kv_blocks(
        config.block_size, max_batch_tokens=config.max_batch_tokens, max_batch_size=config.max_batch_size
    )
    if max_blocks == 0:
        raise ValueError(
            f"the model's {cost.weight_bytes} bytes of weights leave no memory for KV on "
            f"{config.tensor_parallel * config.pipeline_parallel} x {cost.hardware.name}: "
            f"emulate a larger GPU or serve a smaller model"
        )
    block_bytes = cost.kv_bytes_per_token * config.block_size
    layout = KvLayout(
        num_blocks=num_kv_blocks(config, limits, block_bytes, max_blocks * block_bytes),
        num_kv_heads=1,
        num_layers=1,
        block_size=config.block_size,
        head_dim=1,
        dtype="uint64",
        model_hash=f"emulated-{blake2b(repr(model).encode(), digest_size=16).hexdigest()}",
    )

    grammars = Grammars(Path(config.model_path), limits, config.transfer_cpu_cores)
    # The emulated host has all the memory requested.
    num_slots = num_swap_slots(config, layout.num_blocks, block_bytes, sys.maxsize) // config.pipeline_parallel

    def build_executors(memory: PoolMemory) -> BuiltExecutors:
        stage = Stage(config.pipeline_parallel)
        executors: list[Executor] = [
            EmulatedExecutor(
                layout=layout,
                pool=memory.blocks,
                vocab_size=limits.vocab_size,
                eos_token_ids=limits.eos_token_ids,
                cost=cost,
                time_scale=0.0 if is_instant else 1.0,
                pipeline_depth=cost.pipeline_depth,
                stage=stage,
                num_swap_slots=num_slots,
                # In real time the step's CPU time counts; the last cached token is checked anyway.
                check_context=is_instant,
                matchers=_matchers(grammars, limits),
                drafter=_drafter(config),
            )
            for _ in range(config.pipeline_parallel)
        ]
        return BuiltExecutors(executors)

    def emulated_pull_s(num_blocks: int) -> float:
        return 0.0 if is_instant else cost.transfer_s(num_blocks * config.block_size, same_host=True)

    return Backend(
        limits=limits,
        layout=layout,
        cost=cost,
        draft_cost=None,
        num_swap_slots=num_slots,
        grammars=grammars,
        build_executors=build_executors,
        emulated_pull_s=emulated_pull_s,
    )


def _device(config: WorkerConfig) -> Hardware:
    if config.hardware:
        return from_json(Hardware, config.hardware, "the worker's hardware")
    return hardware(config.emulate or "cpu", num_cores=len(_rank_cores(config, 0)))


def _configure_openmp(config: WorkerConfig) -> None:
    """Must run before torch is imported. Keeps what the operator has set."""
    if not config.cpu_cores:
        # Other workers may share these cores, and spinning OpenMP threads block each other for milliseconds.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
