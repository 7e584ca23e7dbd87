"""Errors before anything starts, each with its remedy."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.contracts.deployment import (
    DeploymentConfig,
    KvTierConfig,
    ModelConfig,
    PhaseConfig,
    RouterConfig,
    SloConfig,
    Tier,
)
from pdserve.contracts.errors import ConfigError, DeployError
from pdserve.deploy.checks import preflight
from pdserve.deploy.cluster import host_facts
from pdserve.deploy.launch import Launch
from pdserve.model.cost.hardware import hardware
from pdserve.router.http.keys import add_key
from tests.proto.test_tls import certificates

MODEL = ModelConfig(dtype="float32")
LAUNCH = Launch(config=DeploymentConfig(model=MODEL))


def test_the_file_limit_is_raised_to_what_the_system_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        preflight.raise_file_limit(LAUNCH)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_few_open_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (300, 300))
    with pytest.raises(DeployError, match="the limit of open files is 300 and 1280 are needed"):
        preflight.raise_file_limit(LAUNCH)
    preflight.raise_file_limit(Launch(config=DeploymentConfig(router=RouterConfig(max_queued_requests=44))))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 256))
    with pytest.raises(DeployError, match=r"raise it \(ulimit -Hn 257\)$"):
        preflight.raise_file_limit(Launch(config=DeploymentConfig(router=RouterConfig(max_queued_requests=1))))


def test_too_few_ports_for_the_workers_are_refused() -> None:
    router = RouterConfig(port=0)
    with pytest.raises(DeployError, match="the workers listen on 6 ports, and ports has 3; widen it"):
        preflight.check_ports(Launch(config=DeploymentConfig(router=router, ports="20000-20002")))
    preflight.check_ports(Launch(config=DeploymentConfig(router=router, ports="20000-20005")))
    preflight.check_ports(Launch(config=DeploymentConfig(router=router, ports="20000-20002"), ray_address="a:1"))


def test_too_many_workers_for_the_cores_are_refused() -> None:
    preflight.check_cores(replace(LAUNCH, cores=(0,)))
    many = Launch(config=DeploymentConfig(prefill=PhaseConfig(replicas=16)), cores=(0, 1))
    with pytest.raises(
        DeployError,
        match="17 workers, counting their ranks, are too many for 2 cores; lower the rep",
    ):
        preflight.check_cores(many)


def test_a_private_cluster_has_no_named_resources() -> None:
    config = DeploymentConfig(decode=PhaseConfig(resources={"host_a": 1}))
    with pytest.raises(DeployError, match=r"decode\.resources names host_a"):
        preflight.check_resources(Launch(config=config))
    preflight.check_resources(Launch(config=config, ray_address="127.0.0.1:6379"))


def test_limits_of_keys_that_the_routers_cannot_share_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    add_key(path, "acme", max_in_flight=2, tokens_per_minute=1000)
    preflight.check_keys(router_at(keys_file=str(path), replicas=2))
    with pytest.raises(ConfigError, match=r"of acme has max_in_flight 2, and each of .* raise it"):
        preflight.check_keys(router_at(keys_file=str(path), replicas=3))


def test_a_folder_of_a_tier_that_cannot_be_made_or_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch_with(path: Path) -> Launch:
        return Launch(config=DeploymentConfig(prefill=PhaseConfig(kv_tier=KvTierConfig(path=str(path), size="1GiB"))))

    (file := tmp_path / "file").touch()
    preflight.check_tier_folders(launch_with(tmp_path / "new" / "folder"))
    assert not (tmp_path / "new").exists(), "a check makes nothing"
    for path in (file, file / "below"):
        with pytest.raises(ConfigError, match=rf"prefill\.kv_tier\.path is {path}, and {file} is no folder; name"):
            preflight.check_tier_folders(launch_with(path))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=f"and {tmp_path} cannot be written; name a folder"):
        preflight.check_tier_folders(launch_with(tmp_path / "new"))


def test_a_key_of_a_tier_that_the_deployment_lacks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    add_key(path, "acme", tiers=("gold", "default"))
    launch = router_at(keys_file=str(path))
    with pytest.raises(
        ConfigError, match=r"of acme has the tier 'gold', and the deployment has default; add it to slo"
    ):
        preflight.check_keys(launch)
    slo = SloConfig(tiers={"gold": Tier(ttft_seconds=1, tpot_seconds=1)})
    preflight.check_keys(replace(launch, config=replace(launch.config, slo=slo)))


def router_at(**fields: str | int) -> Launch:
    return Launch(config=DeploymentConfig(router=RouterConfig(**fields)))  # type: ignore[arg-type]


def test_a_taken_port_is_named_with_who_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        taker = rf"in use by .* \(process {os.getpid()}\)"
        with pytest.raises(DeployError, match=rf"127\.0\.0\.1:{port}: .*{taker}; choose another router\.port, or --p"):
            preflight.check_ports(router_at(port=port))
        with pytest.raises(DeployError, match=rf"{taker}; choose another router\.admin_port, or router\.admin_port: 0"):
            preflight.check_ports(router_at(port=0, admin_port=port))
    preflight.check_ports(router_at(port=port))


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_a_host_that_is_not_here_is_named(host: str) -> None:
    with pytest.raises(DeployError, match=rf"cannot listen on {host}:0: .*; set router\.host to an address"):
        preflight.check_ports(router_at(host=host, port=0))


def test_a_certificate_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    ours, theirs = certificates(tmp_path / "ours"), certificates(tmp_path / "theirs")
    preflight.check_api_tls(router_at())
    preflight.check_api_tls(router_at(tls_certificate=ours.certificate, tls_key=ours.key))
    for certificate, key, reason in (
        ("absent.pem", ours.key, "No such file"),
        (ours.certificate, theirs.key, "KEY_VALUES_MISMATCH"),
        (ours.certificate, "", ""),
    ):
        with pytest.raises(DeployError, match=f"cannot be used.*{reason}.*name a certificate in PEM"):
            preflight.check_api_tls(router_at(tls_certificate=certificate, tls_key=key))


def test_emulation_is_of_a_known_gpu() -> None:
    preflight.check_devices(LAUNCH)
    preflight.check_devices(replace(LAUNCH, emulate="h100-sxm"))
    with pytest.raises(DeployError, match="--emulate: unknown hardware 'h1000'; use one of h100"):
        preflight.check_devices(replace(LAUNCH, emulate="h1000"))


def test_kv_of_float8_is_of_gpus_that_read_it() -> None:
    config = DeploymentConfig(model=replace(MODEL, kv_dtype="float8_e4m3fn"))
    for emulate in ("", "h100"):
        preflight.check_devices(Launch(config=config, emulate=emulate))
    with pytest.raises(DeployError, match="--emulate: a100-80gb-sxm has no float8; use kv_dtype int8"):
        preflight.check_devices(Launch(config=config, emulate="a100"))


def test_a_profile_has_the_workers_devices() -> None:
    config = DeploymentConfig(model=replace(MODEL, profile="hardware.yaml"), mixed=PhaseConfig())
    devices = {"cpu-2": hardware("cpu", num_cores=2), "mine": hardware("h100")}
    launch = Launch(config=config, devices=devices, cores=(0, 1))  # fewer than workers: each uses both
    preflight.check_devices(launch)
    launch = replace(launch, cores=(0, 1, 2))
    with pytest.raises(DeployError, match=r"hardware\.yaml has cpu-2, mine, .* run pdserve profile --cores 1 "):
        preflight.check_devices(launch)
    preflight.check_devices(replace(launch, emulate="mine"))
    preflight.check_devices(replace(launch, emulate="h200"))


def test_what_makes_kernels_slow_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "to" / "be" / "made"))
    assert preflight.kernel_warning(LAUNCH) == ""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "cannot be written" in preflight.kernel_warning(LAUNCH)
    assert "set XDG_CACHE_HOME" in preflight.kernel_warning(LAUNCH)
    with monkeypatch.context() as patch:  # as in an image that was built with them
        patch.setattr(host_facts, "is_built", lambda: True)
        assert preflight.kernel_warning(LAUNCH) == ""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "install g++" in preflight.kernel_warning(LAUNCH)
    assert preflight.kernel_warning(Launch(emulate="h100-sxm")) == ""


def test_an_installation_without_the_demo_model_says_how_to_name_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "DEMO_MODEL", tmp_path / "pdserve-demo")
    with pytest.raises(DeployError, match=r"the demo model is not in .*pdserve-demo; name a model with --model FOLDER"):
        preflight.demo_model_folder()
