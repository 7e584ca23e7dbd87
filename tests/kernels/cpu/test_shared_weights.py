"""Processes of a host share packed weights; whatever happens to one of them, the others have the right ones."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import torch

from pdserve.kernels.cpu import shared_weights as module
from pdserve.kernels.cpu.build import load_library
from pdserve.kernels.cpu.dense import CpuExperts, CpuLinear, pack_experts, pack_linear
from pdserve.kernels.cpu.shared_weights import present_bytes, shared_weights
from pdserve.kernels.weight_quantisation import quantise
from tests.kernels.random_tensors import random

pytestmark = pytest.mark.skipif(load_library() is None, reason="needs the compiled kernels")

MAX_BYTES = 2**24
_PACK = """
import sys, time, torch
from pdserve.kernels.cpu.dense import pack_linear
from pdserve.kernels.cpu.shared_weights import shared_weights
with shared_weights(sys.argv[1], 2**24) as pack:
    first = pack(lambda: pack_linear(torch.ones(64, 32)))
    print("first", flush=True)
    if sys.argv[2] == "stop":
        time.sleep(1000)
    pack(lambda: pack_linear(torch.ones(64, 32)))
print("all", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def key() -> str:
    return uuid4().hex


@pytest.fixture
def start(key: str) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start a process that packs ones, all or the first only, and return it when it has."""
    started = []

    def run(until: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _PACK, key, until]
        started.append(process := subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert process.stdout is not None
        assert process.stdout.readline() == "first\n"
        assert until == "stop" or process.stdout.readline() == "all\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def ones() -> CpuLinear:
    return pack_linear(torch.ones(64, 32))


def never() -> CpuLinear:
    pytest.fail("packed again")


def product(linear: CpuLinear) -> torch.Tensor:
    return linear(torch.ones(1, 32))


def weights() -> list[Callable[[], CpuLinear | CpuExperts]]:
    """Every form of weights."""
    weight_FE, bias_F = random(70, 256), random(70)
    permutation = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    grouped = quantise(weight_FE, "int4")
    return [
        lambda: pack_linear(weight_FE),
        lambda: pack_linear(weight_FE.bfloat16(), bias_F),
        lambda: pack_linear(quantise(weight_FE, "int8"), bias_F),
        lambda: pack_linear(grouped._replace(permutation=permutation)),
        lambda: pack_experts([weight_FE.half(), weight_FE.half()], random(2, 70)),
        lambda: pack_experts([grouped]),
    ]


def test_mapped_weights_are_those_that_were_packed_bit_for_bit(key: str) -> None:
    packs = weights()
    with shared_weights(key, MAX_BYTES) as pack:
        written = [pack(each) for each in packs]
    with shared_weights(key, MAX_BYTES) as pack:
        mapped = [pack(never) for _ in packs]
    x_TE = random(6, 256)
    for make, *shared in zip(packs, written, mapped, strict=True):
        own = make()
        for each in shared:
            assert type(each) is type(own)
            assert each.num_bytes == own.num_bytes
            if isinstance(own, CpuExperts):
                assert isinstance(each, CpuExperts)
                starts_Y = torch.tensor([0, 4, 6][: len(own.parts()) + 1])
                assert torch.equal(each(x_TE[: starts_Y[-1]], starts_Y), own(x_TE[: starts_Y[-1]], starts_Y))
            else:
                assert isinstance(each, CpuLinear)
                assert torch.equal(each(x_TE), own(x_TE))
                assert torch.equal(each.rows(torch.tensor([69, 0])), own.rows(torch.tensor([69, 0])))
    assert present_bytes(key) > sum(each.num_bytes for each in written)


def test_weights_go_with_the_last_process_that_has_them(
    key: str, start: Callable[[str], subprocess.Popen[str]]
) -> None:
    owner, other = start("end"), start("end")
    owner.kill()
    owner.wait()
    with shared_weights(key, MAX_BYTES) as pack:
        linear = pack(never)
    other.kill()
    other.wait()
    assert torch.equal(product(linear), product(ones()))
    assert present_bytes(key) > 0
    del linear, pack
    assert present_bytes(key) == 0


def test_weights_of_a_process_that_was_killed_while_it_packed_are_packed_anew(
    key: str, start: Callable[[str], subprocess.Popen[str]]
) -> None:
    owner = start("stop")
    assert present_bytes(key) > 0
    owner.kill()
    with shared_weights(key, MAX_BYTES) as pack:
        packed = [pack(ones), pack(ones)]
    with shared_weights(key, MAX_BYTES) as pack:
        assert torch.equal(product(pack(never)), product(packed[0]))


def test_nobody_waits_for_a_process_that_does_not_progress(
    key: str,
    start: Callable[[str], subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "_MAX_SILENCE_S", 0.3)
    start("stop")
    begun = time.monotonic()
    with shared_weights(key, MAX_BYTES) as pack:
        assert torch.equal(product(pack(ones)), product(ones()))
    assert 0.3 <= time.monotonic() - begun < 10
    assert "a copy of the weights of its own: the process that packs them did nothing" in caplog.text


def test_other_keys_do_not_wait(start: Callable[[str], subprocess.Popen[str]]) -> None:
    start("stop")
    with shared_weights(uuid4().hex, MAX_BYTES) as pack:
        assert isinstance(pack(ones), CpuLinear)


def test_other_hosts_that_have_the_same_folder_do_not_wait(
    key: str, start: Callable[[str], subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start("stop")
    (tmp_path / "boot_id").write_text("of another host")
    monkeypatch.setattr(module, "_BOOT_ID", tmp_path / "boot_id")
    monkeypatch.setattr(module, "_MAX_SILENCE_S", 0.3)
    with shared_weights(key, MAX_BYTES) as pack:
        packed = [pack(ones), pack(ones)]
    with shared_weights(key, MAX_BYTES) as pack:
        assert torch.equal(product(pack(never)), product(packed[0]))


def test_files_that_are_not_complete_or_may_be_written_to_are_not_used(key: str) -> None:
    fd = os.memfd_create(f"pdserve-weights-{key}", os.MFD_ALLOW_SEALING)
    os.write(fd, b"1" * mmap.PAGESIZE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    with shared_weights(key, MAX_BYTES) as pack:
        assert torch.equal(product(pack(ones)), product(ones()))
    os.close(fd)


def test_nobody_may_write_to_shared_weights(key: str) -> None:
    with shared_weights(key, MAX_BYTES) as pack:
        linear = pack(ones)
    (path,) = {each.path for each in module._files(key)}
    fd = os.open(path, os.O_RDWR)
    for write in (
        lambda: os.write(fd, b"1"),
        lambda: os.ftruncate(fd, 1),
        lambda: mmap.mmap(fd, mmap.PAGESIZE),
    ):
        with pytest.raises(OSError, match="not permitted"):
            write()
    assert os.fstat(fd).st_mode & 0o777 == 0o600
    os.close(fd)
    assert torch.equal(product(linear), product(ones()))


def test_a_copy_without_room_for_all_weights_does_not_count(key: str) -> None:
    with shared_weights(key, 10_000) as pack:
        first = pack(ones)
        assert present_bytes(key) > 0
        assert torch.equal(product(pack(ones)), product(first))
        assert present_bytes(key) == 0
    with shared_weights(key, MAX_BYTES) as pack:
        packed = [pack(ones), pack(ones)]
    assert present_bytes(key) >= sum(each.num_bytes for each in packed)


@pytest.mark.parametrize("is_folder", [False, True])
def test_weights_are_packed_apart_where_nothing_can_be_shared(
    key: str, is_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not is_folder:
        (tmp_path / "pdserve").write_text("no folder")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    max_bytes = MAX_BYTES if not is_folder else mmap.PAGESIZE
    with shared_weights(key, max_bytes) as pack:
        for _ in range(3):
            assert torch.equal(product(pack(ones)), product(ones()))
    assert caplog.text.count("a copy of the weights of its own") == 1
    with shared_weights(key, max_bytes) as pack:
        assert isinstance(pack(ones), CpuLinear)
