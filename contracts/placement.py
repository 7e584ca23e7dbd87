"""The configuration of one worker process, and its endpoint once it is up. Both travel as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from pdserve.contracts.precision import Precision

DEVICE_SETTINGS = ("auto", "cpu", "cuda")
"""Values of `WorkerConfig.device`."""


class WorkerRole(Enum):
    """Which phases a worker serves. A decode worker can also prefill locally when the policy asks it to."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    __hash__ = object.__hash__  # the router looks up models by role for every worker of every request


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Everything a worker process needs; nothing is read from the environment."""

    worker_id: str
    """Stable name, such as ``prefill-0``; a restarted worker keeps it and takes a new epoch."""
    role: WorkerRole
    model_path: str
    precision: Precision = field(default_factory=Precision)
    tensor_parallel: int = 1
    """Ranks that share every layer. More than one are emulated only, as yet."""
    device: str = "auto"
    """Where weights and KV pool lie: ``cpu``, ``cuda``, which is the first GPU that ``CUDA_VISIBLE_DEVICES`` shows, or
    ``auto``, which is ``cuda`` where torch sees one."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory that weights, activations and an automatic KV pool take together."""
    max_model_len: int = 0
    """0 takes the checkpoint's own limit."""
    block_size: int = 16
    num_kv_blocks: int = 0
    """0 sizes the pool from ``kv_memory_bytes``."""
    kv_memory_bytes: int = 0
    """0 takes an automatic share of free memory."""
    swap_memory_bytes: int | None = None
    """Host memory for the KV of preempted sequences; ``None`` takes a share of the pool's size."""
    max_batch_tokens: int = 2048
    max_batch_size: int = 256
    transport: str = "auto"
    """``auto``, ``memfd`` or ``grpc``."""
    host: str = "127.0.0.1"
    """Address to listen on and to be reached at; ports are picked by the system and reported."""
    cluster_token: str = ""
    """Bearer token that every gRPC call between cluster members carries; empty checks nothing."""
    cpu_cores: tuple[int, ...] = ()
    """Cores to pin to before torch is imported; empty leaves the affinity alone."""
    core_board: str = ""
    """File on which the workers of this host lend each other the cores of idle ones; empty lends nothing."""
    core_index: int = 0
    """This worker's entry in ``core_sets``."""
    core_sets: tuple[tuple[int, ...], ...] = ()
    """``cpu_cores`` of every worker on the board, in the order of `core_index`; empty for one that lends nothing."""
    transfer_cpu_cores: tuple[int, ...] = ()
    """Cores of the transfer process; empty leaves its affinity alone."""
    emulate: str = ""
    """Name of a GPU in the hardware catalogue to emulate instead of computing; empty runs the model."""
    hardware: str = ""
    """The device that this computes on, or emulates: a `pdserve.model.cost.hardware.Hardware` as JSON; empty looks it
    up in the catalogue."""
    time_scale: float = 1.0
    """Emulated seconds are stretched by this factor."""
    park_timeout_s: float = 30.0
    """A parked prompt that nobody pulls is freed after this long."""
    session_grace_s: float = 3.0
    """A router whose stream is broken for this long has its requests cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEndpoint:
    """A running worker, as the supervisor reports it to the router."""

    worker_id: str
    role: WorkerRole
    address: str
    """``host:port`` of the worker's gRPC service."""
    epoch: int
    """Random number of this incarnation."""
