"""The deployment file as frozen dataclasses: one per section, every key with a default and its limits.

Read from YAML by `pdserve.deploy.config`, which also checks how values fit together. Units are in the names or in the
line under each field.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import inf
from typing import Annotated

from pdserve.contracts.codec import Fraction, NotNegative, Positive, Rule, between, one_of
from pdserve.contracts.errors import ConfigError
from pdserve.contracts.precision import CpuProducts, DtypeSetting, KvDtype, Precision, Quantization
from pdserve.contracts.worker_config import DEVICE_SETTINGS, TRANSPORTS, TlsFiles, WorkerRole

MAX_DEGREE = 64
"""Largest degree of tensor or pipeline parallelism."""
_BYTE_UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def parse_bytes(text: str) -> int:
    """Bytes of a size such as ``512MiB`` or ``8GiB`` (binary units; a bare number is bytes).

    Raises:
        ConfigError: not a positive size.
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]i)?B?\s*", text)
    try:
        num_bytes = int(float(match[1]) * _BYTE_UNITS[match[2] or ""]) if match else 0
    except (ValueError, OverflowError):
        num_bytes = 0
    if num_bytes <= 0:
        raise ConfigError(f"{text!r} is not a size; write bytes with a unit, such as 512MiB or 8GiB")
    return num_bytes


def _is_memory(value: str | int) -> bool:
    try:
        return value == "auto" or parse_bytes(str(value)) > 0
    except ConfigError:
        return False


def _is_size(value: str) -> bool:
    return value != "auto" and _is_memory(value)


def parse_ports(text: str) -> tuple[int, int]:
    """First and last port of ``first-last``; (0, 0), any free ones, of an empty text.

    Raises:
        ConfigError: not a range of ports.
    """
    match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text.strip() or "0-0")
    first, last = (int(match[1]), int(match[2])) if match else (1, 0)
    if first > last or last > 65535 or (first == 0 and last):
        raise ConfigError(f"{text!r} is no range of ports; write it like 20000-20099")
    return first, last


def _is_ports(value: str) -> bool:
    try:
        return parse_ports(value)[0] >= 0
    except ConfigError:
        return False


def _is_swap(value: str | int) -> bool:
    return value in (0, "0") or _is_memory(value)


def _is_batching(value: str | float) -> bool:
    return value in ("continuous", "static") if isinstance(value, str) else 0 <= value < inf


_Batching = Annotated[
    str | int | float, Rule(_is_batching, "continuous, static, or the seconds to wait for a full batch")
]


def _is_speculation(value: str | dict[str, str]) -> bool:
    if isinstance(value, dict):
        return [*value] == ["draft"] and isinstance(value["draft"], str) and value["draft"] != ""
    return value in ("none", "ngram")


