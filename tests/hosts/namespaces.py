"""Hosts on one machine: each is a set of namespaces (network, process ids, mounts, hostname, IPC) with an SSH server.

A bridge that leads nowhere else joins them. Needs root, `ip`, `sshd`, `rsync` and `unshare`.

Power, cables and packets of a host are in the caller's hands: that is what they are for (`tests.hosts.ray_up`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PREFIX = "pds-"
SWITCH = f"{PREFIX}switch"


def run(*command: object, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(each) for each in command], check=check, text=True, **options)


class Hosts:
    """The namespaces of the hosts, below one folder. The first is where commands are given; it runs nothing else."""

    def __init__(self, folder: Path, addresses: Mapping[str, str]) -> None:
        """``addresses``: by name of the host."""
        self.folder = folder
        self.addresses = addresses
        self.inits: dict[str, subprocess.Popen[bytes]] = {}
        """First process of each host that is on."""
        self._launcher = next(iter(addresses))

    def up(self) -> None:
        self.down()
        (self.folder / "home").mkdir()
        run("ip", "netns", "add", SWITCH)
        run("ip", "-n", SWITCH, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", SWITCH, "link", "set", "br0", "up")
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / "key")

    def add(self, name: str) -> None:
        """Switch a host on, with an empty disk the first time."""
        root, space = self.folder / name, f"{PREFIX}{name}"
        for folder in ("home/.ssh", "tmp", "run/sshd"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        (root / "tmp").chmod(0o1777)
        (root / "hostname").write_text(name)
        known = "".join(f"{address} {other}\n" for other, address in self.addresses.items())
        (root / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
        home = f"root:x:0:0:root:{self.folder / 'home'}:/bin/bash\n"
        others = [line for line in Path("/etc/passwd").read_text().splitlines(True) if not line.startswith("root:")]
        (root / "passwd").write_text(home + "".join(others))
        (root / "home/.ssh/authorized_keys").write_text((self.folder / "key.pub").read_text())
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"  # of compiled kernels
        profile = f"export PATH={BIN}:$PATH XDG_CACHE_HOME={cache} RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0\n"
        profile += f"export PYTHONPATH={os.environ.get('PYTHONPATH', '')}\n"
        (root / "home/.bashrc").write_text(profile)
        run("ip", "netns", "del", space, check=False, stderr=subprocess.DEVNULL)  # an earlier life of the host
        run("ip", "netns", "add", space)
        run("ip", "-n", SWITCH, "link", "add", f"v-{name}", "type", "veth", "peer", "name", "eth0", "netns", space)
        run("ip", "-n", SWITCH, "link", "set", f"v-{name}", "master", "br0", "up")
        run("ip", "-n", space, "addr", "add", f"{self.addresses[name]}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            run("ip", "-n", space, "link", "set", device, "up")
        log = (root / "log").open("wb")
        unshare = ("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
        command = ("ip", "netns", "exec", space, *unshare, sys.executable, "-m", __spec__.name, str(root))
        self.inits[name] = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def ssh(self, name: str, command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a shell command on a host, as from the launcher."""
        quiet = ("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR")
        login = ("ssh", *quiet, "-i", self.folder / "key", f"root@{self.addresses[name]}")
        return run(*self.at(self._launcher), *login, f"source ~/.bashrc; {command}", **options)

    def is_on(self, name: str) -> bool:
        """Whether commands can be given to a host."""
        return self.ssh(name, "true", check=False, stderr=subprocess.DEVNULL).returncode == 0

    def at(self, name: str) -> tuple[str, ...]:
        """Command that runs another one in the network of a host."""
        return ("ip", "netns", "exec", f"{PREFIX}{name}")

    def power_off(self, name: str) -> None:
        process = self.inits.pop(name)
        process.send_signal(signal.SIGKILL)  # of unshare, which takes the host's first process along
        process.wait()

    def set_cable(self, name: str, *, is_plugged: bool) -> None:
        run("ip", "-n", SWITCH, "link", "set", f"v-{name}", "up" if is_plugged else "down")

    def bytes_sent(self, name: str) -> int:
        """Bytes that a host has sent on its cable."""
        answer = run("ip", "-n", SWITCH, "-s", "-j", "link", "show", f"v-{name}", capture_output=True)
        return int(json.loads(answer.stdout)[0]["stats64"]["rx"]["bytes"])

    def capture(self, path: Path) -> subprocess.Popen[bytes]:
        """Write every packet on the cables to a file, until the process is terminated. Needs `tcpdump`."""
        tcpdump = ("tcpdump", "-i", "any", "-U", "-s", "0", "-B", "65536", "-w", str(path))
        command = ("ip", "netns", "exec", SWITCH, *tcpdump)
        return subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def down(self) -> None:
        for name in list(self.inits):
            self.power_off(name)
        for space in (SWITCH, *(f"{PREFIX}{name}" for name in self.addresses)):
            run("ip", "netns", "del", space, check=False, stderr=subprocess.DEVNULL)


def become_host(root: Path) -> None:
    """Become the first process of a host whose files are in ``root``."""
    run("mount", "--make-rprivate", "/")
    run("hostname", root.name)
    if REPO.is_relative_to("/tmp"):
        hidden = root / "tmp" / REPO.relative_to("/tmp")
        hidden.mkdir(parents=True, exist_ok=True)
        run("mount", "--bind", REPO, hidden)
    for name in ("passwd", "hosts"):
        run("mount", "--bind", root / name, f"/etc/{name}")
    run("mount", "--bind", root / "home", root.parent / "home")
    run("mount", "--rbind", root / "tmp", "/tmp")
    run("mount", "--bind", root / "run", "/run")
    run("mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", "/dev/shm")
    key = root / "host_key"
    if not key.exists():
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
    sshd = shutil.which("sshd") or "/usr/sbin/sshd"
    settings = ("UsePAM no", "StrictModes no", f"HostKey {key}", "PasswordAuthentication no", "PidFile none")
    options = [part for setting in settings for part in ("-o", setting)]
    os.execv(sshd, [sshd, "-D", "-e", "-f", "/dev/null", *options])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Becomes the first process of a host.")
    parser.add_argument("root", type=Path)
    become_host(parser.parse_args().root)
