"""The configuration of one worker process, and its endpoint once it is up. Both travel as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from pdserve.contracts.codec import between, one_of
from pdserve.contracts.precision import Precision

DEVICE_SETTINGS = ("auto", "cpu", "cuda")
"""Values of `WorkerConfig.device`."""

DIRECT_TRANSPORTS = ("nccl", "cuda_ipc")
"""Transports of KV from GPU to GPU: a process group of two engines, and a copy from the pool of a worker on this host.
`auto` takes neither."""

TRANSPORTS = ("memfd", "tcp", *DIRECT_TRANSPORTS)
"""Transports of KV: a copy within a host, a TCP connection, and those from GPU to GPU. `WorkerConfig.transport` is one
of them or ``auto``."""

SPECULATIONS = ("none", "ngram", "draft")
"""Values of `WorkerConfig.speculation`: no guesses, that a text goes on as it did after its last tokens before, or that
it goes on as a smaller model would write it."""


class WorkerRole(Enum):
    """Phases that a worker serves. A decode worker also prefills locally if the policy requests it."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    __hash__ = object.__hash__  # the router looks models up by role for every worker and request


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files at the same paths on every host. Each side of a connection shows its certificate, issued by ``ca`` for
    the name ``pdserve``."""

    ca: str
    certificate: str
    key: str
    """Private key of ``certificate``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Complete configuration of a worker process, which reads nothing from the environment."""

    worker_id: str
    """Stable name, such as ``prefill-0``; a restarted worker keeps it and gets a new epoch."""
    role: WorkerRole
    """At its start; routers are told of another one later."""
    model_path: str
    model_digest: str = ""
    """Digest that the folder must have; empty takes any model."""
    may_decode: bool = True
    """Whether it keeps the memory that decoding needs; False for workers on GPUs that never decode."""
    precision: Precision = field(default_factory=Precision)
    tensor_parallel: int = 1
    """Ranks that share every layer, on GPUs each on one of its own."""
    pipeline_parallel: int = 1
    """Stages that share the layers, on GPUs each rank of each on one of its own. The worker has as many micro-batches,
    each a worker of its own for the router; blocks, batch slots and swap memory are divided among them."""
    expert_parallel: bool = False
    """Ranks that share a layer have whole experts, not a part of each."""
    device: Annotated[str, one_of(*DEVICE_SETTINGS)] = "auto"
    """Device of weights and KV pool: ``cpu``, ``cuda`` (of the GPUs that ``CUDA_VISIBLE_DEVICES`` shows, the first for
    each rank), or ``auto`` (``cuda`` if torch finds a GPU)."""
    gpu_memory_utilization: float = 0.9
    """Share of GPU memory for weights, activations and an automatic KV pool together."""
    max_model_len: int = 0
    """0 takes the checkpoint's limit."""
    block_size: Annotated[int, between(1, 256)] = 16
    num_kv_blocks: int = 0
    """0 sizes the pool from ``kv_memory_bytes``."""
    kv_memory_bytes: int = 0
    """0 takes an automatic share of free memory."""
    swap_memory_bytes: int | None = None
    """Host memory for the KV of preempted sequences; ``None`` takes a share of the pool's size."""
    kv_tier_path: str = ""
    """Folder of the file that keeps copies of cached KV blocks; empty keeps none."""
    kv_tier_bytes: int = 0
    """Size of that file."""
    num_host_workers: Annotated[int, between(1, 2**16)] = 1
    """Workers of its host, itself included, which divide the memory for automatic pools."""
    max_batch_tokens: Annotated[int, between(1, 2**20)] = 2048
    max_batch_size: Annotated[int, between(1, 2**16)] = 256
    batching: str | int | float = "continuous"
    """As in `pdserve.contracts.deployment.PhaseConfig`."""
    speculation: Annotated[str, one_of(*SPECULATIONS)] = "none"
    """What guesses the next tokens of answers that decode here, one of `SPECULATIONS`."""
    draft_path: str = ""
    """Folder of the smaller model of ``draft``."""
    transport: Annotated[str, one_of("auto", *TRANSPORTS)] = "auto"
    """``auto``, or one of `TRANSPORTS`."""
    host: str = "127.0.0.1"
    """Address to listen on and to advertise; the worker reports its ports."""
    ports: tuple[int, int] = (0, 0)
    """First and last port to choose from; the system chooses any free ones without."""
    cluster_token: str = ""
    """Secret that both ends of every call between cluster members prove to know; empty disables the check."""
    tls: TlsFiles | None = None
    """Encrypts every gRPC connection; ``None`` leaves them in plain text."""
    cpu_cores: tuple[int, ...] = ()
    """Cores to pin to before importing torch; empty keeps the affinity."""
    core_board: str = ""
    """File through which workers of this host lend cores while idle; empty disables lending."""
    core_index: int = 0
    """This worker's entry in ``core_sets``."""
    core_sets: tuple[tuple[int, ...], ...] = ()
    """``cpu_cores`` of every worker on the board, ordered by `core_index`; empty for a worker that lends nothing."""
    transfer_cpu_cores: tuple[int, ...] = ()
    """Cores of the transfer process and of the grammar compiler; empty keeps their affinity."""
    emulate: str = ""
    """Name of a GPU in the hardware catalogue to emulate instead of computing; empty runs the model."""
    hardware: str = ""
    """Device to compute on or emulate: a `pdserve.model.cost.hardware.Hardware` as JSON; empty looks it up in the
    catalogue."""
    time_scale: float = 1.0
    """Factor on emulated durations."""
    park_timeout_s: float = 30.0
    """Time until the worker frees a parked prompt that was not pulled."""

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel


def whole_worker_id(worker_id: str) -> str:
    """Id of the worker that a micro-batch is part of; ``worker_id`` itself if it is a whole worker's."""
    return worker_id.partition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEndpoint:
    """A running worker, or a micro-batch of one, as the supervisor reports it to the router."""

    worker_id: str
    """A micro-batch has the id of its worker and a number: ``prefill-0.1``."""
    role: WorkerRole
    address: str
    """``host:port`` of the worker's gRPC service."""
    epoch: int
    """Random number, new at every start."""
