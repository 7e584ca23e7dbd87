"""Copies in the file, what is found again, what is never used, and how the tier switches itself off."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableSequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from pdserve.contracts.block_hash import block_hashes
from pdserve.contracts.kv_layout import KvLayout
from pdserve.kv_transfer import file_tier
from pdserve.kv_transfer.block_pool import BlockPool
from pdserve.kv_transfer.file_tier import FileTier
from pdserve.kv_transfer.pool_memory import PoolMemory

LAYOUT = KvLayout(
    num_blocks=4, num_kv_heads=2, num_layers=1, block_size=4, head_dim=3, dtype="bfloat16", model_hash="a model"
)
HASHES = block_hashes(range(100), LAYOUT.block_size)


class Worker:
    """A pool of four blocks over a tier of six, whose thread runs when `work` says so."""

    def __init__(self, path: Path, layout: KvLayout = LAYOUT, secret: str = "secret", max_model_len: int = 100) -> None:
        self.memory = PoolMemory.create(layout)
        self.pool = BlockPool(4, layout.block_size, cast(MutableSequence[int], self.memory.generations))
        self.ended: list[int] = []
        self.tier = FileTier(
            path,
            self.memory,
            self.pool,
            size_bytes=2 * 4096 + 6 * (4096 + 48),
            max_model_len=max_model_len,
            secret=secret,
            on_restored=self.ended.append,
        )
        self.known: set[bytes] = set()
        """As routers are told."""

    def block(self, index: int) -> memoryview[int]:
        return self.memory.block(index, 0, 2)

    def follow(self) -> None:
        events = self.tier.follow(self.pool.take_cache_events())
        assert not set(events.stored) & set(events.evicted)
        assert set(events.evicted) <= self.known
        self.known = self.known.difference(events.evicted).union(events.stored)

    def work(self) -> None:
        while self.tier.work():
            pass

    def cache(self, *indices: int, work: bool = True) -> None:
        """Compute blocks whose content follows from their hashes, and release them."""
        blocks = self.pool.allocate(len(indices))
        for block, index in zip(blocks, indices, strict=True):
            self.block(block)[:] = content(index)
        self.pool.register(blocks, [HASHES[index] for index in indices])
        self.pool.release(blocks)
        self.follow()
        if work:
            self.work()

    def restore(self, *indices: int) -> list[bytes]:
        """Restore what matches; returns the contents that arrived."""
        hashes = self.tier.match(HASHES[index] for index in indices)
        blocks = self.pool.allocate(len(hashes))
        self.tier.restore(7, hashes, blocks)
        self.work()
        assert self.ended.pop() == 7
        num_done, _ = self.tier.end_restore(7)
        contents = [bytes(self.block(block)) for block in blocks[:num_done]]
        self.pool.release(blocks)
        self.follow()
        return contents

    def restart(self, path: Path) -> Worker:
        self.tier.close()
        return Worker(path)


def content(index: int) -> bytes:
    return HASHES[index] * (LAYOUT.block_bytes // 16)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "worker.kv"


def test_evicted_blocks_come_back_and_routers_know_what_either_holds(path: Path) -> None:
    worker = Worker(path)
    worker.cache(0, 1)
    worker.cache(2, 3, 4, 5)  # evicts both
    assert not worker.pool.match_prefix(HASHES)
    assert worker.known == set(HASHES[:6])
    assert worker.restore(0, 1, 9) == [content(0), content(1)]
    worker.cache(6, 7, 8, 9)  # the tier has six slots: those that the pool evicted first go
    assert worker.known == {*HASHES[2:4], *HASHES[6:10]}


def test_a_block_evicted_before_its_copy_is_not_copied(path: Path) -> None:
    worker = Worker(path)
    worker.cache(0, work=False)
    blocks = worker.pool.allocate(4)
    for block in blocks:
        worker.block(block)[:] = content(9)
    worker.work()
    assert not worker.tier.match(HASHES)
    worker.pool.release(blocks)
    worker.follow()
    assert not worker.known


def test_a_block_that_the_pool_has_keeps_its_copy(path: Path) -> None:
    worker = Worker(path)
    worker.cache(0)
    worker.pool.share(worker.pool.match_prefix(HASHES[:1]))
    for index in range(1, 9):
        worker.cache(index)
    assert worker.tier.match(HASHES[:1]) == HASHES[:1]


def test_a_restarted_worker_finds_its_blocks(path: Path) -> None:
    worker = Worker(path)
    worker.cache(0, 1, 2)
    worker = worker.restart(path)
    worker.follow()
    assert worker.known == set(HASHES[:3])
    assert worker.restore(0, 1, 2, 3) == [content(0), content(1), content(2)]
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_was_found_is_told_in_parts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(path)
    worker.cache(0, 1, 2, 3)
    worker.cache(4, 5)
    worker = worker.restart(path)
    monkeypatch.setattr(file_tier, "TOLD_AT_ONCE", 2)
    worker.follow()
    assert len(worker.known) == 2
    worker.cache(6, 7, 8)  # the least recently used slots go; `follow` asserts that none is taken back untold
    worker.follow()
    held = {each for each in HASHES if worker.tier.match([each])}
    assert worker.known == held >= set(HASHES[6:9])


def test_damage_is_never_used_and_is_mended(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(path)
    worker.cache(0, 1)
    worker.tier.close()
    data = bytearray(path.read_bytes())
    data[data.index(content(1)) + 5] ^= 1
    path.write_bytes(data)
    worker = Worker(path)
    assert worker.restore(0, 1) == [content(0)]
    assert "damaged" in caplog.text
    assert worker.tier.match(HASHES) == HASHES[:1]
    worker.cache(1)
    assert worker.restore(0, 1) == [content(0), content(1)]


def test_a_slot_with_the_content_of_another_is_not_used(path: Path) -> None:
    worker = Worker(path)
    worker.cache(0, 1)
    worker.tier.close()
    data = path.read_bytes()
    path.write_bytes(data.replace(content(0), content(1)))
    assert Worker(path).restore(0, 1) == []


@pytest.mark.parametrize(("num_bytes", "num_whole"), [(0, 0), (4100, 0), (8200, 0), (9000, 1), (16384, 2), (16600, 3)])
def test_a_cut_file_gives_what_is_whole(path: Path, num_bytes: int, num_whole: int) -> None:
    worker = Worker(path)
    worker.cache(0, 1, 2)
    worker.tier.close()
    os.truncate(path, num_bytes)
    restored = Worker(path).restore(0, 1, 2)
    assert restored == [content(index) for index in range(num_whole)]


@pytest.mark.parametrize(
    ("layout", "secret", "max_model_len"),
    [
        (replace(LAYOUT, model_hash="another"), "secret", 100),
        (replace(LAYOUT, dtype="float16"), "secret", 100),
        (replace(LAYOUT, num_kv_heads=4, head_dim=1), "secret", 100),
        (LAYOUT, "another", 100),
        (LAYOUT, "secret", 200),
    ],
    ids=["model", "dtype", "heads", "cluster", "length"],
)
def test_a_foreign_file_is_begun_anew(
    path: Path, layout: KvLayout, secret: str, max_model_len: int, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(path)
    worker.cache(0)
    worker.tier.close()
    other = Worker(path, layout, secret, max_model_len)
    other.follow()
    assert not other.known
    assert "begun anew" in caplog.text
    other.tier.close()
    assert not Worker(path).tier.match(HASHES)


def test_a_foreign_entry_is_not_used(path: Path) -> None:
    """Though somebody put it into this cluster's file."""
    worker = Worker(path, secret="another")
    worker.cache(0)
    worker.tier.close()
    foreign = path.read_bytes()
    path.unlink()
    own = Worker(path)
    own.tier.close()
    path.write_bytes(path.read_bytes()[:4096] + foreign[4096:])
    own = Worker(path)
    assert own.tier.match(HASHES) == HASHES[:1]
    assert own.restore(0) == []