_SIZE = "bytes with a unit, such as 512MiB or 8GiB"
_KvMemory = Annotated[str, Rule(_is_memory, f"auto, or {_SIZE}")]
_SwapMemory = Annotated[str | int, Rule(_is_swap, f"auto, 0, or {_SIZE}")]
_Speculation = Annotated[str | dict[str, str], Rule(_is_speculation, "none, ngram, or {draft: FOLDER}")]
_Degree = Annotated[int, between(1, MAX_DEGREE)]
_Port = Annotated[int, between(0, 65535)]
ToolFormatName = Annotated[str, one_of("auto", "hermes", "llama3", "qwen3_coder", "harmony")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model to serve, its precision and its limits."""

    path: str = ""
    """Folder with config.json, safetensors and tokenizer; empty serves the demo model."""
    dtype: DtypeSetting = "auto"
    """Weights and activations: ``float32``, ``bfloat16``, ``float16``, or ``auto``, which is the checkpoint's dtype, or
    float32 on CPUs where the checkpoint's is slow."""
    kv_dtype: KvDtype = "auto"
    """``auto``, which is ``dtype``, ``int8`` or ``float8_e4m3fn``."""
    quantization: Quantization = "auto"
    """Matrices of the layers: ``auto``, as the checkpoint has them, quantised or not; or of one that is not, ``none``,
    ``int8`` or ``int4``; ``fp8`` can be planned and simulated."""
    cpu_products: CpuProducts = "auto"
    """What matrices are multiplied in on CPUs: `pdserve.contracts.precision.Precision.cpu_products`."""
    max_model_len: Annotated[int, between(0, 2**24)] = 0
    """Prompt and answer tokens together; 0 takes the checkpoint's limit."""
    block_size: Annotated[int, between(1, 256)] = 16
    """Tokens per KV block."""
    profile: str = ""
    """Hardware file from `pdserve profile`, measured on the workers' devices; empty takes the catalogue's figures."""
    served_name: str = ""
    """Name that clients use; empty takes the folder's name, or that of the repository in Hugging Face's cache."""
    tool_format: ToolFormatName = "auto"
    """How the model writes tool calls: ``hermes`` (Qwen's, too), ``llama3``, ``qwen3_coder`` (tags), or ``harmony``
    (gpt-oss's, reasoning included); ``auto`` takes what the chat template teaches."""

    generation_config: Annotated[str, one_of("auto", "none")] = "auto"
    """``auto``: temperature, top_k, top_p, min_p, repetition_penalty and max_new_tokens of the checkpoint's
    generation_config.json, where it has them, are those of requests that do not say; ``none``: OpenAI's are."""

    @property
    def precision(self) -> Precision:
        """Of a model whose ``dtype`` is no longer ``auto``: `pdserve.deploy.config.find_dtype`."""
        assert self.dtype != "auto"
        return Precision(
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            quantization=self.quantization,
            cpu_products=self.cpu_products,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Latency objectives of a class of requests, and what they are worth."""

    ttft_seconds: Positive
    tpot_seconds: Positive
    max_gap_seconds: NotNegative = 0.0
    """Longest gap between two tokens of an answer; 0: none. A longer one misses TPOT, and prefill on the worker that
    decodes it takes no larger chunks than fit."""
    weight: NotNegative = 1.0
    """Worth of a request that meets both, beside those of other tiers; 0: it is served with what others leave."""
    when_hopeless: Annotated[str, one_of("last", "refuse")] = "last"
    """A request that would meet its objectives on no worker is served behind those that would (``last``), or gets a 429
    with ``Retry-After`` (``refuse``)."""

    def __post_init__(self) -> None:
        if 0 < self.max_gap_seconds < self.tpot_seconds:
            raise ValueError("max_gap_seconds is below tpot_seconds, the mean gap; raise it, or lower tpot_seconds")
        if not self.weight and self.when_hopeless == "refuse":
            raise ValueError("a weight of 0 makes every request hopeless; raise it, or set when_hopeless to last")


DEFAULT_TIER = "default"
_TIER_NAME = re.compile("[a-z0-9_-]{1,32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SloConfig(Tier):
    """Latency objectives that goodput counts against: those of requests without a tier, and tiers by name."""

    ttft_seconds: Positive = 0.25
    tpot_seconds: Positive = 0.05
    attainment: Fraction = 0.9
    """Share of requests that should meet both."""
    tiers: dict[str, Tier] = field(default_factory=dict)
    """Chosen by API key, or by a request's ``service_tier`` among those of its key."""

    def __post_init__(self) -> None:
        Tier.__post_init__(self)
        for name in self.tiers:
            if not _TIER_NAME.fullmatch(name) or name in (DEFAULT_TIER, "auto"):
                raise ValueError(
                    f"tiers has {name!r}; name tiers with up to 32 of a-z, 0-9, _ and -, and not {DEFAULT_TIER} or auto"
                )

    def tier(self, name: str) -> Tier:
        """Tier of that name; `DEFAULT_TIER` is this one."""
        return self if name == DEFAULT_TIER else self.tiers[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTierConfig:
    """A tier below the KV pool of each worker on CPUs: a file that outlives the worker."""

    path: str
    """Folder of the files, on each worker's host, which go with the cluster. They hold KV of prompts and answers; their
    owner alone reads them."""
    size: Annotated[str, Rule(_is_size, _SIZE)]
    """Of each worker's file; larger than its ``kv_memory``."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path is empty; name a folder for the files, or leave out kv_tier")


MAX_REPLICAS = 64
"""Of one pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseConfig:
    """One pool of workers: prefill, decode, or mixed."""

    replicas: Annotated[int, between(0, MAX_REPLICAS)] = 1
    """Workers at the start; all the time without ``max_replicas``."""
    min_replicas: Annotated[int, between(0, MAX_REPLICAS)] = 0
    """Fewest workers while their number follows the load; 0 is 1."""
    max_replicas: Annotated[int, between(0, MAX_REPLICAS)] = 0
    """Most workers; above 0, the numbers of prefill and decode workers follow the load."""
    tensor_parallel: _Degree = 1
    pipeline_parallel: _Degree = 1
    expert_parallel: bool = False
    """Of a model with experts: the ranks of `tensor_parallel` have whole experts each, not a part of every expert."""
    device: Annotated[str, one_of(*DEVICE_SETTINGS)] = "auto"
    """``cpu``, ``cuda``, or ``auto``: GPUs, shared by workers where they are too few, or the CPU where Ray has none."""
    gpu_memory_utilization: Fraction = 0.9
    """Share of a GPU's memory for weights, activations and an automatic KV pool together. Workers with 0.5 or less
    share GPUs."""
    kv_memory: _KvMemory = "auto"
    """``auto``, or bytes with a unit: ``512MiB``, ``8GiB``."""
    swap_memory: _SwapMemory = "auto"
    """Host memory for the KV of preempted sequences: ``auto``, 0, or bytes with a unit. ``auto`` is a quarter of
    the KV pool's size. Prefill workers never preempt."""
    kv_tier: KvTierConfig | None = None
    """On CPUs: keep copies of cached KV blocks in a file, ``{path: FOLDER, size: 8GiB}``, from which prompts take what
    the pool has evicted, or lost with a worker, where that is faster than computing it. None without."""
    max_batch_tokens: Annotated[int, between(1, 2**20)] = 2048
    """Upper limit of new tokens per step: the chunk budget of prefill."""
    max_batch_size: Annotated[int, between(1, 2**16)] = 256
    """Upper limit of sequences decoded per step."""
    batching: _Batching = "continuous"
    """For comparisons, of mixed workers: ``static`` admits requests when ``max_batch_size`` of them wait and the last
    batch has ended, a number also when the first has waited so many seconds. ``continuous`` admits one as soon as
    another ends. Requests of a static batch that never fills fail after ``router.max_silence_seconds``. Simulations
    take it as ``continuous``."""
    speculation: _Speculation = "none"
    """Guess the next tokens of answers, as many as raise the expected tokens per second, and check them together.
    ``ngram``: that an answer goes on as its prompt or itself did after the same tokens. On CPUs, ``{draft: FOLDER}``:
    that it goes on as a smaller model with the same tokenizer would write it. ``none``: compute one token of an answer
    at a time. Answers stay the same."""
    lend_cores: bool = True
    """On CPUs: lend cores while idle, and use the cores that other workers lend. Disabled, step durations match the
    profile whatever other workers do."""
    resources: dict[str, Positive] = field(default_factory=dict)
    """Ray resources that each worker requests, such as ``{host_a: 1}``."""

    @property
    def drafter(self) -> str:
        """One of `pdserve.contracts.worker_config.SPECULATIONS`."""
        return self.speculation if isinstance(self.speculation, str) else "draft"

    @property
    def draft_path(self) -> str:
        """Empty without a draft model."""
        return self.speculation["draft"] if isinstance(self.speculation, dict) else ""

    @property
    def kv_memory_bytes(self) -> int:
        """0 for ``auto``."""
        return 0 if self.kv_memory == "auto" else parse_bytes(self.kv_memory)

    @property
    def swap_memory_bytes(self) -> int | None:
        """None for ``auto``."""
        if self.swap_memory == "auto":
            return None
        return parse_bytes(str(self.swap_memory)) if self.swap_memory not in (0, "0") else 0


_KEYS_OF_A_SIZE = ("device", "tensor_parallel", "pipeline_parallel", "expert_parallel")
"""Alike in pools whose workers may take each other's role. A worker keeps what else it was started with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTransferConfig:
    transport: Annotated[str, one_of("auto", *TRANSPORTS)] = "auto"
    """``auto``: ``memfd`` (a copy) within a host, ``tcp`` between hosts. Or one of them always. ``nccl``, and
    ``cuda_ipc`` within a host: from GPU to GPU, and as ``auto`` where that fails; neither has run on GPUs yet."""


POLICIES = ("goodput", "least-time", "cache-aware", "conserve", "power-of-two", "least-loaded", "round-robin")
DEFAULT_POLICY = "goodput"
Policy = Annotated[str, one_of(*POLICIES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    host: str = "127.0.0.1"
    port: _Port = 8000
    admin_port: _Port = 0
    """Metrics, status, targets, drain; 0 picks a free port. Requests need the token of the cluster."""
    admin_host: str = "127.0.0.1"
    admin_token_file: str = ""
    """File with the admin token, made if it is absent; empty keeps a random token in the cluster's folder."""
    open_metrics: bool = False
    """Serve ``/metrics`` and ``/targets`` of the admin port without the token."""
    keep_alive_seconds: NotNegative = 10.0
    """Seconds between comments (``: waiting``) of a stream before token 0, so that proxies do not cut the connection; 0
    for none, for clients that read every line as JSON."""
    keys_file: str = ""
    """File of API keys, written by `pdserve key`; empty serves everybody who reaches the port."""
    tls_certificate: str = ""
    """File (PEM) with the certificate chain of the API's port, which then speaks HTTPS; needs ``tls_key``."""
    tls_key: str = ""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages in a browser may call the API, such as ``https://chat.example.com``; ``*`` is every one."""
    page: bool = True
    """Serve the page at ``/``: the cluster as a picture, its latencies, and a chat. With API keys it asks for one."""
    request_log: str = ""
    """File that gets a line of JSON for each request, without prompts or keys; may be rotated. Empty writes none."""
    log_format: Annotated[str, one_of("text", "json")] = "text"
    """Format of the router's log: ``text``, or ``json``, an object per line."""
    tracing: str = ""
    """URL of an OpenTelemetry collector, such as ``http://127.0.0.1:4318`` (OTLP over HTTP), that gets spans of each
    request and its phases; needs ``pdserve[tracing]``. Empty for none."""
    replicas: Annotated[int, between(1, 64)] = 1
    """Router processes that share ``port``: the system spreads connections over them. Each has sessions to all workers,
    an admin port, the next ones after ``admin_port`` unless that is 0, and its share of limits."""
    policy: Policy = DEFAULT_POLICY
    """Chooses the workers of each request: ``goodput``, ``least-time``, or a baseline to compare with."""
    max_silence_seconds: Annotated[float, Rule(lambda value: 1 <= value <= 86400, "seconds from 1 to 86400")] = 600.0
    """Seconds without a token, from arrival to token 0 or between two tokens, after which a request gets a 504. An
    answer that goes on has no limit but its ``max_tokens``."""
    max_queued_requests: Annotated[int, between(1, 2**20)] = 1024
    """Upper limit of unfinished answers (a request for n counts n times); further requests get a 429. With API keys or
    tiers, a tenant may have as many in each as are free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig:
    """Connections between the hosts of a cluster."""

    tls: TlsFiles | None = None
    """Certificates of every host; tokens, prompts and KV are encrypted."""
    plaintext: bool = False
    """Cross the network without TLS, because it is private."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentConfig:
    """All sections of the deployment file."""

    model: ModelConfig = field(default_factory=ModelConfig)
    slo: SloConfig = field(default_factory=SloConfig)
    prefill: PhaseConfig = field(default_factory=PhaseConfig)
    decode: PhaseConfig = field(default_factory=PhaseConfig)
    mixed: PhaseConfig = field(default_factory=lambda: PhaseConfig(replicas=0))
    kv_transfer: KvTransferConfig = field(default_factory=KvTransferConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    switchable: bool = False
    """Have prefill workers on GPUs keep what decoding needs, so that they can become decode workers: GPU memory for
    captured decode steps, and pinned host memory of a quarter of their KV pool for swapped KV. On CPUs they can anyway:
    that memory is not touched before they decode."""
    ports: Annotated[str, Rule(_is_ports, "a range of ports such as 20000-20099, or empty")] = ""
    """Ports on which workers listen, three each and one more for each further pipeline stage; empty: any free ones."""

    def phase(self, role: WorkerRole) -> PhaseConfig:
        """Section for workers of ``role``."""
        return {WorkerRole.PREFILL: self.prefill, WorkerRole.DECODE: self.decode, WorkerRole.MIXED: self.mixed}[role]

    def difference(self, role: WorkerRole, other: WorkerRole) -> str:
        """The first key by which workers of two roles differ, so that none can take the other role; empty if none."""
        one, two = self.phase(role), self.phase(other)
        for key in _KEYS_OF_A_SIZE:
            if getattr(one, key) != getattr(two, key):
                return f"{role.value}.{key} is {getattr(one, key)} and {other.value}.{key} is {getattr(two, key)}"
        return ""
