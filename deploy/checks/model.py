"""Checks before `pdserve up` that a model can be served as configured: its files, limits and memory.

Reads small files only: the configuration, the tokenizer and the headers of the weights. Workers check again when they
start, against the memory that is free by then. Never imports torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pdserve.contracts.deployment import ModelConfig
from pdserve.contracts.errors import DeployError
from pdserve.contracts.worker_config import WorkerConfig
from pdserve.deploy.launch import Launch, worker_configs
from pdserve.engine.worker.backend import choose_backend
from pdserve.engine.worker.draft import read_draft
from pdserve.engine.worker.pool_size import num_kv_blocks, num_swap_slots
from pdserve.kernels.cpu.build import has_compiler
from pdserve.kernels.cpu.memory_nodes import memory_nodes
from pdserve.model.config.decoder_config import DecoderConfig, download_hint
from pdserve.model.config.quantisation import held_scheme, served_scheme
from pdserve.model.config.sampling_defaults import sampling_defaults
from pdserve.model.config.sharding import check_groups
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.hardware import hardware
from pdserve.model.weights.files import check_weights
from pdserve.router.text.tokenizer import ChatTokenizer
from pdserve.router.text.tool_calls import TOOL_FORMATS


def check_model(launch: Launch) -> str:
    """Return warnings about a model that can be served; empty if there are none.

    Raises:
        DeployError: the model cannot be served.
    """
    settings = launch.config.model
    folder = Path(settings.path)
    if folder.suffix == ".gguf" or (any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors"))):
        raise DeployError(f"{folder} is in GGUF, which is not served; download the model's safetensors")
    if not folder.is_dir():
        remedy = f"give --model a folder with config.json, safetensors, tokenizer{download_hint(folder)}"
        raise DeployError(f"no model folder at {folder}; {remedy}")
    try:
        model = DecoderConfig.from_folder(folder)
        tokenizer = ChatTokenizer.from_folder(folder, TOOL_FORMATS.get(settings.tool_format))
        if settings.generation_config == "auto":
            sampling_defaults(folder)
        model.limits(settings.max_model_len)
        warnings = [tokenizer.check_ids(model.shape.vocab_size)]
        if not launch.emulate and (left_out := check_weights(folder, model.shape)):
            warnings.append(f"weights that text does not need are left out: {left_out}")
    except (ValueError, OSError) as error:
        raise DeployError(" ".join(str(error).split())) from error
    except Exception as error:  # the files are the user's: any cause becomes one line
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise DeployError(f"the model in {folder} cannot be read: {cause}") from error
    if not launch.ray_address:
        check_host_memory(launch)
    template = tokenizer.template
    if template is None:
        warnings.append(NO_CHAT_TEMPLATE)
    elif "tools" in template.variables and tokenizer.tool_format is None:
        warnings.append(UNKNOWN_TOOLS)
    return "; ".join(filter(None, warnings))


def model_rows(settings: ModelConfig) -> list[tuple[str, str]]:
    """Rows of the banner: what the checkpoint decides about answers.

    Raises:
        ValueError: a file of the checkpoint is broken.
    """
    folder = Path(settings.path)
    ends = ", ".join(map(str, DecoderConfig.from_folder(folder).eos_token_ids)) or "none, so they end at max_tokens"
    rows = [("answers end", f"with tokens {ends}")]
    if settings.generation_config == "auto" and (defaults := sampling_defaults(folder)):
        given = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
        rows.append(("sampling", f"{given} (generation_config.json; model.generation_config: none ignores it)"))
    return rows


def precision_words(settings: ModelConfig) -> str:
    """Dtype of a model, or how its weights are quantised, such as ``int4 weights (AWQ), activations in bfloat16``.

    Raises:
        ValueError: config.json is broken.
    """
    scheme = held_scheme(settings.quantization, DecoderConfig.from_folder(Path(settings.path)).shape.scheme)
    return settings.dtype if scheme is None else f"{scheme}, activations in {settings.dtype}"


UNKNOWN_TOOLS = (
    "its chat template teaches tool calls in a form that is not known, so tools are refused; "
    f"set model.tool_format if it is one of {', '.join(TOOL_FORMATS)}"
)
NO_CHAT_TEMPLATE = (
    "it has no chat template, so /v1/chat/completions is refused and /v1/completions serves; "
    "put a chat_template.jinja into its folder"
)


PROCESS_BYTES = 300 * 2**20
"""Memory of a worker's processes, without weights and KV."""


