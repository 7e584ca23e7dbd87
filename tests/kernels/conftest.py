"""How kernels are tested: those in C++ on two threads, as few as show that their number does not matter; those of
Triton in its interpreter, each file in a process of its own, because the interpreter is chosen by the environment as
kernels are imported, and a wild pointer there ends the process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from pdserve.kernels.cpu_threads import use_threads

IS_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

if IS_INTERPRETING:
    from tests.kernels import triton_interpreter

    triton_interpreter.install()


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    use_threads(2)
    yield
    use_threads(1)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if module_path.name.startswith("test_triton_") and not IS_INTERPRETING:
        module: pytest.Collector = _InterpretedModule.from_parent(parent, path=module_path)
        return module
    return None


class _InterpretedModule(pytest.File):
    """A file whose tests are one test here."""

    def collect(self) -> Iterable[pytest.Item]:
        yield _InterpretedRun.from_parent(self, name="interpreted")


class _InterpretedRun(pytest.Item):
    """All tests of a file, in a process with the interpreter."""

    def runtest(self) -> None:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            str(self.path),
        ]
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        run = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, cwd=self.config.rootpath
        )
        if run.returncode != 0:
            pytest.fail(f"exit status {run.returncode}\n{run.stdout[-8000:]}\n{run.stderr[-4000:]}", pytrace=False)
