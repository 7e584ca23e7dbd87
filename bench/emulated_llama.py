"""A cluster of emulated GPUs that serves the shape of Llama-3-8B, and the same placement for the simulator.

For benchmarks. Emulation needs a model's config.json and a tokenizer, but no weights. The tokenizer is a small one,
because prompts are sent as token ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from pdserve.bench.cluster import running_cluster
from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.placement import WorkerRole
from pdserve.model.config.shape import ModelShape
from pdserve.model.cost.hardware import hardware
from pdserve.model.weights.random_checkpoint import write_tokenizer
from pdserve.planner.layout import Layout, PlannedModel, Pool

LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
"""config.json of meta-llama/Meta-Llama-3-8B, as far as a decoder depends on it."""
MODEL = PlannedModel(shape=ModelShape.from_hf_config(LLAMA_3_8B), name="Meta-Llama-3-8B", max_model_len=8192)


def placement(gpu: str, replicas: int, *, is_colocated: bool = False) -> Layout:
    """As many prefill as decode workers, or that many mixed ones; one device each."""
    prefill, decode, mixed = (
        Pool(role=role, replicas=replicas, hardware=hardware(gpu))
        for role in (WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.MIXED)
    )
    return Layout(mixed=mixed) if is_colocated else Layout(prefill=prefill, decode=decode)


@dataclass(frozen=True, slots=True)
class EmulatedCluster:
    """A cluster that is ready."""

    url: str
    pid: int
    """Process of `pdserve up`."""

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time so far of the router and of each worker, by name; of several workers alike, the busiest."""
        seconds: dict[str, float] = {}
        for process in psutil.Process(self.pid).children(recursive=True):
            try:
                command, times = " ".join(process.cmdline()), process.cpu_times()
            except psutil.Error:
                continue  # it has just ended
            for name, mark in _PROCESSES.items():
                if mark in command:
                    seconds[name] = max(seconds.get(name, 0.0), times.user + times.system)
        return seconds


_PROCESSES = {"router": "pdserve.router", "prefill": "ray::PrefillWorker", "decode": "ray::DecodeWorker"}


@contextmanager
def emulated_cluster(layout: Layout, slo: SloConfig, gpu: str, time_scale: float) -> Iterator[EmulatedCluster]:
    """``layout`` on emulated devices, ``time_scale`` times slower than real ones; ``slo`` is in seconds of theirs.

    Raises:
        RuntimeError: it did not start.
    """
    with TemporaryDirectory() as work:
        folder = Path(work) / MODEL.name
        write_tokenizer(folder, 512)
        (folder / "config.json").write_text(json.dumps(LLAMA_3_8B))
        deployment = {
            "model": {"path": str(folder), "dtype": MODEL.precision.dtype, "max_model_len": MODEL.max_model_len},
            "slo": {"ttft_seconds": slo.ttft_seconds * time_scale, "tpot_seconds": slo.tpot_seconds * time_scale},
            **{role.value: {"replicas": 0} for role in WorkerRole},
            **{pool.role.value: {"replicas": pool.replicas} for pool in layout.pools},
        }
        with running_cluster(deployment, "--emulate", gpu, "--time-scale", str(time_scale)) as cluster:
            yield EmulatedCluster(cluster.url, cluster.pid)
