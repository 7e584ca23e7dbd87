"""How kernels are tested: those in C++ on two threads, as few as show that their number does not matter; those of
Triton in its interpreter, by `tests.kernels.interpreted_files`, and on a GPU, by `tests.gpu.test_on_gpu`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from pdserve.kernels.cpu.threads import use_threads
from tests.gpu.device import on_device
from tests.gpu.on_gpu import IS_ON_GPU
from tests.kernels.interpreted_files import InterpretedFiles

_FILES = pytest.StashKey[InterpretedFiles]()
IS_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
_LAUNCHERS = {
    "combine",
    "decode_attention",
    "draw_tokens",
    "find_top_p",
    "gate",
    "gather_blocks",
    "paged_attention",
    "prefill_attention",
    "quantized_matmul",
    "rms_normalise",
    "rope_and_write_kv",
    "scatter_blocks",
    "sort_pairs",
}
"""Of the kernels in Triton, as their tests import them."""

if IS_INTERPRETING:
    from tests.kernels import triton_interpreter

    triton_interpreter.install()


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    use_threads(2)
    yield
    use_threads(1)


@pytest.fixture
def interpreted_files(pytestconfig: pytest.Config) -> InterpretedFiles:
    return _interpreted_files(pytestconfig)


@pytest.fixture(autouse=IS_ON_GPU)
def _kernels_on_the_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a file's tests launch runs on the GPU."""
    for name in _LAUNCHERS & vars(request.module).keys():
        monkeypatch.setattr(request.module, name, on_device(getattr(request.module, name)))


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if module_path.parent.name == "triton" and not (IS_INTERPRETING or IS_ON_GPU):
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
        run = _interpreted_files(self.config).run(self.path)
        if run.exit_code != 0:
            pytest.fail(f"exit status {run.exit_code}\n{run.output[-12000:]}", pytrace=False)


def _interpreted_files(config: pytest.Config) -> InterpretedFiles:
    """Started when it is first needed."""
    if _FILES not in config.stash:
        config.stash[_FILES] = InterpretedFiles(config.rootpath)
    return config.stash[_FILES]


def pytest_unconfigure(config: pytest.Config) -> None:
    if _FILES in config.stash:
        config.stash[_FILES].close()
