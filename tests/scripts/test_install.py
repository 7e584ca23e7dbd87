"""``scripts/install`` on machines that are not this one: other Pythons, and packages of the registry alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from tests.patience import HANG_S

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13")
CONSTRAINTS = ROOT / "constraints.txt"


def project() -> Any:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pip_settings() -> dict[str, str]:
    """Settings of this machine's pip, such as the registry's address."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    return dict(re.findall(r"^\S+\.([a-z-]+)='(.*)'$", listed.stdout, re.MULTILINE))


def resolved(python: str, constraints: Iterable[str], folder: Path) -> set[str]:
    """Names and versions that an installation with every extra takes from the registry; downloads no wheel for it.

    Unlike pip, uv reads the metadata at the end of a wheel where the registry has none beside it. It knows nothing of
    other sources that this machine's pip is told of.
    """
    settings = pip_settings()
    (folder / "constraints.txt").write_text("\n".join(constraints))
    files = [str(folder / "constraints.txt"), *settings.get("constraint", "").split()]
    command = [sys.executable, "-m", "uv", "pip", "compile", "--no-config", "--quiet", "--all-extras"]
    command += ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28", "--only-binary", ":all:"]
    command += ["--no-header", "--no-annotate", *(f"--constraints={file}" for file in files), "pyproject.toml"]
    if "index-url" in settings:
        command += ["--default-index", settings["index-url"]]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    if "Failed to fetch" in run.stderr:
        pytest.skip(f"the registry does not answer: {run.stderr}")
    assert run.returncode == 0, run.stderr
    return {line.lower().replace("_", "-") for line in run.stdout.splitlines()}


def pins() -> list[str]:
    return [line for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]


def test_the_pythons_that_are_claimed_are_those_tried() -> None:
    claimed = project()
    assert list(SpecifierSet(claimed["requires-python"]).filter(f"3.{minor}.1" for minor in range(30))) == [
        f"{python}.1" for python in PYTHONS
    ]
    named = [line.split(" :: ")[-1] for line in claimed["classifiers"] if ":: Python ::" in line]
    assert named == list(PYTHONS)


@pytest.mark.parametrize("python", PYTHONS)
def test_the_registry_alone_has_all_that_is_pinned_and_all_is_pinned(python: str, tmp_path: Path) -> None:
    packages = resolved(python, pins(), tmp_path)
    assert len(packages) > 100
    assert packages - {pin.lower().replace("_", "-") for pin in pins()} == set()


def test_a_gpu_image_keeps_its_torch(tmp_path: Path) -> None:
    image = ["torch==2.11.0", "triton==3.6.0"]
    others = [pin for pin in pins() if not pin.startswith(("torch=", "triton=", "setuptools=", "nvidia-", "cuda-"))]
    assert set(image) < resolved("3.12", [*others, *image], tmp_path)


class Machine:
    """A checkout with nothing but ``scripts/install``, and a folder of interpreters of which each has one version."""

    def __init__(self, folder: Path) -> None:
        self._bin = folder / "bin"
        self.script = folder / "checkout/scripts/install"
        self._bin.mkdir()
        self.script.parent.mkdir(parents=True)
        shutil.copy(ROOT / "scripts/install", self.script)
        for file in ("pyproject.toml", "constraints.txt"):
            (self.script.parents[1] / file).touch()

    def add_python(self, name: str, version: str) -> Path:
        """Knows its version, and how to make a virtual environment whose Python is itself and says what it runs.

        ``version`` is such as ``(3, 12)``; empty for the stub of a version manager that has none of this name.
        """
        path = self._bin / name
        path.write_text(
            f"""#!/bin/bash
            [[ -n "{version}" ]] || exit 127
            case $1$2 in
              -c*) exec {sys.executable} -c "import sys; sys.version_info = {version}; $2" ;;
              -mvenv) mkdir -p .venv/bin && cp "$0" .venv/bin/python && echo "$0 $*" >>log ;;
              *) echo "$0 $*" >>log ;;
            esac"""
        )
        path.chmod(0o755)
        return path

    def install(self, python: str = "") -> subprocess.CompletedProcess[str]:
        environment = {"PATH": f"{self._bin}:/usr/bin:/bin", "PYTHON": python}
        return subprocess.run(
            [self.script], env=environment, capture_output=True, text=True, timeout=HANG_S, check=False
        )

    def log(self) -> list[str]:
        """Commands that interpreters have run since the last call, without options, in alphabetical order: two run side
        by side."""
        log = self.script.parents[1] / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return sorted(" ".join(line.replace(f"{self._bin}/", "").split()[:4]) for line in lines)


INSTALLED = [
    f".venv/bin/python -m {command}" for command in ("compileall -qq", "pdserve.kernels.cpu.build", "pip install")
]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    for name in ("python3.11", "python3.12", "python3.13", "python3"):
        machine.add_python(name, "")
    return machine


def test_the_first_python_that_runs_and_fits_is_taken_and_kept(machine: Machine) -> None:
    machine.add_python("python3", "(3, 14)")
    machine.add_python("python3.13", "(3, 13)")
    run = machine.install()
    assert run.returncode == 0, run.stderr
    assert machine.log() == [*INSTALLED, "python3.13 -m venv --clear"]
    machine.add_python("python3.11", "(3, 11)")
    assert machine.install().returncode == 0
    assert machine.log() == []  # it is current
    constraints = machine.script.parents[1] / "constraints.txt"
    constraints.write_text("torch==3")
    assert machine.install().returncode == 0
    assert machine.log() == INSTALLED


def test_a_named_python_replaces_an_environment_of_another_version(machine: Machine) -> None:
    machine.add_python("python3.12", "(3, 12)")
    assert machine.install().returncode == 0
    other = machine.add_python("other", "(3, 11)")
    machine.log()
    assert machine.install(str(other)).returncode == 0
    assert machine.log() == [*INSTALLED, "other -m venv --clear"]
    assert machine.install().returncode == 0
    assert machine.log() == []


@pytest.mark.parametrize("python", ["python3.10", "python3.12", "/opt/no/python"])
def test_a_named_python_that_does_not_fit_is_refused_and_no_other_taken(machine: Machine, python: str) -> None:
    machine.add_python("python3.10", "(3, 10)")
    machine.add_python("python3.11", "(3, 11)")
    run = machine.install(python)
    assert run.returncode == 1
    assert "Python 3.11 to 3.13" in run.stderr
    assert python in run.stderr
    assert "PYTHON=/" in run.stderr
    assert machine.log() == []


def test_without_a_python_that_fits_those_tried_are_named(machine: Machine) -> None:
    run = machine.install()
    assert run.returncode == 1
    assert "python3.11 python3.12 python3.13 python3" in run.stderr
    assert "python3-venv" in run.stderr
