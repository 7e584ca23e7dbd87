"""What workers are counted to hold, and which setting is named where it is too much."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.contracts.errors import DeployError
from pdserve.contracts.placement import WorkerConfig, WorkerRole
from pdserve.contracts.precision import Precision
from pdserve.deploy import memory
from pdserve.deploy.memory import PROCESS_BYTES, check_memory, worker_memory
from pdserve.model.config import DecoderConfig
from pdserve.model.random_checkpoint import write_random_checkpoint
from pdserve.model.weight_bytes import weight_bytes

MIB = 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderConfig:
    folder = write_random_checkpoint(
        tmp_path_factory.mktemp("model"), hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2
    )
    return DecoderConfig.from_folder(Path(folder))


def a_worker(role: WorkerRole = WorkerRole.DECODE, *, kv: int = 0, swap: int | None = None) -> WorkerConfig:
    return WorkerConfig(
        worker_id=f"{role.value}-0",
        role=role,
        model_path="",
        max_model_len=160,
        kv_memory_bytes=kv,
        swap_memory_bytes=swap,
    )


def test_a_worker_holds_weights_its_pool_and_its_swap_memory(model: DecoderConfig) -> None:
    block_bytes = 16 * 2 * 2 * 2 * 16 * 4
    assert worker_memory(a_worker(), model) == (weight_bytes(model.shape, "float32", "none").total, 10 * block_bytes, 0)
    told = worker_memory(a_worker(kv=50 * MIB, swap=8 * MIB), model)
    assert (told.kv, told.swap) == (50 * MIB, 8 * MIB)
    assert worker_memory(replace(a_worker(kv=50 * MIB), device="cuda"), model) == (0, 50 * MIB, 0)


@pytest.mark.parametrize(
    ("workers", "spare", "said"),
    [
        (
            [a_worker(), a_worker()],
            -1,
            "2 workers need .* use fewer workers, a smaller model, model.dtype bfloat16 or "
            "model.quantization int8 or int4",
        ),
        (
            [replace(a_worker(), precision=Precision(dtype="bfloat16", quantization="int8"))],
            -200 * MIB,
            "use fewer workers, a smaller model or model.quantization int4",
        ),
        ([a_worker()], 2**10, "1 worker needs .* lower model.max_model_len, or use fewer workers"),
        ([a_worker(kv=50 * MIB)], 50 * MIB - 1, "KV cache 50 MiB.* lower decode.kv_memory, or use fewer workers"),
        (
            [a_worker(WorkerRole.PREFILL, kv=MIB), a_worker(swap=3 * 2**30)],
            2**30,
            "swap 3.0 GiB.* 1.6 GiB is available; lower prefill.kv_memory or decode.swap_memory",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_setting_to_change(
    model: DecoderConfig, monkeypatch: pytest.MonkeyPatch, workers: list[WorkerConfig], spare: int, said: str
) -> None:
    fixed_bytes = len(workers) * (weight_bytes(model.shape, "float32", "none").total + PROCESS_BYTES)
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: fixed_bytes + spare)
    with pytest.raises(DeployError, match=said):
        check_memory(workers, model)


def test_what_fits_passes(model: DecoderConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = worker_memory(a_worker(kv=50 * MIB, swap=MIB), model)
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: sum(needed) + PROCESS_BYTES)
    check_memory([a_worker(kv=50 * MIB, swap=MIB)], model)


def test_a_size_that_is_no_use_names_the_worker(model: DecoderConfig) -> None:
    with pytest.raises(DeployError, match="decode-0: swap_memory of 1 bytes holds no KV block"):
        check_memory([a_worker(swap=1)], model)
