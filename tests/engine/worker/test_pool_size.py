"""Sizing of KV pools."""

from __future__ import annotations

import pytest

from pdserve.contracts.step import ModelLimits
from pdserve.contracts.worker_config import WorkerConfig, WorkerRole
from pdserve.engine.worker.pool_size import (
    AUTO_HOST_SHARE,
    AUTO_SWAP_SHARE,
    KvMemory,
    check_pool_fits,
    check_staging_fits,
    kv_memory_on_cpu,
    kv_memory_on_gpu,
    num_kv_blocks,
    num_swap_slots,
)

LIMITS = ModelLimits(max_model_len=100, vocab_size=10)


def blocks(auto_bytes: int = 0, **fields: int) -> int:
    config = WorkerConfig(worker_id="w", role=WorkerRole.MIXED, model_path="", **fields)  # type: ignore[arg-type]
    return num_kv_blocks(config, LIMITS, block_bytes=1000, auto_bytes=auto_bytes)


def test_told_sizes_are_taken_and_a_number_of_blocks_goes_first() -> None:
    assert blocks(num_kv_blocks=9, kv_memory_bytes=50_000) == 9
    assert blocks(kv_memory_bytes=50_999) == 50


def test_an_automatic_pool_is_bounded_by_memory_and_by_what_the_batch_can_use() -> None:
    assert blocks(auto_bytes=20_500) == 20
    assert blocks(auto_bytes=10**9, max_batch_size=3) == 21


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"num_kv_blocks": 6}, "raise num_kv_blocks to 7 blocks"),
        ({"kv_memory_bytes": 6999}, r"raise kv_memory to 7 blocks \(7000 bytes\)"),
        ({"auto_bytes": 1000}, "or lower max_model_len"),
    ],
)
def test_a_pool_holds_one_sequence_of_the_model_s_length_at_least(fields: dict[str, int], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        blocks(**fields)


def test_weights_and_pool_share_the_memory() -> None:
    check_pool_fits(300, 300)
    with pytest.raises(ValueError, match="needs 301 bytes and 300 are available after the weights: lower kv_memory"):
        check_pool_fits(301, 300)
    with pytest.raises(ValueError, match="weights take 1001 bytes on this host and 1000 are available"):
        kv_memory_on_cpu(1001, 1000)


def test_a_cpu_s_pools_share_what_the_weights_leave() -> None:
    assert kv_memory_on_cpu(700, 1000) == KvMemory(max_bytes=300, auto_bytes=30, host_bytes=300)


@pytest.mark.parametrize("num_workers", [1, 6, 8, 64])
def test_automatic_pools_of_all_workers_of_a_host_leave_room(num_workers: int) -> None:
    on_cpus = num_workers * kv_memory_on_cpu(0, 10**6, num_workers).auto_bytes
    assert on_cpus * (1 + AUTO_SWAP_SHARE) <= AUTO_HOST_SHARE * 10**6
    large = {"total_bytes": 10**7, "free_bytes": 10**7, "host_bytes": 10**6, "num_host_workers": num_workers}
    on_gpus = num_workers * gpu_kv_memory(**large).auto_bytes
    assert on_gpus * (1 + AUTO_SWAP_SHARE) <= AUTO_HOST_SHARE * 10**6


def gpu_kv_memory(**given: float) -> KvMemory:
    """KV memory of a GPU of 1000 bytes, on a large host."""
    values: dict[str, float] = {"weight_bytes": 300, "activation_bytes": 40, "reserve_bytes": 10, "total_bytes": 1000}
    told = {**values, "free_bytes": 1000, "utilization": 0.9, "host_bytes": 10**6, **given}
    return kv_memory_on_gpu(**told)  # type: ignore[arg-type]


def test_a_gpu_s_pool_takes_what_weights_and_activations_leave_of_its_share() -> None:
    assert gpu_kv_memory() == KvMemory(max_bytes=650, auto_bytes=550, host_bytes=10**6)
    assert gpu_kv_memory(reserve_bytes=30) == KvMemory(max_bytes=630, auto_bytes=530, host_bytes=10**6)
    assert gpu_kv_memory(utilization=0.5).auto_bytes == 150


def test_a_gpu_that_others_use_gives_what_is_free() -> None:
    assert gpu_kv_memory(free_bytes=400) == KvMemory(max_bytes=50, auto_bytes=50, host_bytes=10**6)


def test_a_gpu_s_pool_is_no_larger_than_its_staging_file_may_grow() -> None:
    assert gpu_kv_memory(host_bytes=200) == KvMemory(max_bytes=650, auto_bytes=100, host_bytes=200)
    check_staging_fits(200, 200)
    with pytest.raises(ValueError, match="a staging file on the host, where 200 bytes are available: lower kv_memory"):
        check_staging_fits(201, 200)


@pytest.mark.parametrize("given", [{"weight_bytes": 851}, {"utilization": 0.3}, {"free_bytes": 349}])
def test_weights_that_a_gpu_does_not_hold_are_refused(given: dict[str, float]) -> None:
    with pytest.raises(
        ValueError, match="raise gpu_memory_utilization, end what else runs on the GPU, or serve a small"
    ):
        gpu_kv_memory(**given)


def slots(swap_memory_bytes: int | None, *, may_decode: bool = True, spare_bytes: int = 10**6) -> int:
    config = WorkerConfig(
        worker_id="w",
        role=WorkerRole.PREFILL,
        model_path="",
        may_decode=may_decode,
        swap_memory_bytes=swap_memory_bytes,
    )
    return num_swap_slots(config, num_blocks=40, block_bytes=1000, spare_bytes=spare_bytes)


def test_swap_memory_is_as_told_or_a_quarter_of_the_pool_as_far_as_there_is_memory() -> None:
    assert slots(25_999) == 25
    assert slots(0) == 0
    assert slots(None) == 10
    assert slots(None, spare_bytes=3500) == 3
    assert slots(None, may_decode=False) == 0


def test_swap_memory_that_does_not_fit_or_holds_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="holds no KV block of 1000: raise it, or write 0"):
        slots(999)
    with pytest.raises(ValueError, match=r"swap_memory needs 3000 bytes and 2999 are available .* lower it"):
        slots(3000, spare_bytes=2999)
