from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.contracts.deployment import DeploymentConfig, KvTransferConfig, PhaseConfig
from pdserve.contracts.errors import DeployError
from pdserve.contracts.worker_config import DIRECT_TRANSPORTS
from pdserve.deploy.checks.preflight import gpu_warning
from pdserve.deploy.commands.check import find_links
from pdserve.deploy.launch import Launch
from pdserve.model.weights.random_checkpoint import write_random_checkpoint
from tests.deploy.clusters import pdserve


def launch_of(
    *, transport: str = "auto", gpu: str = "", ray_address: str = "", prefill: int = 1, mixed: int = 0
) -> Launch:
    config = DeploymentConfig(
        prefill=PhaseConfig(replicas=prefill),
        decode=PhaseConfig(replicas=prefill),
        mixed=PhaseConfig(replicas=mixed),
        kv_transfer=KvTransferConfig(transport=transport),
    )
    return Launch(config=config, gpu=gpu, ray_address=ray_address)


def test_links_of_one_host_and_between_hosts() -> None:
    assert find_links(launch_of()) == [(("prefill to decode",), True, "memfd", "it is on this host")]
    assert find_links(launch_of(ray_address="head:6379")) == [
        (("prefill to decode",), True, "memfd", "it is on this host"),
        (("prefill to decode",), False, "tcp", "it is on another host"),
    ]


def test_pairs_of_roles_that_move_kv() -> None:
    (with_mixed,) = find_links(launch_of(mixed=1))
    assert with_mixed.pairs == ("prefill to decode", "prefill to mixed", "mixed to decode")
    (only_mixed,) = find_links(launch_of(prefill=0, mixed=2))
    assert only_mixed.pairs == ("mixed to mixed",)
    assert not find_links(launch_of(prefill=0, mixed=1))


def test_pools_on_gpus() -> None:
    (staged,) = find_links(launch_of(gpu="h100-sxm"))
    assert (staged.transport, "between GPU and host for prefill and decode" in staged.reason) == ("memfd", True)
    for transport in DIRECT_TRANSPORTS:
        (direct,) = find_links(launch_of(gpu="h100-sxm", transport=transport))
        assert (direct.transport, direct.reason) == (transport, "both pools are on GPUs")
    on_host, between_hosts = find_links(launch_of(gpu="h100-sxm", transport="cuda_ipc", ray_address="head:6379"))
    assert (on_host.transport, between_hosts.transport) == ("cuda_ipc", "tcp")
    assert between_hosts.reason.startswith("it is on another host, and CUDA IPC reaches no other host; copies between")
    launch = launch_of(gpu="h100-sxm")
    on_cpu = replace(launch.config, decode=replace(launch.config.decode, device="cpu"))
    (half,) = find_links(replace(launch, config=on_cpu))
    assert "between GPU and host for prefill come" in half.reason


@pytest.mark.parametrize(
    ("launch", "said"),
    [
        (launch_of(transport="memfd", ray_address="head:6379"), "memfd needs both workers on one host"),
        (launch_of(transport="nccl"), "nccl is impossible: a pool is not on a GPU"),
        (launch_of(transport="cuda_ipc"), "cuda_ipc is impossible: a pool is not on a GPU"),
    ],
)
def test_a_transport_that_does_not_join_all_workers_is_refused(launch: Launch, said: str) -> None:
    with pytest.raises(DeployError, match=said):
        find_links(launch)


def test_check_measures_the_links_and_starts_nothing(tmp_path: Path) -> None:
    folder = write_random_checkpoint(tmp_path, num_layers=1)
    num_decode = len(os.sched_getaffinity(0))  # with the prefill worker, one worker more than cores
    run = pdserve("check", "--port", "0", "--model", str(folder), "--decode", str(num_decode))
    assert run.returncode == 0, run.stderr
    assert f"cores fewer than workers: {num_decode + 1} workers on {num_decode}" in run.stdout
    assert "pdserve up would start here" in run.stdout
    found = re.search(
        r"^  prefill to decode: memfd \(it is on this host\), ([\d.]+) ms, ([\d.]+) GB/s; predicted 1.4 ms$",
        run.stdout,
        re.M,
    )
    assert found, run.stdout
    assert float(found[1]) > 0
    assert "up at" not in run.stdout


def test_workers_that_ask_for_gpus_are_named_where_no_driver_shows_one() -> None:
    launch = launch_of(prefill=2)
    on_gpus = replace(launch, config=replace(launch.config, decode=PhaseConfig(replicas=2, device="cuda")))
    assert gpu_warning(on_gpus).startswith("decode.device: cuda, and no driver shows one here; ")
    elsewhere = (replace(on_gpus, ray_address="head:6379"), replace(on_gpus, emulate="h100-sxm"))
    for other in (launch, replace(on_gpus, num_gpus=2), *elsewhere):
        assert gpu_warning(other) == ""
