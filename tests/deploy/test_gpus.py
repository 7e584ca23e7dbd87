"""Who computes on GPUs."""

from __future__ import annotations

import pytest

from pdserve.contracts.placement import WorkerConfig, WorkerRole
from pdserve.deploy.errors import DeployError
from pdserve.deploy.gpus import gpu_shares


def worker(device: str, utilization: float = 0.9, emulate: str = "") -> WorkerConfig:
    return WorkerConfig(
        worker_id="w",
        role=WorkerRole.DECODE,
        model_path="",
        device=device,
        gpu_memory_utilization=utilization,
        emulate=emulate,
    )


def test_a_worker_takes_a_gpu_or_as_much_of_one_as_of_its_memory() -> None:
    configs = [worker("cuda", 0.9), worker("cpu"), worker("cuda", 0.45), worker("cuda", 0.5), worker("cuda", 0.51)]
    assert gpu_shares(configs, 3) == [1.0, 0.0, 0.45, 0.5, 1.0]


def test_automatic_workers_take_gpus_all_or_none() -> None:
    configs = [worker("auto"), worker("cuda"), worker("auto")]
    assert gpu_shares(configs, 3) == [1.0, 1.0, 1.0]
    assert gpu_shares(configs, 2) == [0.0, 1.0, 0.0]
    assert gpu_shares([worker("auto")], 0) == [0.0]


def test_emulated_workers_take_none() -> None:
    assert gpu_shares([worker("cuda", emulate="h100-sxm"), worker("auto", emulate="h100-sxm")], 8) == [0.0, 0.0]


def test_shares_are_counted_as_they_fit_on_gpus() -> None:
    thirds = [worker("cuda", 1 / 3)] * 6
    assert gpu_shares(thirds, 2) == [1 / 3] * 6
    with pytest.raises(DeployError, match=r"take 3 GPUs and Ray has 2: .* lower their gpu_memory_utilization"):
        gpu_shares([worker("cuda", 0.4)] * 5, 2)


def test_too_few_gpus_are_one_line_with_the_remedy() -> None:
    with pytest.raises(DeployError, match=r"take 1 GPUs and Ray has 0: .* or set device to cpu") as error:
        gpu_shares([worker("cuda"), worker("auto")], 0)
    assert "\n" not in str(error.value)