def test_doubtful_content_is_forgotten_in_the_file_too(path: Path) -> None:
    worker = Worker(path)
    worker.cache(0, 1)
    blocks = worker.pool.match_prefix(HASHES[:1])
    worker.pool.forget(blocks)
    worker.follow()
    worker.work()
    assert not worker.tier.match(HASHES)
    assert worker.known == {HASHES[1]}
    assert worker.restart(path).tier.match(HASHES[:2]) == []


def test_nothing_is_written_after_the_end_of_a_restore(path: Path) -> None:
    worker = Worker(path)
    worker.cache(0)
    worker.cache(1, 2, 3, 4)
    block = worker.pool.allocate(1)
    worker.tier.restore(1, HASHES[:1], block)
    assert worker.tier.end_restore(1) == (0, 0.0)
    worker.block(block[0])[:] = content(9)
    worker.work()
    assert bytes(worker.block(block[0])) == content(9)


def _delete(worker: Worker, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.unlink()


def _fill_disk(worker: Worker, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "pwrite", full)


def _take_a_part(worker: Worker, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: len(data) - 1)


@pytest.mark.parametrize("break_it", [_delete, _fill_disk, _take_a_part])
def test_a_tier_whose_file_fails_switches_itself_off_with_one_line(
    path: Path, break_it: object, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(path)
    worker.cache(0, 1)
    worker.cache(2, 3, 4, 5)
    assert callable(break_it)
    break_it(worker, path, monkeypatch)
    for index in (6, 7, 8):
        worker.cache(index)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert str(path) in caplog.text
    assert not worker.tier.match(HASHES)
    assert worker.known == set(worker.pool.known_hashes)


def test_a_failed_read_ends_the_restore(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(path)
    worker.cache(0)

    def unreadable(fd: int, size: int, offset: int) -> bytes:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(os, "pread", unreadable)
    assert worker.restore(0) == []
    assert worker.tier.failure == "Input/output error"


def test_a_file_in_use_or_in_no_folder_leaves_the_tier_off(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Worker(path)
    second = Worker(path)
    second.cache(0)
    assert second.tier.failure
    assert second.known == set(HASHES[:1])
    (tmp_path / "file").touch()
    assert Worker(tmp_path / "file" / "worker.kv").tier.failure
    assert [record.levelno for record in caplog.records] == 2 * [logging.ERROR]
    first.cache(0)
    assert first.tier.match(HASHES) == HASHES[:1]


def test_a_tier_no_larger_than_the_pool_is_refused(path: Path) -> None:
    memory = PoolMemory.create(LAYOUT)
    with pytest.raises(ValueError, match=r"kv_tier.size of 0MiB holds 4 KV blocks.*raise it to 1MiB at least"):
        FileTier(
            path,
            memory,
            BlockPool(4, 4),
            size_bytes=4 * 4200 + 8192,
            max_model_len=100,
            secret="",
            on_restored=lambda restore_id: None,
        )


def test_a_thread_copies_and_restores(path: Path) -> None:
    worker = Worker(path)
    worker.tier.start()
    worker.cache(0, work=False)
    while not worker.tier.match(HASHES):
        pass
    block = worker.pool.allocate(1)
    worker.tier.restore(1, HASHES[:1], block)
    while not worker.ended:
        pass
    num_done, seconds = worker.tier.end_restore(1)
    assert num_done == 1
    assert seconds > 0
    assert bytes(worker.block(block[0])) == content(0)
    worker.tier.close()


def test_a_file_that_others_can_read_is_closed_to_them(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    path.chmod(0o644)
    worker = Worker(path)
    assert path.stat().st_mode & 0o777 == 0o600
    worker.tier.close()
