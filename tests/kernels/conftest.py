"""How kernels are tested: those in C++ on two threads, as few as show that their number does not matter; those of
Triton in its interpreter, by `tests.kernels.interpreted_files`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from pdserve.kernels.cpu_threads import use_threads
from tests.kernels.interpreted_files import InterpretedFiles

_FILES = pytest.StashKey[InterpretedFiles]()
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
        if _FILES not in self.config.stash:
            self.config.stash[_FILES] = InterpretedFiles(self.config.rootpath)
        run = self.config.stash[_FILES].run(self.path)
        if run.exit_code != 0:
            pytest.fail(f"exit status {run.exit_code}\n{run.output[-12000:]}", pytrace=False)


def pytest_unconfigure(config: pytest.Config) -> None:
    if _FILES in config.stash:
        config.stash[_FILES].close()