class WorkerMemory(NamedTuple):
    """Host memory of one worker, in bytes."""

    weights: int
    """0 if the weights are on a GPU."""
    kv: int
    """KV pool or its staging memory, as configured; if automatic, room for one sequence of `max_model_len` tokens."""
    swap: int
    """As configured; 0 if automatic, because an automatic size takes only free memory."""


def worker_memory(config: WorkerConfig, model: DecoderConfig) -> WorkerMemory:
    """Return a worker's memory. Raises ValueError, with the remedy, for sizes that no amount of memory would allow."""
    scheme = served_scheme(config.precision.quantization, model.shape.scheme)
    degrees = config.tensor_parallel, config.pipeline_parallel
    cost = CostModel(model.shape, hardware("cpu"), config.precision, *degrees, expert_parallel=config.expert_parallel)
    check_groups(model.shape, scheme, config.tensor_parallel, expert_parallel=config.expert_parallel)
    limits = model.limits(config.max_model_len)
    block_bytes = held_bytes = cost.kv_bytes_per_token * config.block_size
    weight_bytes = 0 if config.device == "cuda" else cost.weight_bytes
    if (draft := read_draft(config, model)) is not None:
        weight_bytes += draft.cost.weight_bytes
        held_bytes += draft.cost.kv_bytes_per_token * config.block_size
    needed_bytes = -(-limits.max_model_len // config.block_size) * config.pipeline_parallel * held_bytes
    num_blocks = num_kv_blocks(config, limits, held_bytes, needed_bytes)
    num_slots = num_swap_slots(config, 0, block_bytes, sys.maxsize)
    return WorkerMemory(weight_bytes, num_blocks * held_bytes, num_slots * block_bytes)


def check_host_memory(launch: Launch) -> None:
    """`check_memory` of the workers of one host, with weights on the GPUs of all that may have some. The model has been
    checked before."""
    model = DecoderConfig.from_folder(Path(launch.config.model.path))
    configs = worker_configs(launch)
    configs = [replace(each, device="cuda") if launch.is_on_gpu(each.role) else each for each in configs]
    check_memory(configs, model, launch.memory_bytes)


def check_memory(configs: Sequence[WorkerConfig], model: DecoderConfig, available: int) -> None:
    """Check that the workers fit into the memory of their host or of the emulated GPU.

    Args:
        available: free memory of the host, in bytes.

    Raises:
        DeployError: they do not; the text names the setting to change.
    """
    each = []
    weights_of: dict[object, int] = {}
    for config in configs:
        try:
            if config.emulate:
                choose_backend(config)
            else:
                weights, *others = worker_memory(config, model)
                each.append(others)
                weights_of[_weights_copy(config)] = weights
        except ValueError as error:
            raise DeployError(f"{config.worker_id}: {error}") from error
    if not each:
        return
    weights = sum(weights_of.values())
    kv, swap = (sum(column) for column in zip(*each, strict=True))
    processes = len(configs) * PROCESS_BYTES
    if weights + kv + swap + processes > available:
        raise DeployError(
            f"{_workers(len(configs))} {_size(weights + kv + swap + processes)} of memory (weights {_size(weights)}, "
            f"KV cache {_size(kv)}, swap {_size(swap)}, processes {_size(processes)}) and {_size(available)} is "
            f"available; {_remedy(configs, model, weights_fit=weights + processes <= available)}"
        )


def _weights_copy(config: WorkerConfig) -> object:
    """What workers with one copy of the weights, as `pdserve.kernels.cpu.shared_weights` has it, have in common."""
    if not has_compiler():
        return config.worker_id
    nodes = memory_nodes(config.cpu_cores or os.sched_getaffinity(0))
    degrees = config.tensor_parallel, config.pipeline_parallel, config.expert_parallel
    return config.precision, degrees, config.device, config.draft_path, nodes


def _remedy(configs: Sequence[WorkerConfig], model: DecoderConfig, *, weights_fit: bool) -> str:
    if not weights_fit:
        remedies = ["fewer workers", "a smaller model"]
        precision = configs[0].precision
        if precision.dtype == "float32":
            remedies.append("model.dtype bfloat16")
        if model.shape.scheme is None and precision.quantization != "int4":
            remedies.append("model.quantization " + ("int4" if precision.quantization == "int8" else "int8 or int4"))
        return f"use {', '.join(remedies[:-1])} or {remedies[-1]}"
    knobs = [f"{config.role.value}.kv_memory" for config in configs if config.kv_memory_bytes]
    knobs += [f"{config.role.value}.swap_memory" for config in configs if config.swap_memory_bytes]
    return f"lower {' or '.join(dict.fromkeys(knobs or ['model.max_model_len']))}, or use fewer workers"


def _workers(count: int) -> str:
    return f"{count} workers need" if count > 1 else "1 worker needs"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
