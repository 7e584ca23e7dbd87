"""Brings up a cluster of three hosts by `ray up`, on this machine, and breaks it: `scripts/try-ray-up`.

    scripts/try-ray-up [--faults power-off,cable-2] [--capture] [--json FILE]

Hosts are namespaces (`tests.hosts.namespaces`). Without options it asks the cluster what it asked one on a single
host, compares the answers, and counts the KV that crossed the wire. With ``--faults`` the cluster emulates, and 64
streams whose tokens are checked run while a host loses power or its cable, or Ray its control store. ``--capture``
records every packet and searches them for prompts and tokens. Exits 0 if all was as it should be.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from pdserve.bench.script import publish, script_parser
from tests.hosts.checked_streams import CheckedAnswer, Streams, summary
from tests.hosts.namespaces import BIN, REPO, Hosts, run

NAMES = ("launcher", "head", "one", "two")
NEW = "three"
"""Host that is switched on for the first time when the cluster runs."""
NUM_WORKERS = {False: 3, True: 4}
"""Workers of the clusters that compute and emulate."""
PROMPTS = ("What is 17 + 25?", "The router assigns", "Paged blocks of keys and values " * 20)
EMULATION = ("--emulate", "h100-sxm", "--time-scale", "25")
TOOLS = ("ip", "sshd", "rsync", "unshare", "curl", "pkill", "tcpdump")
FAULTS = (
    "power-off",
    "cable-2",
    "cable-20",
    "cable-120",
    "head-cable-10",
    "gcs-killed",
    "gcs-stopped-20",
    "host-added",
)
RAY_TLS_FILES = {"TLS_SERVER_CERT": "host.pem", "TLS_SERVER_KEY": "host.key", "TLS_CA_CERT": "ca.pem"}
_SETTLE_S = 5.0


def cluster_file(hosts: Hosts, *, is_emulated: bool) -> Path:
    """deploy/ray/local.yaml for these hosts. They share this installation, so nothing is installed."""
    folder, addresses = hosts.folder, hosts.addresses
    config = yaml.safe_load((REPO / "deploy/ray/local.yaml").read_text())
    config["provider"] |= {"head_ip": addresses["head"], "worker_ips": [addresses["one"], addresses["two"]]}
    config["auth"] = {"ssh_user": "root", "ssh_private_key": str(folder / "key")}
    deployment: dict[str, Any] = {
        "prefill": {"replicas": 2 if is_emulated else 1},
        "decode": {"replicas": 2},
        "model": {"max_model_len": 2048},
        "router": {"host": "0.0.0.0"},
        "security": {"tls": {"ca": "tls/ca.pem", "certificate": "tls/host.pem", "key": "tls/host.key"}},
    }
    if not is_emulated:
        deployment["router"] |= {"tls_certificate": "tls/host.pem", "tls_key": "tls/host.key"}
    (folder / "deployment.yaml").write_text(json.dumps(deployment))
    run(REPO / "scripts/make-certificates", folder / "tls", *addresses.values(), stdout=subprocess.DEVNULL)
    token = folder / "auth_token"
    token.write_text(os.urandom(32).hex())
    token.chmod(0o600)
    config["file_mounts"] = {
        "~/pdserve/deployment.yaml": str(folder / "deployment.yaml"),
        "~/pdserve/keep-control-store": str(REPO / "deploy/ray/keep-control-store"),
        "~/pdserve/tls": str(folder / "tls"),
        "~/.ray/auth_token": str(token),
    }
    config["setup_commands"] = ["chmod 600 ~/.ray/auth_token", "pdserve --version"]
    if not is_emulated:
        ray_tls = " ".join(f"RAY_{name}=$HOME/pdserve/tls/{file}" for name, file in RAY_TLS_FILES.items())
        config["setup_commands"].append(f"echo export RAY_USE_TLS=1 {ray_tls} >> ~/.bashrc")
    # Hosts share the cores and the memory of this machine.
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        config[key] = [each.replace("ray start ", "ray start --num-cpus=2 ") for each in config[key]]
    if is_emulated:
        config["head_start_ray_commands"][-1] += f" {' '.join(EMULATION)}"
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


class Cluster:
    """The cluster on the hosts."""

    def __init__(self, hosts: Hosts, *, is_emulated: bool) -> None:
        self.hosts = hosts
        self.num_workers = NUM_WORKERS[is_emulated]
        self.file = cluster_file(hosts, is_emulated=is_emulated)
        self.url = f"{'http' if is_emulated else 'https'}://{hosts.addresses['head']}:8000"

    def up(self) -> float:
        """Start it; returns the seconds that took."""
        began_s = time.monotonic()
        command = f"RAY_UP_enable_autoscaler_v2=0 ray up --yes --no-config-cache {self.file} < /dev/null"
        self.hosts.ssh("launcher", command)
        return time.monotonic() - began_s

    def extend(self) -> None:
        """Switch the new host on, and let it join by hand: Ray's launcher adds no host to a head that runs."""
        self.hosts.add(NEW)
        for part in ("pdserve", ".ray"):
            shutil.copytree(self.hosts.folder / "head/home" / part, self.hosts.folder / NEW / "home" / part)
        wait_for(lambda: self.hosts.is_on(NEW), "sshd")
        commands = yaml.safe_load(self.file.read_text())["worker_start_ray_commands"]
        self.hosts.ssh(NEW, f"export RAY_HEAD_IP={self.hosts.addresses['head']}; {'; '.join(commands)}")

    def down(self) -> float:
        """End it; returns the seconds from the end of `ray down` until nothing is left.

        Raises:
            AssertionError: something is left after 150 s.
        """
        self.hosts.ssh("launcher", f"ray down --yes {self.file} < /dev/null")
        began_s = time.monotonic()
        while (left := self._processes()) and time.monotonic() < began_s + 150:
            time.sleep(1)
        assert not left, left
        return time.monotonic() - began_s

    def workers(self) -> dict[str, dict[str, Any]]:
        """What the router says of each worker that is up; empty if it does not answer."""
        answer = self.hosts.ssh("head", "pdserve status --json", capture_output=True, check=False)
        with contextlib.suppress(ValueError):
            return {each["worker_id"]: each for each in json.loads(answer.stdout)["workers"] if each["up"]}
        return {}

    def host_of(self, worker: dict[str, Any]) -> str:
        address = worker["address"].rpartition(":")[0]
        return next(name for name, own in self.hosts.addresses.items() if own == address)

    def placement(self) -> dict[str, str]:
        return {name: self.host_of(worker) for name, worker in self.workers().items()}

    def wait_whole(self) -> None:
        wait_for(lambda: len(self.workers()) == self.num_workers, "every worker")

    def times_found(self, host: str) -> int:
        """How often the supervisor has found a host."""
        log = self.hosts.ssh("head", "cat pdserve.log", capture_output=True).stdout
        mark = f"host {host} ({self.hosts.addresses[host]})"
        return sum(mark in line and "up at" in line for line in log.splitlines())

    def ask(self, prompt: str, url: str, **options: object) -> dict[str, Any]:
        """Answer to a completion of 64 tokens, asked by the launcher."""
        body = {"model": "pdserve-demo", "prompt": prompt, "max_tokens": 64, "temperature": 0, **options}
        curl = (
            "curl",
            "-sSgk",
            "--max-time",
            "60",
            f"{url}/v1/completions",
            "-H",
            "Content-Type: application/json",
        )
        answer = run(*self.hosts.at("launcher"), *curl, "-d", json.dumps(body), capture_output=True)
        found: dict[str, Any] = json.loads(answer.stdout)
        return found

    def texts(self, url: str) -> list[str]:
        return [self.ask(prompt, url)["choices"][0]["text"] for prompt in PROMPTS]

    def _processes(self) -> list[str]:
        """Processes of Ray and of ours on the hosts."""
        found = []
        for name in self.hosts.inits:
            answer = self.hosts.ssh(name, "pgrep -af 'ray|pdserve' | grep -v pgrep", capture_output=True, check=False)
            lines = (line for line in answer.stdout.splitlines() if "sshd" not in line and "bash" not in line)
            found += [f"{name}: {line}" for line in lines]
        return found


