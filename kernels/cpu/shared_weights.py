"""One packed copy of weights for all processes of a host that compute with them on the same memory node.

The first process packs them into a file in memory (memfd_create(2)), whose seals let nobody else write to it or resize
it. Others find it among the open files of the user's processes, and map it. The system frees it with the last process
that has it mapped, however that one ends; no weights are written to a disk.

One process packs at a time, under a lock that ends with it. Where that is impossible, each process has its own copy.
"""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch

from pdserve.kernels import weight_quantisation
from pdserve.kernels.cpu import dense
from pdserve.kernels.cpu.build import cache_folder, load_library
from pdserve.kernels.cpu.dense import CpuExperts, CpuLinear
from pdserve.kernels.cpu.memory_nodes import memory_nodes

_PROCESSES = Path("/proc")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SEAL_FUTURE_WRITE = 0x10
"""F_SEAL_FUTURE_WRITE of Linux 5.1, without a name in the standard library: only the mapping of who packed is written
to."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | _SEAL_FUTURE_WRITE
_ALIGNMENT = 64
"""Of tensors in the file, in bytes: as torch aligns its own."""
_LENGTH_BYTES = 8
_POLL_S = 0.1
_MAX_SILENCE_S = 60.0
"""Time without progress of a process that packs, after which others pack for themselves."""

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Packing:
    """Packs weights in this process's own memory."""

    def __call__(self, pack: Callable[[], _T]) -> _T:
        """Return the next weights; calls ``pack`` unless the copy has them."""
        return pack()

    def finish(self) -> None:
        """Make the copy known; all weights are packed."""


@contextmanager
def shared_weights(key: str, max_bytes: int) -> Iterator[Packing]:
    """Yield what packs the weights of ``key``. All who name it must ask for the same weights in the same order.

    Waits while another process packs them, until it is done, has ended, or does not progress for 60 s.

    Args:
        key: letters and digits.
        max_bytes: upper limit of the copy; takes address space, not memory.
    """
    with ExitStack() as stack:
        packing = Packing()
        try:
            _lock(key, stack)
            found = next((each for each in _files(key) if each.is_sealed), None)
            packing = _Mapped(found.path) if found else _Writing(key, max_bytes, stack)
        except OSError as error:
            _log_own_copy(error)
        yield packing
        packing.finish()


def present_bytes(key: str) -> int:
    """Memory that the copy of ``key`` takes, even if it is not yet complete; 0 for one that never will be."""
    return max((each.num_bytes for each in _files(key)), default=0)


def packed_form(cores: Iterable[int]) -> str:
    """Whatever a packed copy depends on besides the model: code, CPU, and the memory nodes of ``cores``, because others
    are slower to read."""
    digest = blake2b(digest_size=16)
    for file in (__file__, dense.__file__, weight_quantisation.__file__):
        digest.update(Path(file).read_bytes())
    library = load_library()
    assert library is not None
    return f"{digest.hexdigest()} {library._name} {sorted(memory_nodes(cores))}"


class _Writing(Packing):
    """Packs weights into a file."""

    def __init__(self, key: str, max_bytes: int, stack: ExitStack) -> None:
        self._fd = os.memfd_create(_name(key), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        stack.callback(os.close, self._fd)  # the mapping has one of its own, by which others find the file
        os.fchmod(self._fd, 0o600)
        os.ftruncate(self._fd, max_bytes)
        self._memory = mmap.mmap(self._fd, max_bytes)
        self._end = 0
        self._records: list[tuple[bool, list[dict[str, Any]]]] | None = []
        """Of the weights in the file: whether they are of experts, and parts; None once it had no room."""

    def __call__(self, pack: Callable[[], _T]) -> _T:
        packed = pack()
        assert isinstance(packed, CpuLinear | CpuExperts)
        if self._records is None:
            return packed
        try:
            record = [{name: self._write(part) for name, part in linear.items()} for linear in packed.parts()]
        except OSError as error:
            _log_own_copy(error)
            self._records = None
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)  # it will never be complete
            return packed
        self._records.append((isinstance(packed, CpuExperts), record))
        return cast(_T, type(packed).of_parts(_parts(self._memory, record)))

    def _write(self, part: torch.Tensor | int | None) -> list[Any] | int | None:
        if not isinstance(part, torch.Tensor):
            return part
        start, self._end = self._end, self._end + -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._end > len(self._memory):
            raise OSError(f"they take more than {len(self._memory)} bytes")
        os.posix_fallocate(self._fd, start, self._end - start)  # a write to memory that is not there ends the process
        record = str(part.dtype).removeprefix("torch."), list(part.shape), start
        _tensor(self._memory, *record).copy_(part)
        return list(record)

    def finish(self) -> None:
        if self._records is None:
            return
        text = json.dumps(self._records).encode()
        try:
            os.ftruncate(self._fd, self._end)
            os.lseek(self._fd, 0, os.SEEK_END)
            with open(self._fd, "wb", closefd=False) as file:
                file.write(text + len(text).to_bytes(_LENGTH_BYTES, "little"))
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            _log_own_copy(error)


