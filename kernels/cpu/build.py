"""Builds the C++ kernels for this machine's CPU on first use and keeps the library in a per-user cache.

Needs only g++, no torch or Python headers. If several processes start at once, one builds and the others wait. Never
fails the caller: without a compiler there is no library. ``python -m pdserve.kernels.cpu.build`` compiles ahead.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

_SOURCES = tuple(
    Path(__file__).with_name(f"{part}.cpp")
    for part in ("attention", "dense", "pointwise", "ranks", "rope", "sampling", "threads")
)
_HEADERS = tuple(Path(__file__).with_name(f"{part}.h") for part in ("pairs", "pool", "threads", "tiles", "vectors"))
# Aligned, because an unrelated change that moved loops by 16 bytes made decode steps 15 % slower on an EPYC.
_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fno-trapping-math", "-pthread", "-fPIC"),
    *("-falign-functions=64", "-falign-loops=64"),
)
_COMPILE_TIMEOUT_S = 600.0
_MAX_UNUSED_S = 30 * 24 * 3600.0
"""Libraries that no process has loaded for so long are removed when another is built: those of earlier sources."""

_log = logging.getLogger(__name__)


@cache
def load_library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or ``None`` if they cannot be built; logs the reason once."""
    compiler = shutil.which("g++")
    if compiler is None:
        _log.warning("g++ was not found: models run on plain torch, slower; install g++ to speed it up")
        return None
    try:
        return ctypes.CDLL(str(build_library(compiler, cache_folder())))
    except subprocess.CalledProcessError as error:
        _log.warning("g++ failed: models run on plain torch, slower. %s", error.stderr[-2000:])
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.warning("the C++ kernels could not be built: models run on plain torch, slower. %s", error)
    return None


def kernel(name: str, *argument_types: Any) -> Any:
    """Return the compiled void function ``name``. Requires that `load_library` found the library."""
    library = load_library()
    assert library is not None, "the C++ kernels are not available: the selection was not asked"
    function = library[name]
    function.argtypes, function.restype = argument_types, None
    return function


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/pdserve``, or ``~/.cache/pdserve``."""
    try:
        home = Path.home()
    except RuntimeError:  # neither ``HOME`` nor an entry of this user, as in containers
        home = Path("/")
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "pdserve"


def has_compiler() -> bool:
    return shutil.which("g++") is not None


def is_built() -> bool:
    """Report whether the cache holds the library for this machine."""
    compiler = shutil.which("g++")
    return compiler is not None and _library(compiler, cache_folder()).exists()


def _library(compiler: str, folder: Path) -> Path:
    return folder / _library_name(_build_key(compiler))


def _library_name(key: str) -> str:
    return f"cpu_kernels-{key}.so"


def build_library(compiler: str, folder: Path) -> Path:
    """Return the path in ``folder`` of the library for these sources, compiler and CPU; compile it if missing.

    Raises:
        subprocess.CalledProcessError, subprocess.TimeoutExpired: the compiler failed.
        OSError: ``folder`` cannot be written.
    """
    library = _library(compiler, folder)
    if library.exists():
        with suppress(OSError):  # of another user
            os.utime(library)
        return library
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(folder):
        if not library.exists():
            for other in folder.glob(_library_name("*")):
                if time.time() - other.stat().st_mtime > _MAX_UNUSED_S:
                    with suppress(OSError):  # of another user
                        other.unlink()  # a process that still runs keeps what it has mapped
            with tempfile.TemporaryDirectory(dir=folder) as work:
                _compile(compiler, Path(work) / library.name).replace(library)
    return library


def _compile(compiler: str, library: Path) -> Path:
    """Compile all sources in parallel and link them; ``library`` has a private folder."""
    objects = [library.with_name(f"{source.stem}.o") for source in _SOURCES]
    commands = [
        [compiler, *_FLAGS, "-c", str(source), "-o", str(compiled)]
        for source, compiled in zip(_SOURCES, objects, strict=True)
    ]
    with ThreadPoolExecutor(len(commands)) as threads:
        list(threads.map(_run, commands))
    _run([compiler, *_FLAGS, "-shared", *map(str, objects), "-o", str(library)])
    return library


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock ``folder`` against other builders; the operating system releases the lock if this process dies."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _build_key(compiler: str) -> str:
    """Hash everything that determines the machine code; ``-march=native`` adds the CPU's features."""
    digest = blake2b(digest_size=12)
    sources = [source.read_bytes() for source in (*_SOURCES, *_HEADERS)]
    for part in (*sources, " ".join(_FLAGS).encode(), _run([compiler, "--version"]), _cpu_features()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _cpu_features() -> bytes:
    cpu_info = Path("/proc/cpuinfo").read_bytes().splitlines()
    wanted = (b"vendor_id", b"cpu family", b"model", b"flags", b"Features")
    return b"\n".join(sorted({line for line in cpu_info if line.startswith(wanted)}))


def _run(command: list[str]) -> bytes:
    return subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_TIMEOUT_S).stdout


if __name__ == "__main__":
    sys.exit(load_library() is None)