def find_secrets(packets: bytes) -> list[str]:
    """What a listener on the cables would learn: parts of prompts, and whatever looks like one of our tokens."""
    prompts = [prompt for prompt in PROMPTS if prompt[:16].encode() in packets]
    tokens = {each.decode() for each in re.findall(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])", packets)}
    return [*prompts, *tokens]


def compare_answers(hosts: Hosts, capture: Path | None) -> str:
    """Bring a cluster up that computes, and down; returns what was seen.

    Args:
        capture: file for the packets on the cables, which must hold no secret.
    """
    cluster = Cluster(hosts, is_emulated=False)
    hosts.ssh("launcher", "pdserve up --port 8000 --detach")
    expected = cluster.texts("http://127.0.0.1:8000")
    hosts.ssh("launcher", "pdserve down")
    listener = hosts.capture(capture) if capture else None
    up_s = cluster.up()
    cluster.wait_whole()
    placement = cluster.placement()
    assert len(set(placement.values())) == cluster.num_workers, placement
    prefill = placement["prefill-0"]
    sent = hosts.bytes_sent(prefill)
    found = cluster.texts(cluster.url)
    sent = hosts.bytes_sent(prefill) - sent
    assert found == expected, (found, expected)
    spread = ", ".join(f"{worker} on {host}" for worker, host in placement.items())
    said = f"ray up took {up_s:.1f} s: {spread}; same tokens as on one host, {sent / 1e6:.1f} MB left {prefill}"
    if listener is not None and capture is not None:
        listener.terminate()
        listener.wait()
        packets = capture.read_bytes()
        assert not (secrets := find_secrets(packets)), secrets
        said += f"; no prompt and no token in {len(packets) / 1e6:.0f} MB of packets"
    return f"{said}; nothing left {cluster.down():.0f} s after ray down"


