"""Executor of a worker: the real model on a CPU or a GPU, or an emulated GPU. Chosen once, at startup.

Runs on the step loop's thread, after that thread was pinned. Torch is imported for the real model only, after the
rest of the configuration was validated. Nothing large is allocated before the executor is built.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.step import Executor, ModelLimits
from pdserve.contracts.worker_config import DIRECT_TRANSPORTS, WorkerConfig
from pdserve.engine.worker.draft import Draft, read_draft
from pdserve.engine.worker.followers import (
    Followers,
    RanksCopies,
    RanksIpcCopies,
    RanksStaging,
)
from pdserve.engine.worker.grammars import Grammars
from pdserve.engine.worker.pool_size import check_pool_fits, check_staging_fits, num_kv_blocks, num_swap_slots
from pdserve.engine.worker.ranks import (
    check_ranks,
    copies_of_ranks,
    create_shared_file,
    kv_shards,
    longest_wait_s,
    ranks_of,
)
from pdserve.engine.worker.served_model import (
    as_computed,
    configure_openmp,
    cores_of_rank,
    cost_of,
    device_of,
    max_captured_rows,
    served_model,
)
from pdserve.kv_transfer.host_limits import available_memory_bytes
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.kv_transfer.resharding import KvShard
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.config.model_hash import model_hash
from pdserve.model.config.quantisation import served_scheme
from pdserve.model.config.sharding import check_groups
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.stage import Stage
from pdserve.model.executors.drafting import Drafter, NgramDrafter
from pdserve.model.executors.emulated import EmulatedExecutor
from pdserve.model.sampling.grammars import GrammarMatchers
from pdserve.model.weights.files import check_weights

if TYPE_CHECKING:  # they import torch
    from pdserve.kernels.kv_pool import KvPool
    from pdserve.kv_transfer.group_copies import GroupCopies
    from pdserve.kv_transfer.host_staging import Staging

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
    num_swap_slots: int
    """Host slots of each micro-batch for KV blocks of preempted sequences."""
    grammars: Grammars
    build_executors: Callable[[PoolMemory], BuiltExecutors]
    """Takes the memory mapped by the transfer process."""
    draft_cost: CostModel | None = None
    """Of the draft model, if there is one."""
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
    model, limits = served_model(config)
    cost_of(config, model)  # raises what is wrong before torch is imported
    scheme = served_scheme(config.precision.quantization, model.shape.scheme)
    check_groups(model.shape, scheme, config.tensor_parallel, expert_parallel=config.expert_parallel)
    check_weights(folder, model.shape)
    draft = read_draft(config, model)
    content_hash = model_hash(folder, f"{model.layers} {config.precision.dtype} {scheme}")
    configure_openmp(config)

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
    cost = cost_of(as_computed(config, is_on_host), model)
    check_ranks(config, is_on_host)
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
    slot_bytes = block_bytes if is_on_host else int(cost.rank_kv_bytes_per_token * config.block_size) * config.num_ranks
    num_slots = num_swap_slots(config, num_blocks, slot_bytes, swap_bytes) // config.pipeline_parallel
    layout = model.kv_layout(num_blocks, config.block_size, cost.kv_dtype, content_hash)
    grammars = Grammars(folder, limits, config.transfer_cpu_cores)

    def build_executors(memory: PoolMemory) -> BuiltExecutors:
        followers, ranks = None, ONE_RANK
        if config.num_ranks > 1:
            followers = Followers(
                config,
                memory,
                create_shared_file(config, model, is_on_host),
                on_loss=end_worker,
                num_swap_slots=0 if is_on_host else num_slots,
            )
            ranks = ranks_of(config, model, device, followers.shared_fd, 0)
        if is_on_host:
            use_cores(cores_of_rank(config, 0))
        shards = kv_shards(config, model)
        pool = build_pool(device, memory, shards[0])
        executor = ModelExecutor(
            folder=folder,
            config=model,
            layout=layout,
            pool=pool,
            precision=config.precision,
            num_swap_slots=num_slots,
            max_captured_rows=max_captured_rows(config, is_on_host),
            matchers=_matchers(grammars, limits),
            drafter=_drafter(config) if draft is None else _draft_model(config, draft, layout, limits),
            ranks=ranks,
            send=None if followers is None else followers.send,
        )
        if followers is not None:
            followers.wait_until_ready()
            ranks.limit_waits(longest_wait_s(config, cost, layout))
        if is_on_host and config.core_board and followers is None:
            return BuiltExecutors([_lending_cores(executor, config)])
        others = range(1, config.pipeline_parallel)
        more = [executor.for_micro_batch(number, _matchers(grammars, limits), _drafter(config)) for number in others]
        if is_on_host:
            return BuiltExecutors([executor, *more], followers=followers)
        staging = _staging(pool, memory, shards[0], followers)
        copies = build_copies(config, pool.blocks, memory, shards)
        return BuiltExecutors([executor, *more], staging, followers, copies_of_ranks(copies, followers))

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
    """Raise ValueError for a draft model on a GPU."""
    if config.speculation == "draft" and not is_on_host:
        raise ValueError(
            f"{config.role.value}.speculation has a draft model, which guesses on CPUs only so far: use ngram or none"
        )


def _staging(pool: KvPool, memory: PoolMemory, shard: KvShard, followers: Followers | None) -> Staging:
    from pdserve.kv_transfer.host_staging import HostStaging

    own = HostStaging(pool.blocks, memory, shard)
    return own if followers is None else RanksStaging(own, followers)


def end_worker(reason: str, *, exc_info: bool = False) -> None:
    """End this process: the most reliable signal that the worker cannot go on."""
    _log.critical("the worker ends: %s", reason, exc_info=exc_info)
    logging.shutdown()
    os._exit(1)


def _lending_cores(executor: Executor, config: WorkerConfig) -> Executor:
    from pdserve.model.executors.core_sharing import CoreBoard, CoreSharingExecutor

    return CoreSharingExecutor(executor, CoreBoard(Path(config.core_board), config.core_index, config.core_sets))


def _emulated_backend(config: WorkerConfig) -> Backend:
    """Emulate a GPU: its step times, its transfer times, and as many blocks as its memory would hold."""
    _check_transport(config, is_on_host=True)
    _check_speculation(config, device_of(config).is_host)
    _check_tier(config, is_on_host=False)
    model = DecoderConfig.from_folder(Path(config.model_path))
    read_draft(config, model)  # refuses one
    limits = model.limits(config.max_model_len)
    is_instant = config.time_scale == 0
    cost = cost_of(config, model)
    batch = {"max_batch_tokens": config.max_batch_tokens, "max_batch_size": config.max_batch_size}
    max_blocks = cost.max_kv_blocks(config.block_size, config.gpu_memory_utilization, **batch)
    if max_blocks == 0:
        raise ValueError(
            f"the model's {cost.weight_bytes} bytes of weights leave no memory for KV on "
            f"{config.num_ranks} x {cost.hardware.name}: "
            "raise gpu_memory_utilization, emulate a larger GPU or serve a smaller model"
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
    if not cost.hardware.is_host:
        most_blocks = cost.max_kv_blocks(config.block_size, 1.0, **batch)
        check_pool_fits(layout.num_blocks * block_bytes, most_blocks * block_bytes)

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
        num_swap_slots=num_slots,
        grammars=grammars,
        build_executors=build_executors,
        emulated_pull_s=emulated_pull_s,
    )
