"""What is found wrong before anything starts, each with its remedy."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from pdserve.contracts.deployment import DeploymentConfig, ModelConfig, PhaseConfig, RouterConfig
from pdserve.deploy import preflight
from pdserve.deploy.errors import DeployError
from pdserve.deploy.launch import Launch
from pdserve.model.random_checkpoint import write_random_checkpoint

LAUNCH = Launch()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("model"), num_layers=1)


def test_a_whole_checkpoint_passes(checkpoint: Path) -> None:
    preflight.check_model(LAUNCH, checkpoint)


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("config.json", "config.json"),
        ("tokenizer.json", "no tokenizer.json in"),
        ("model.safetensors", r"no \*.safetensors in"),
    ],
)
def test_a_missing_file_is_named(checkpoint: Path, tmp_path: Path, missing: str, said: str) -> None:
    for file in checkpoint.iterdir():
        if file.name != missing:
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(DeployError, match=said):
        preflight.check_model(LAUNCH, tmp_path)


def test_emulation_needs_no_weights_but_a_known_gpu(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).symlink_to(checkpoint / name)
    preflight.check_model(Launch(emulate="h100-sxm"), tmp_path)
    with pytest.raises(DeployError, match="h100"):
        preflight.check_model(Launch(emulate="h1000"), tmp_path)


def test_a_length_beyond_the_model_is_refused(checkpoint: Path) -> None:
    launch = Launch(config=DeploymentConfig(model=ModelConfig(max_model_len=100_000)))
    with pytest.raises(DeployError, match="max_model_len 100000"):
        preflight.check_model(launch, checkpoint)


def test_weights_that_do_not_fit_are_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_WORKER_BYTES", 2**50)
    with pytest.raises(DeployError, match=r"2 workers need .* GiB for weights .* use fewer workers"):
        preflight.check_model(LAUNCH, checkpoint)


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


def test_too_many_workers_for_the_cores_are_refused() -> None:
    preflight.check_cores(LAUNCH, 1)
    many = Launch(config=DeploymentConfig(prefill=PhaseConfig(replicas=16)))
    with pytest.raises(DeployError, match="17 workers are too many for 2 cores; lower the replicas to 16 in all"):
        preflight.check_cores(many, 2)


def test_a_private_cluster_has_no_named_resources() -> None:
    config = DeploymentConfig(decode=PhaseConfig(resources={"host_a": 1}))
    with pytest.raises(DeployError, match=r"decode\.resources names host_a"):
        preflight.check_resources(Launch(config=config))
    preflight.check_resources(Launch(config=config, ray_address="127.0.0.1:6379"))
