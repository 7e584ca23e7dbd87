from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.kernels.cpu import build as cpu_build


@pytest.fixture
def compiler() -> str:
    found = shutil.which("g++")
    assert found is not None, "the C++ kernels are tested where g++ is installed"
    return found


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two small ones in place of the kernels."""
    paths = (tmp_path / "one.cpp", tmp_path / "two.cpp")
    for path in paths:
        path.write_text(f'extern "C" int {path.stem}() {{ return 42; }}\n')
    monkeypatch.setattr(cpu_build, "_SOURCES", paths)
    return paths


@pytest.mark.usefixtures("sources")
def test_a_library_of_all_sources_is_built_once_and_loads(
    tmp_path: Path, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not cpu_build.is_built()
    library = cpu_build.build_library(compiler, tmp_path / "pdserve")
    assert cpu_build.is_built()
    built = library.stat().st_ino
    assert cpu_build.build_library(compiler, tmp_path / "pdserve") == library
    assert library.stat().st_ino == built
    assert os.listdir(library.parent) == [library.name]
    kernels = ctypes.CDLL(str(library))
    assert (kernels.one(), kernels.two()) == (42, 42)


@pytest.mark.parametrize("is_loaded_again", [True, False])
def test_another_source_is_another_library_and_those_long_unused_go(
    is_loaded_again: bool, tmp_path: Path, compiler: str, sources: tuple[Path, Path]
) -> None:
    first = cpu_build.build_library(compiler, tmp_path)
    loaded = ctypes.CDLL(str(first))
    os.utime(first, (0, 0))
    if is_loaded_again:
        assert cpu_build.build_library(compiler, tmp_path) == first
    sources[1].write_text('extern "C" int two() { return 43; }\n')
    second = cpu_build.build_library(compiler, tmp_path)
    assert (loaded.two(), ctypes.CDLL(str(second)).two()) == (42, 43)
    assert first.exists() == is_loaded_again


def test_of_builders_at_the_same_time_one_compiles(tmp_path: Path, compiler: str, sources: tuple[Path, Path]) -> None:
    log, wrapper = tmp_path / "log", tmp_path / "bin" / "g++"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nsleep 0.2\necho "$@" >> {log}\nexec {compiler} "$@"\n')
    wrapper.chmod(0o755)
    program = f"""
from pathlib import Path
from pdserve.kernels.cpu import build as cpu_build
cpu_build._SOURCES = tuple(map(Path, {[*map(str, sources)]}))
assert cpu_build.load_library().two() == 42
"""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PATH": f"{wrapper.parent}:{os.environ['PATH']}"}
    builders = [subprocess.Popen([sys.executable, "-c", program], env=environment) for _ in range(3)]
    assert [builder.wait(timeout=240) for builder in builders] == [0, 0, 0]
    assert len(os.listdir(tmp_path / "pdserve")) == 1
    assert sum("-shared" in line for line in log.read_text().splitlines()) == 1


def test_a_user_without_a_home_has_a_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cpu_build.cache_folder() == Path("/.cache/pdserve")


@pytest.mark.parametrize("broken", ["no compiler", "compiler fails", "cache cannot be written"])
def test_without_a_build_there_is_a_warning_and_no_library(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if broken == "no compiler":
        monkeypatch.setenv("PATH", str(tmp_path))
    elif broken == "compiler fails":
        monkeypatch.setattr(cpu_build, "_FLAGS", ("-std=no-such-standard",))
    else:
        (tmp_path / "pdserve").write_text("a file where the folder should be")
    cpu_build.load_library.cache_clear()
    try:
        assert cpu_build.load_library() is None
    finally:
        cpu_build.load_library.cache_clear()
    assert "models run on plain torch" in caplog.text