def break_it(hosts: Hosts, faults: Sequence[str]) -> list[dict[str, Any]]:
    """Bring a cluster up that emulates, break it, and take it down; returns what was seen of each fault."""
    cluster = Cluster(hosts, is_emulated=True)
    cluster.up()
    seen = []
    for fault in faults:
        cluster.wait_whole()
        seen.append(try_fault(cluster, fault))
        sys.stderr.write(f"{seen[-1]}\n")
    seen.append({"fault": "ray down", "nothing left after_s": round(cluster.down(), 1)})
    return seen


def try_fault(cluster: Cluster, fault: str) -> dict[str, Any]:
    hosts, before = cluster.hosts, cluster.workers()
    placement = cluster.placement()
    name, _, seconds = fault.rpartition("-") if fault[-1].isdigit() else (fault, "", "0")
    victim = max((host for host in placement.values() if host != "head"), default="two")
    times_found = cluster.times_found(victim)
    streams = Streams(cluster.url, "--clients", 64, on=hosts.at("launcher"))
    result: dict[str, Any] = {"fault": fault, "placement": placement}
    at_fault = cluster.workers().values()
    result["streams on the victim"] = sum(
        each["load"]["num_running"] for each in at_fault if cluster.host_of(each) == victim
    )
    began_s = time.monotonic()
    try:
        if name in ("cable", "head-cable"):
            host = "head" if name == "head-cable" else victim
            hosts.set_cable(host, is_plugged=False)
            time.sleep(float(seconds))
            hosts.set_cable(host, is_plugged=True)
        elif name == "power-off":
            hosts.power_off(victim)
        elif name == "host-added":
            cluster.extend()
            wait_for(lambda: cluster.times_found(NEW) > 0, "the new host")
        else:
            number = "KILL" if name == "gcs-killed" else "STOP"
            hosts.ssh("head", f"pkill -{number} -x gcs_server")
            time.sleep(float(seconds))
            hosts.ssh("head", "pkill -CONT -x gcs_server", check=False)
        cluster.wait_whole()
        result["all_up_s"] = round(time.monotonic() - began_s, 1)
        if name == "power-off":
            hosts.add(victim)
            wait_for(lambda: cluster.times_found(victim) > times_found, "the lost host")
            result["host_back_s"] = round(time.monotonic() - began_s, 1)
        if name in ("power-off", "host-added"):
            cluster.hosts.ssh("head", "pdserve scale decode=3")
            result["decode-2 on"] = cluster.placement()["decode-2"]
            cluster.hosts.ssh("head", "pdserve scale decode=2")
        time.sleep(_SETTLE_S)
    finally:
        answers = streams.end()
    cluster.wait_whole()
    now = cluster.workers()
    result["restarted"] = [each for each in sorted(before) if now[each]["epoch"] != before[each]["epoch"]]
    result["leaked_blocks"] = _leaked_blocks(now)
    return result | summary(answers) | {"streams with a gap over 1 s": _long_gaps(answers, began_s)}


def _leaked_blocks(workers: dict[str, dict[str, Any]]) -> int:
    """Blocks in use although no request runs."""
    return sum(int(worker["load"]["num_blocks_referenced"]) for worker in workers.values())


def _long_gaps(answers: Sequence[CheckedAnswer], began_s: float) -> str:
    """How many of the streams that ran when the fault began had a gap of over 1 s."""
    gaps = [each.gap_s for each in answers if each.sent_s < began_s < each.ended_s]
    return f"{sum(gap > 1 for gap in gaps)} of {len(gaps)}"


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 180) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"still waiting for {what}"
        time.sleep(0.5)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--faults", default="", help=f"some of {', '.join(FAULTS)}; all")
    parser.add_argument("--capture", action="store_true", help="search all packets for prompts and tokens")
    arguments = parser.parse_args()
    faults = FAULTS if arguments.faults == "all" else tuple(filter(None, arguments.faults.split(",")))
    if unknown := set(faults) - set(FAULTS):
        sys.exit(f"try-ray-up: no fault is called {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
    missing = [name for name in TOOLS if not shutil.which(name)]
    if os.geteuid() or missing:
        sys.exit(f"try-ray-up: run it as root, with {', '.join(missing) or 'nothing more'} installed")
    assert (BIN / "pdserve").exists()
    addresses = {name: f"10.77.0.{9 + number}" for number, name in enumerate((*NAMES, NEW))}
    folder = Path(tempfile.mkdtemp(prefix="pdserve-hosts-", dir="/var/tmp"))
    hosts = Hosts(folder, addresses)
    try:
        hosts.up()
        for name in NAMES:
            hosts.add(name)
        wait_for(lambda: hosts.is_on("launcher"), "sshd")
        if faults:
            publish({"faults": break_it(hosts, faults)}, arguments.json)
        else:
            capture = folder / "packets" if arguments.capture else None
            sys.stdout.write(compare_answers(hosts, capture) + "\n")
    finally:
        hosts.down()
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
