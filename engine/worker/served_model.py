"""The model and device that a worker's configuration names, and what a step costs there. Never imports torch."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from pdserve.contracts.codec import from_json
from pdserve.contracts.step import ModelLimits
from pdserve.contracts.worker_config import WorkerConfig
from pdserve.kv_transfer.host_limits import usable_cores
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.config.sharding import Place
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.hardware import Hardware, hardware, slowed


def served_model(config: WorkerConfig) -> tuple[DecoderConfig, ModelLimits]:
    """The checkpoint's configuration at the worker's context length, and its limits."""
    model = DecoderConfig.from_folder(Path(config.model_path))
    limits = model.limits(config.max_model_len)
    return model.at_length(limits.max_model_len), limits


def device_of(config: WorkerConfig) -> Hardware:
    if config.hardware:
        return from_json(Hardware, config.hardware, "the worker's hardware")
    return hardware(config.emulate or "cpu", num_cores=len(cores_of_rank(config, 0)))


def cost_of(config: WorkerConfig, model: DecoderConfig) -> CostModel:
    return CostModel(
        model.shape,
        slowed(device_of(config), config.time_scale or 1.0),
        config.precision,
        config.tensor_parallel,
        config.pipeline_parallel,
        config.transport,
        expert_parallel=config.expert_parallel,
    )


def as_computed(config: WorkerConfig, is_on_host: bool) -> WorkerConfig:
    """The configuration with figures of the CPU if it has those of a GPU, and the worker computes on the CPU."""
    expects_gpu = not device_of(config).name.startswith("cpu")
    return replace(config, hardware="") if is_on_host and expects_gpu else config


def places_of(config: WorkerConfig) -> list[Place]:
    """What each rank of the worker has of the model."""
    degrees = config.tensor_parallel, config.pipeline_parallel, config.expert_parallel
    return [Place.of(rank, *degrees) for rank in range(config.num_ranks)]


def cores_of_rank(config: WorkerConfig, rank: int) -> tuple[int, ...]:
    """A rank's part of the worker's cores, in a contiguous run; with fewer cores than ranks each uses all."""
    cores = config.cpu_cores or usable_cores()
    if len(cores) < config.num_ranks:
        return cores
    return cores[rank * len(cores) // config.num_ranks : (rank + 1) * len(cores) // config.num_ranks]


def max_captured_rows(config: WorkerConfig, is_on_host: bool) -> int:
    """Captured steps are useless on a worker that never decodes and on a CPU."""
    return config.max_batch_size if config.may_decode and not is_on_host else 0


def configure_openmp(config: WorkerConfig) -> None:
    """Must run before torch is imported. Keeps what the operator has set."""
    if not config.cpu_cores:
        # Other workers may share these cores, and spinning OpenMP threads block each other for milliseconds.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
