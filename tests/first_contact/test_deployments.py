"""What a deployment becomes on a machine: each file has both, and what is right.

``machine`` is what the host has, ``file`` the text of the deployment file, ``options`` those of `pdserve up`, and
``checkpoint`` changes config.json. ``right`` has workers, with their GPUs, share of memory and dtype, and parts of the
banner's rows; or how the deployment is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from pdserve.contracts.codec import from_plain
from pdserve.contracts.deployment import DeploymentConfig, ModelConfig, parse_bytes
from pdserve.contracts.errors import ConfigError, DeployError
from pdserve.deploy import cli
from pdserve.deploy.checks.model import check_model
from pdserve.deploy.cluster import host_facts, resources
from pdserve.deploy.cluster.banner import banner_rows
from pdserve.deploy.cluster.fleet import Fleet
from pdserve.deploy.commands.plan_options import planned_model
from pdserve.deploy.config import read_deployment
from pdserve.deploy.launch import Launch
from pdserve.model.weights.digest import model_digest
from pdserve.model.weights.random_checkpoint import write_random_checkpoint

FOLDER = Path(__file__).with_name("deployments")
POOL = {"num_blocks_free": 10, "num_blocks_cached": 0, "num_blocks_referenced": 0}


@dataclass(frozen=True, kw_only=True)
class Machine:
    gpu: str
    num_gpus: int
    cores: int
    memory: str
    cpu_flags: tuple[str, ...] = ("avx2", "f16c")
    has_compiler: bool = True
    torch_sees_gpu: bool = True


@dataclass(frozen=True, kw_only=True)
class Right:
    refused: str = ""
    workers: dict[str, dict[str, float | str]] = field(default_factory=dict)
    banner: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Case:
    machine: Machine
    right: Right
    checkpoint: dict[str, Any] = field(default_factory=dict)
    file: str = ""
    options: dict[str, int | str] = field(default_factory=dict)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A checkpoint whose config.json may be replaced."""
    for path in whole.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


def on_machine(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Let this host have what ``machine`` has; returns the rest of its facts."""
    for module in (resources, host_facts):
        monkeypatch.setattr(module, "installed_gpu", lambda: machine.gpu)
    monkeypatch.setattr(resources, "num_gpus", lambda: machine.num_gpus)
    monkeypatch.setattr(host_facts, "cpu_flags", lambda: {*machine.cpu_flags})
    monkeypatch.setattr(host_facts, "slow_kernels_reason", lambda: "" if machine.has_compiler else "no g++")
    return {"cores": tuple(range(machine.cores)), "memory_bytes": parse_bytes(machine.memory)}


def launched(case: Case, folder: Path) -> Launch:
    """What `pdserve up` starts with."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | case.checkpoint))
    file = None
    if case.file:
        file = folder / "deployment.yaml"
        file.write_text(case.file)
    options = dict(case.options)
    emulate = str(options.pop("emulate", ""))
    replicas = {role: cast(int | None, options.pop(role, None)) for role in ("prefill", "decode", "mixed")}
    assert not options
    deployment = read_deployment(file) if file else DeploymentConfig()
    return cli._launch(file, deployment, folder, replicas, "", 1, emulate)


def placed(case: Case, folder: Path, facts: dict[str, Any]) -> Fleet:
    """Its workers on this host."""
    launch = replace(launched(case, folder), **facts)
    check_model(launch)
    ray = SimpleNamespace(resources={"GPU": case.machine.num_gpus}, worker_resources={}, desk=None)
    fleet = Fleet(cast(Any, ray), launch, "", folder)
    fleet.find_hosts()
    for host in fleet.hosts:
        host.facts = replace(host.facts, **facts)
    assert fleet.place_workers(1.0) == ""
    return fleet


@pytest.mark.parametrize(("written", "dtype"), [("auto", "bfloat16"), ("float16", "float16")])
def test_simulations_compute_in_what_is_served(folder: Path, written: str, dtype: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert planned_model(ModelConfig(path=str(folder), dtype=written), "auto").precision.dtype == dtype


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.stem)
def test_a_deployment_becomes_what_is_right(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = from_plain(Case, yaml.safe_load(path.read_text()), path.name)
    facts = on_machine(case.machine, monkeypatch)
    if case.right.refused:
        with pytest.raises((ConfigError, DeployError), match=case.right.refused) as refusal:
            placed(case, folder, facts)
        assert "\n" not in str(refusal.value)
        return
    fleet = placed(case, folder, facts)
    configs = {worker.name: worker._config for worker in fleet.workers}
    found = {
        name: {
            "gpus": fleet._needs[name].gpu_share,
            "utilization": config.gpu_memory_utilization,
            "dtype": config.precision.dtype,
        }
        for name, config in configs.items()
    }
    assert found == case.right.workers
    for name, config in configs.items():
        assert config.model_digest == model_digest(folder)
        assert (config.device == "cpu") == (found[name]["gpus"] == 0)
    hardware = case.machine.gpu if case.machine.torch_sees_gpu else "cpu"
    status = {"hardware": hardware, "load": POOL, "products": "bfloat16" if hardware == "cpu" else ""}
    statuses = [{"role": config.role.value, **status} for config in configs.values()]
    rows = dict(banner_rows(fleet.launches[0], "m", statuses))
    assert set(rows) == {"model", "answers end"} | {config.role.value for config in configs.values()}
    for row, parts in case.right.banner.items():
        for part in parts:
            assert part in rows[row]


def test_cpus_that_multiply_in_different_dtypes_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = FOLDER / "no_gpu.yaml"
    case = from_plain(Case, yaml.safe_load(path.read_text()), path.name)
    fleet = placed(case, folder, on_machine(case.machine, monkeypatch))
    roles = {worker._config.role.value for worker in fleet.workers}
    for dtypes, words in (
        (("bfloat16",), "products in bfloat16,"),
        (("bfloat16", "float32"), "products in bfloat16 and float32 (CPUs differ; model.cpu_products: float32 makes"),
        (("",), ""),
    ):
        statuses = [
            {"role": role, "hardware": "cpu", "load": POOL, "products": dtype} for role in roles for dtype in dtypes
        ]
        rows = dict(banner_rows(fleet.launches[0], "m", statuses))
        for role in roles:
            assert words in f"{rows[role]},"
            assert ("products" in rows[role]) is bool(words)


def test_pools_of_which_not_every_worker_is_up_say_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = FOLDER / "no_gpu.yaml"
    case = from_plain(Case, yaml.safe_load(path.read_text()), path.name)
    fleet = placed(case, folder, on_machine(case.machine, monkeypatch))
    roles = sorted({worker._config.role.value for worker in fleet.workers})
    absent = {"role": roles[0], "hardware": "cpu", "load": dict.fromkeys(POOL, 0), "products": ""}
    rows = dict(
        banner_rows(fleet.launches[0], "m", [absent, *({**absent, "role": role, "load": POOL} for role in roles[1:])])
    )
    assert rows[roles[0]].startswith("0 of 1 worker, 0 tokens")
    for role in roles[1:]:
        assert rows[role].startswith("1 worker, ")
