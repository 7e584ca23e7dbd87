"""Cores are split by load, disjoint and complete; GPUs are whole or shared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.contracts.errors import DeployError
from pdserve.contracts.worker_config import WorkerConfig, WorkerRole
from pdserve.deploy.cluster.resources import gpu_shares, installed_gpu, num_gpus, split_cores

P, D, M = WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.MIXED


@pytest.mark.parametrize(
    ("num_cores", "roles", "worker_cores", "spare"),
    [
        (2, [P, D], ((0,), (1,)), ()),
        (3, [P, D], ((0, 1), (2,)), ()),
        (4, [P, D], ((0, 1, 2), (3,)), ()),
        (4, [M], ((0, 1, 2, 3),), ()),
        (8, [P, D], ((0, 1, 2, 3, 4), (5, 6)), (7,)),
        (1, [M], ((0,),), ()),
    ],
)
def test_small_machines(
    num_cores: int, roles: list[WorkerRole], worker_cores: tuple[tuple[int, ...], ...], spare: tuple[int, ...]
) -> None:
    split = split_cores(range(num_cores), roles)
    assert split.worker_cores == worker_cores
    assert split.spare_cores == spare


def test_with_more_workers_than_cores_nobody_is_pinned() -> None:
    split = split_cores([4, 6], [P, D, M])
    assert split.worker_cores == ((), (), ())
    assert split.spare_cores == ()


@given(st.integers(1, 96), st.lists(st.sampled_from(WorkerRole), min_size=1, max_size=12))
def test_every_core_has_one_owner(num_cores: int, roles: list[WorkerRole]) -> None:
    split = split_cores(range(num_cores), roles)
    assert len(split.worker_cores) == len(roles)
    assert all(split.worker_cores) == (num_cores >= len(roles))
    if num_cores >= len(roles):
        owned = [core for cores in split.worker_cores for core in cores] + list(split.spare_cores)
        assert owned == list(range(num_cores))


def test_every_rank_gets_a_core() -> None:
    assert split_cores(range(5), [P, D], [1, 3]).worker_cores == ((0, 1), (2, 3, 4))
    assert split_cores(range(3), [P, D], [1, 3]).worker_cores == ((), ())
    prefill, decode = (len(cores) for cores in split_cores(range(40), [P, D], [1, 2]).worker_cores)
    assert abs(prefill - decode) <= 1


def test_prefill_gets_about_twice_what_decode_gets() -> None:
    split = split_cores(range(32), [P, D])
    prefill, decode = (len(cores) for cores in split.worker_cores)
    assert 1.8 < prefill / decode < 2.2
    assert len(split.spare_cores) == 4


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


def test_every_rank_takes_a_gpu() -> None:
    wide = replace(worker("cuda", 0.45), tensor_parallel=2, pipeline_parallel=3)
    configs = [wide, worker("cuda", 0.5), worker("cuda", 0.5)]
    assert gpu_shares(configs, 7) == [6.0, 0.5, 0.5]
    with pytest.raises(DeployError, match=r"take 7 GPUs and Ray has 6: .* lower their tensor_parallel or pipeline_par"):
        gpu_shares(configs, 6)


def test_automatic_workers_share_gpus_that_are_too_few() -> None:
    configs = [worker("auto"), worker("cuda"), worker("auto")]
    assert gpu_shares(configs, 3) == [1.0, 1.0, 1.0]
    assert gpu_shares(configs, 2) == [0.45, 1.0, 0.45]
    assert gpu_shares([worker("auto")] * 3, 1) == [0.3, 0.3, 0.3]
    assert gpu_shares([worker("auto", 0.45), worker("auto")], 1) == [0.22, 0.45]
    with pytest.raises(DeployError, match="take 2 GPUs and Ray has 1"):
        gpu_shares([worker("cuda"), worker("auto")], 1)


def test_without_gpus_automatic_workers_compute_on_the_cpu() -> None:
    assert gpu_shares([worker("auto"), worker("cpu")], 0) == [0.0, 0.0]


def test_automatic_workers_whose_ranks_no_host_holds_are_refused() -> None:
    pair = replace(worker("auto"), pipeline_parallel=2)
    assert gpu_shares([pair], 2, 2) == [2.0]
    with pytest.raises(DeployError, match=r"take 3 GPUs and Ray has 3: .* or set device to cpu; a host has 1"):
        gpu_shares([pair, worker("cuda")], 3, 1)


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


def test_the_driver_says_which_gpu_is_here(tmp_path: Path) -> None:
    assert installed_gpu(tmp_path / "absent") == ""
    for number, model in (("0000:1b:00.0", "NVIDIA H100 80GB HBM3"), ("0000:43:00.0", "NVIDIA L4")):
        (tmp_path / number).mkdir()
        (tmp_path / number / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 18\nGPU UUID: \t GPU-1\n")
    assert installed_gpu(tmp_path) == "h100-sxm"


@pytest.mark.parametrize(
    ("shown", "count"),
    [(None, 2), ("", 0), ("1", 1), ("0,1,2", 2), ("-1", 0), ("1,-1,0", 1), ("NoDevFiles", 0), ("GPU-8932f937, 0", 2)],
)
def test_only_visible_gpus_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: str | None, count: int
) -> None:
    for number in ("0000:1b:00.0", "0000:43:00.0"):
        (tmp_path / number).mkdir()
        (tmp_path / number / "information").write_text("Model: NVIDIA L4\n")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert num_gpus(tmp_path) == count
    assert installed_gpu(tmp_path) == ("l4" if count else "")


def test_a_gpu_that_the_catalogue_does_not_have_is_none(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "information").write_text("no model\n")
    assert installed_gpu(tmp_path) == ""
