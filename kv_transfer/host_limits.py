"""Memory and CPU cores of this host that its control groups, such as a container's, leave to this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

_MEMORY = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Of versions 2 and 1, by controller: folder, and names of limit, use, and what of it the system gives back."""
_QUOTAS = {"": ("", "cpu.max"), "cpu": ("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us")}
"""Of versions 2 and 1, by controller: folder, and names of the files that hold quota and period, in microseconds."""


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Memory available without swapping, within what the limits of this process's control groups leave.

    Args:
        root: of the file system.
    """
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    left = [_left_bytes(group, *names) for group, names in _groups(root, _MEMORY)]
    return max(1, min([available, *left]))


def usable_cores(root: Path = Path("/")) -> tuple[int, ...]:
    """Ids of the cores that this process may use; if a control group has a CPU quota, only as many as it pays for, or
    one. More threads would use up the quota of a period at once, and all stand still for the rest of it. Containers of
    one machine begin at different cores.

    Args:
        root: of the file system.
    """
    cores = sorted(os.sched_getaffinity(0))
    number = min([len(cores), *(_quota(group, *names) for group, names in _groups(root, _QUOTAS))])
    first = _namespace(root) % len(cores) if number < len(cores) else 0
    return tuple(sorted([*cores, *cores][first : first + number]))


def _groups(root: Path, files: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Folders of this process's control groups and those around them, with the names of ``files`` there."""
    groups = root / "proc/self/cgroup"  # absent where the kernel has no control groups
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        for controller in files.keys() & controllers.split(","):
            folder, *names = files[controller]
            group = Path(path.lstrip("/"))
            for each in (group, *group.parents):  # in a container those of the host are not seen
                yield root / "sys/fs/cgroup" / folder / each, tuple(names)


def _left_bytes(group: Path, limit: str, used: str, inactive: str) -> int:
    """Memory that the limit of a control group leaves; endless without a limit."""
    try:
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used_bytes = int((group / used).read_text()) - int(statistics.get(inactive, 0))
        return int((group / limit).read_text()) - used_bytes
    except (OSError, ValueError):  # no such group, or ``max``
        return sys.maxsize


def _namespace(root: Path) -> int:
    """Number of this process's mount namespace, of which each container has its own."""
    return (root / "proc/self/ns/mnt").stat().st_ino


def _quota(group: Path, *names: str) -> int:
    """Whole cores that a control group pays for, at least one; endless without a quota."""
    with suppress(OSError, ValueError):  # no such group, or ``max``
        quota_us, period_us = map(int, " ".join((group / name).read_text() for name in names).split())
        if quota_us > 0:
            return max(1, quota_us // period_us)
    return sys.maxsize
