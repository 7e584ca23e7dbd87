"""The deployment file as frozen dataclasses: one per section, every key with a default.

Read from YAML and checked by `pdserve.deploy.config`; passed to workers and the router as JSON. Units are in the names
or in the line under each field. These classes hold values; they check nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

QUANTIZATION_SETTINGS = ("none", "int8", "int4")
"""What `ModelConfig.quantization` may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and how it is held."""

    path: str = ""
    """Folder with config.json, safetensors and tokenizer; empty serves a small random checkpoint."""
    dtype: str = "float32"
    """``float32``, ``bfloat16`` or ``float16``: weights and activations."""
    kv_dtype: str = "auto"
    """``auto``, which is ``dtype``, or ``int8`` or ``float8_e4m3fn``: about a fourth of float32's memory, and a little
    less accurate. ``float8_e4m3fn`` is for GPUs; on CPUs plain torch attends to it, slowly."""
    quantization: str = "none"
    """``none``, or how the matrices of the layers are held: ``int8``, with one scale per output, or ``int4``, with one
    per output and group of 128 inputs."""
    max_model_len: int = 0
    """Prompt and answer tokens together; 0 takes the checkpoint's own limit."""
    block_size: int = 16
    """Tokens per KV block."""
    profile: str = ""
    """Hardware file, as `pdserve profile` writes it, with what steps take on the workers' devices; empty takes the
    catalogue's figures."""
    served_name: str = ""
    """Name that clients use; empty takes the folder's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SloConfig:
    """Latency objectives that goodput counts against."""

    ttft_seconds: float = 0.25
    tpot_seconds: float = 0.05
    attainment: float = 0.9
    """Share of requests that should meet both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseConfig:
    """One pool of workers: prefill, decode, or mixed."""

    replicas: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    device: str = "auto"
    """``cpu``, ``cuda``, or ``auto``: GPUs, if Ray has enough for every worker that may have one."""
    gpu_memory_utilization: float = 0.9
    """On GPUs: share of a GPU's memory that weights, activations and an automatic KV pool take together. Workers with a
    half or less share GPUs."""
    kv_memory: str = "auto"
    """``auto``, or bytes with a unit: ``512MiB``, ``8GiB``."""
    swap_memory: str | int = "auto"
    """Host memory for the KV of preempted sequences: ``auto``, 0, or bytes with a unit. ``auto`` is a quarter of what
    the KV pool takes. Prefill workers preempt nothing."""
    max_batch_tokens: int = 2048
    """New tokens in one step, at most: the chunk budget of prefill."""
    max_batch_size: int = 256
    """Sequences decoded in one step, at most."""
    lend_cores: bool = True
    """On CPUs: while these workers have nothing to do others use their cores, and they those of others. Without, steps
    take as long as a profile says, whatever others do."""
    resources: dict[str, float] = field(default_factory=dict)
    """Ray resources that each worker asks for, such as ``{host_a: 1}``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTransferConfig:
    transport: str = "auto"
    """``auto``, ``memfd`` (copy on one host) or ``grpc``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    admin_port: int = 0
    """Metrics, targets, drain; loopback only; 0 picks a free one."""
    replicas: int = 1
    max_queued_requests: int = 1024
    """Answers asked for and not finished, at most (a request for n takes n places); more are refused with 429."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentConfig:
    """The whole file."""

    model: ModelConfig = field(default_factory=ModelConfig)
    slo: SloConfig = field(default_factory=SloConfig)
    prefill: PhaseConfig = field(default_factory=PhaseConfig)
    decode: PhaseConfig = field(default_factory=PhaseConfig)
    mixed: PhaseConfig = field(default_factory=lambda: PhaseConfig(replicas=0))
    kv_transfer: KvTransferConfig = field(default_factory=KvTransferConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