class _Mapped(Packing):
    """Takes weights from a file."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            # Private, because torch wants memory that it may write to; none of it is.
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        end = len(self._memory) - _LENGTH_BYTES
        length = int.from_bytes(self._memory[end:], "little")
        self._records = iter(json.loads(self._memory[end - length : end]))

    def __call__(self, pack: Callable[[], _T]) -> _T:
        are_experts, record = next(self._records)
        kind: type[CpuLinear | CpuExperts] = CpuExperts if are_experts else CpuLinear
        return cast(_T, kind.of_parts(_parts(self._memory, record)))


def _parts(memory: mmap.mmap, record: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Weights with tensors in ``memory``."""
    return [
        {name: _tensor(memory, *part) if isinstance(part, list) else part for name, part in linear.items()}
        for linear in record
    ]


def _tensor(memory: mmap.mmap, dtype: str, shape: list[int], start: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.frombuffer(memory, dtype=getattr(torch, dtype), count=count, offset=start).view(shape)


class _File(NamedTuple):
    """A copy in a process of this user."""

    path: Path
    num_bytes: int
    is_sealed: bool
    """Complete."""


def _files(key: str) -> Iterator[_File]:
    name = f"/memfd:{_name(key)} (deleted)"
    for process in _PROCESSES.glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if process.stat().st_uid != os.geteuid():
                continue
            for path in (process / "fd").iterdir():
                with suppress(OSError):  # closed
                    if os.readlink(path) == name:
                        yield _described(path)


def _described(path: Path) -> _File:
    with path.open("rb") as file:
        status, seals = os.fstat(file.fileno()), fcntl.fcntl(file, fcntl.F_GET_SEALS)
    is_own = status.st_uid == os.geteuid()
    is_complete = seals & _SEALS == _SEALS
    is_usable = is_own and (is_complete or not seals & fcntl.F_SEAL_SEAL)
    return _File(path, status.st_blocks * 512 if is_usable else 0, is_own and is_complete)


def _lock(key: str, stack: ExitStack) -> None:
    """Hold this host's lock of ``key``, a byte of a file of all keys, until ``stack`` ends. Other hosts may have the
    file, too. Raises OSError if that fails, or who has it does not progress."""
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(folder / "weights.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    stack.callback(os.close, fd)
    digest = blake2b(key.encode() + _BOOT_ID.read_bytes(), digest_size=7)
    offset = int.from_bytes(digest.digest(), "little")
    num_bytes, deadline = -1, time.monotonic() + _MAX_SILENCE_S
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
            return
        except (BlockingIOError, PermissionError):
            if (num_now := present_bytes(key)) != num_bytes:
                num_bytes, deadline = num_now, time.monotonic() + _MAX_SILENCE_S
            elif time.monotonic() > deadline:
                raise TimeoutError(f"the process that packs them did nothing for {_MAX_SILENCE_S:.0f} s") from None
        time.sleep(_POLL_S)


def _name(key: str) -> str:
    return f"pdserve-weights-{key}"


def _log_own_copy(error: OSError) -> None:
    _log.warning("this process has a copy of the weights of its own: %s", error)
