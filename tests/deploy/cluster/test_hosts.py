"""Which host a worker gets, and which hosts are refused."""

from __future__ import annotations

import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.contracts.deployment import SecurityConfig
from pdserve.contracts.errors import DeployError
from pdserve.contracts.worker_config import TlsFiles, WorkerRole
from pdserve.deploy.cluster.host_facts import check_host, check_network, host_facts
from pdserve.deploy.cluster.hosts import Host, RayHost, WorkerNeeds, check_gpus, choose_hosts
from pdserve.deploy.cluster.ray_cluster import RayNode
from pdserve.deploy.cluster.ray_desk import RayDesk
from pdserve.model.weights.demo_model import DEMO_MODEL
from tests.patience import HANG_S

FACTS = replace(host_facts("10.0.0.1", str(DEMO_MODEL)), name="a", cores=(0, 1, 2, 3))


def host(number: int, **resources: float) -> Host:
    return Host(replace(FACTS, address=f"10.0.0.{number}"), "/tmp", resources)


def prefill(number: int = 0, **needs: float) -> WorkerNeeds:
    return WorkerNeeds(role=WorkerRole.PREFILL, number=number, **needs)  # type: ignore[arg-type]


def decode(number: int = 0, **needs: float) -> WorkerNeeds:
    return WorkerNeeds(role=WorkerRole.DECODE, number=number, **needs)  # type: ignore[arg-type]


def addresses(found: dict[str, Host | None]) -> dict[str, str]:
    return {name: host.address if host else "" for name, host in found.items()}


def test_both_phases_are_spread_over_all_hosts() -> None:
    workers = [prefill(0), prefill(1), decode(0), decode(1)]
    found = addresses(choose_hosts(workers, [host(1), host(2)], {}))
    assert found == {"prefill-0": "10.0.0.1", "prefill-1": "10.0.0.2", "decode-0": "10.0.0.1", "decode-1": "10.0.0.2"}


def test_larger_workers_are_placed_first() -> None:
    small, large = prefill(0, num_ranks=1), decode(0, num_ranks=3)
    found = addresses(choose_hosts([small, large], [host(1), host(2)], {}))
    assert found == {"decode-0": "10.0.0.1", "prefill-0": "10.0.0.2"}


def test_a_share_of_a_gpu_needs_one_gpu_with_room_for_it() -> None:
    workers = [decode(number, gpu_share=0.5) for number in range(3)] + [prefill(0, gpu_share=0.6)]
    found = addresses(choose_hosts(workers, [host(1, GPU=1), host(2, GPU=1)], {}))
    assert found["prefill-0"] == "10.0.0.1"
    assert [found[f"decode-{number}"] for number in range(3)] == ["10.0.0.2", "10.0.0.2", ""]


def test_the_gpus_of_a_worker_s_ranks_are_on_one_host() -> None:
    workers = [decode(0, gpu_share=2.0), decode(1, gpu_share=1.0), decode(2, gpu_share=0.5)]
    found = addresses(choose_hosts(workers, [host(1, GPU=1), host(2, GPU=3)], {}))
    assert found == {"decode-0": "10.0.0.2", "decode-1": "10.0.0.1", "decode-2": "10.0.0.2"}
    assert addresses(choose_hosts([decode(0, gpu_share=4.0)], [host(1, GPU=2), host(2, GPU=2)], {})) == {"decode-0": ""}


def test_gpus_that_are_enough_only_over_all_hosts_are_refused() -> None:
    workers = [decode(number, gpu_share=2.0) for number in range(3)]
    found = choose_hosts(workers, [host(1, GPU=3), host(2, GPU=3)], {})
    missing = [needs for needs in workers if found[needs.name] is None]
    with pytest.raises(DeployError, match=r"no single host has the GPUs of decode-2 left, .*: lower tensor_parallel"):
        check_gpus(missing)
    check_gpus([decode(0), decode(1, gpu_share=1.0, resources={"fast": 1})])  # type: ignore[arg-type]


def test_resources_bind_workers_to_hosts_and_run_out() -> None:
    workers = [prefill(number, resources={"fast": 1}) for number in range(2)]  # type: ignore[arg-type]
    hosts = [host(1), host(2, fast=1)]
    assert addresses(choose_hosts(workers, hosts, {})) == {"prefill-0": "10.0.0.2", "prefill-1": ""}
    assert addresses(choose_hosts(workers[1:], hosts, {"10.0.0.2": workers[:1]})) == {"prefill-1": ""}


def test_what_other_workers_need_counts() -> None:
    found = choose_hosts([decode(1)], [host(1), host(2)], {"10.0.0.1": [prefill(0), decode(0)]})
    assert addresses(found) == {"decode-1": "10.0.0.2"}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (replace(FACTS, version="0.0.9"), "it has pdserve 0.0.9, and a has .*install one version on all hosts"),
        (replace(FACTS, model_digest=""), "cannot read the model; put it at the same path on every host"),
        (replace(FACTS, model_digest="0"), "another model at the same path than a; copy one to all hosts"),
    ],
)
def test_hosts_that_do_not_fit_are_refused(other: object, said: str) -> None:
    check_host(FACTS, FACTS)
    with pytest.raises(DeployError, match=said):
        check_host(other, FACTS)  # type: ignore[arg-type]


def test_slow_kernels_of_another_machine_are_warned_of() -> None:
    node = RayNode(node_id="1", address="10.0.0.2", hostname="b", resources={})
    host = RayHost(RayDesk(), node, "", FACTS, "cluster")
    host.facts = replace(FACTS, host_id="other", kernel_warning="g++ was not found")
    assert host.warning == "g++ was not found"
    host.facts = replace(FACTS, kernel_warning="g++ was not found")  # this machine, which has said so
    assert host.warning == ""


def test_a_network_needs_tls_or_a_word_of_trust() -> None:
    tls = TlsFiles(ca="ca", certificate="certificate", key="key")
    check_network([FACTS], SecurityConfig(plaintext=True))
    check_network([FACTS], SecurityConfig(tls=tls))
    check_network([replace(FACTS, address="127.0.0.1"), replace(FACTS, address="::1")], SecurityConfig())
    with pytest.raises(DeployError, match=r"network of a \(10.0.0.1\) in plain text; set security.tls"):
        check_network([replace(FACTS, address="127.0.0.1"), FACTS], SecurityConfig())


def test_only_a_process_of_ray_is_killed(tmp_path: Path) -> None:
    sleep = shutil.copy(str(shutil.which("sleep")), tmp_path / "ray::Worker")
    other = subprocess.Popen(["sleep", "60"])
    named = subprocess.Popen([sleep, "60"])
    try:
        here = host(1)
        here.kill(other.pid)
        here.kill(named.pid)
        assert named.wait(HANG_S) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (other, named):
            process.kill()
            process.wait()
