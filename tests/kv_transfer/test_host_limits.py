from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdserve.kv_transfer import host_limits
from pdserve.kv_transfer.host_limits import available_memory_bytes, usable_cores


def write_files(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def group(folder: str, limit: str, used: int, inactive: int) -> dict[str, str]:
    """Files of a control group of version 2."""
    stat = f"anon 1\ninactive_file {inactive}"
    texts = {"memory.max": limit, "memory.current": str(used), "memory.stat": stat}
    return {f"sys/fs/cgroup/{folder}{name}": f"{text}\n" for name, text in texts.items()}


ROOMY = {"proc/meminfo": "MemTotal: 64000 kB\nMemAvailable:   32000 kB\n"}
V1 = {
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "16000000",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "10000000",
    "sys/fs/cgroup/memory/memory.stat": "inactive_file 5\ntotal_inactive_file 2000000\n",
}


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, 32_768_000),
        ({"proc/self/cgroup": "0::/\n"}, 32_768_000),
        ({"proc/self/cgroup": "0::/\n", **group("", "max", 9, 1)}, 32_768_000),
        ({"proc/self/cgroup": "0::/\n", **group("", "16000000", 10_000_000, 2_000_000)}, 8_000_000),
        ({"proc/self/cgroup": "0::/\n", **group("", "90000000", 1, 0)}, 32_768_000),
        ({"proc/self/cgroup": "0::/\n", **group("", "1000", 2000, 0)}, 1),
        (
            {
                "proc/self/cgroup": "0::/user.slice/job.scope\n",
                **group("user.slice/job.scope/", "max", 3, 0),
                **group("user.slice/", "20000000", 5_000_000, 0),
            },
            15_000_000,
        ),
        ({"proc/self/cgroup": "5:devices:/a\n4:memory:/docker/abc\n0::/\n", **V1}, 8_000_000),
    ],
    ids=[
        "no groups",
        "no files",
        "no limit",
        "limit",
        "wide limit",
        "used up",
        "slice above",
        "version 1 in a container",
    ],
)
def test_available_memory_is_what_control_groups_leave(tmp_path: Path, files: dict[str, str], available: int) -> None:
    write_files(tmp_path, {**ROOMY, **files})
    assert available_memory_bytes(tmp_path) == available


@pytest.mark.parametrize(
    ("files", "number"),
    [
        ({}, 64),
        ({"proc/self/cgroup": "0::/\n"}, 64),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 64),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "490000 100000\n"}, 4),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "9000000 100000\n"}, 64),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "10000 100000\n"}, 1),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/docker/abc\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "50000\n",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "50000\n",
            },
            64,
        ),
    ],
    ids=["no groups", "no files", "no quota", "quota", "wide quota", "slice above", "version 1", "none in version 1"],
)
def test_a_quota_limits_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], number: int
) -> None:
    write_files(tmp_path, files)
    cores, taken = set(range(100, 164)), []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    for namespace in (4026531840, 4026531903):
        monkeypatch.setattr(host_limits, "_namespace", lambda _, namespace=namespace: namespace)
        taken.append(set(usable_cores(tmp_path)))
    assert [len(each) for each in taken] == [number, number]
    assert taken[0] | taken[1] <= cores
    assert (taken[0] == taken[1]) == (number == 64)
