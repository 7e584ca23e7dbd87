"""Settings of all tests, and the order in which pytest-xdist hands out files."""

from __future__ import annotations

import contextlib
import gc
import signal
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from tests.patience import HANG_S

# A shell makes its background jobs ignore SIGINT, and every process that they start inherits that: tests could not
# interrupt a cluster or a chat.
signal.signal(signal.SIGINT, signal.default_int_handler)

with contextlib.suppress(ModuleNotFoundError):  # A machine that runs only the GPU tests may lack it.
    from hypothesis import settings

    # The time of one example depends on the machine, not on the code under test.
    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")

with contextlib.suppress(ModuleNotFoundError):
    from httpx._config import DEFAULT_TIMEOUT_CONFIG

    DEFAULT_TIMEOUT_CONFIG.read = HANG_S  # 5 s, which a busy machine may take to answer

LONG_FILES = (
    "test_same_tokens.py",
    "test_kernels_compile.py",
    "test_real_workers.py",
    "test_worker.py",
    "test_families.py",
    "tests/e2e/",
    "test_search.py",
    "test_schedulers_property.py",
    "test_gpu_rehearsal.py",
    "executors/test_model.py",
    "test_up.py",
    "tests/deploy/",
    "tests/bench/",
    "tests/kernels/",
    "tests/planner/",
    "tests/kv_transfer/",
    "tests/loadgen/",
    "tests/scripts/",
    "test_imports.py",
    "tests/router/test_main.py",
    "test_fuzz.py",
)
"""Parts of paths of files to start first, in this order, so that no process is left with a long file at the end. Those
that need the compiled simulator come when `scripts/test` has compiled it."""
INDEPENDENT_TESTS = ("::test_a_launch_fits_the_gpu[", "test_families.py::test_same_tokens[")
"""Many long tests that share next to nothing, so processes may divide them."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Python looks for garbage while modules load, and later in all that they hold: a third of the collection's time,
    in each process."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Each process begins to load a folder elsewhere, so that not all of them compile the same new module at once."""
    report = yield
    workers = getattr(collector.config, "workerinput", None)
    if workers and report.result and isinstance(collector, pytest.Directory):
        first = int(workers["workerid"].removeprefix("gw")) * len(report.result) // workers["workercount"]
        report.result = report.result[first:] + report.result[:first]
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> tuple[int, str]:
        path = item.nodeid.partition("::")[0]
        return next((i for i, part in enumerate(LONG_FILES) if part in path), len(LONG_FILES)), path

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadfile`` in the order of collection, except for `INDEPENDENT_TESTS`."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Schedule(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            is_alone = any(name in nodeid for name in INDEPENDENT_TESTS)
            return nodeid if is_alone else str(super()._split_scope(nodeid))

    config.option.loadscopereorder = False
    return Schedule(config, log)
