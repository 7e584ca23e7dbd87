"""What each room may load: a fresh interpreter imports all its modules, and what came along is looked at.

Modules are discovered, so that a new one is covered without being named here.
"""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from fnmatch import fnmatchcase

import pdserve
from tests.patience import HANG_S

TORCH_FREE = [
    "pdserve.contracts*",
    "pdserve.deploy*",
    "pdserve.router*",
    "pdserve.planner*",
    "pdserve.prefill_worker*",
    "pdserve.decode_worker*",
    "pdserve.engine.worker.scheduler",
    "pdserve.kv_transfer.block_pool",
    "pdserve.model.executors.block_copies",
    "pdserve.model.config.decoder_config",
    "pdserve.model.cost.cost_model",
    "pdserve.model.cost.hardware",
    "pdserve.model.executors.hash_chain",
    "pdserve.model.cost.step_grid",
    "pdserve.model.weights.files",
]
ENGINE = ["pdserve.contracts*", "pdserve.engine*", "pdserve.kernels*", "pdserve.kv_transfer*", "pdserve.model*"]
CLUSTER_LIBRARIES = ["ray", "fastapi", "uvicorn", "httpx", "msgspec", "typer"]
FOUND = [found.name for found in pkgutil.walk_packages(pdserve.__path__, "pdserve.")]
MODULES = [name for name in FOUND if not name.endswith(".__main__")]  # importing one runs a program


def modules_like(pattern: str) -> list[str]:
    return [name for name in MODULES if fnmatchcase(name, pattern)]


def loaded_by(modules: list[str], libraries: list[str]) -> dict[str, str]:
    """Which of ``libraries`` a fresh interpreter loads when it imports ``modules`` in this order, each with the module
    that brought it."""
    code = f"""
import importlib, sys
for name in {modules!r}:
    before = set(sys.modules)
    importlib.import_module(name)
    for library in {libraries!r}:
        if library in sys.modules and library not in before:
            print(library, name)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert run.returncode == 0, run.stderr
    return dict(line.split() for line in run.stdout.splitlines())


def test_the_edge_and_the_schedulers_load_no_model_library() -> None:
    found = {pattern: modules_like(pattern) for pattern in TORCH_FREE}
    assert all(found.values()), found
    modules = [name for each in found.values() for name in each]
    assert loaded_by(modules, ["torch", "transformers", "ray"]) == {}


def test_the_command_line_answers_without_what_only_some_commands_need() -> None:
    heavy = ["numpy", "grpc", "fastapi", "httpx", "jinja2", "tokenizers"]
    assert loaded_by(["pdserve.deploy.cli"], heavy) == {}
    assert "fastapi" not in loaded_by(["pdserve.deploy.cluster.supervisor"], heavy)


def test_engines_run_without_the_cluster_libraries() -> None:
    modules = [name for pattern in ENGINE for name in modules_like(pattern)]
    assert len(modules) > len(ENGINE)
    assert loaded_by(modules, CLUSTER_LIBRARIES) == {}


def test_kernels_are_measured_where_only_torch_and_triton_are() -> None:
    modules = modules_like("pdserve.bench.kernels.*")
    assert "pdserve.bench.kernels.run" in modules
    assert loaded_by(modules, [*CLUSTER_LIBRARIES, "rich", "matplotlib", "psutil", "transformers"]) == {}


def test_the_check_sees_what_is_loaded() -> None:
    assert loaded_by(["pdserve.model", "pdserve.model.sampling.sampling"], ["torch", "ray"]) == {
        "torch": "pdserve.model.sampling.sampling"
    }
