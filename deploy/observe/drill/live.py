"""A cluster of emulated GPUs, a Prometheus that watches it, and load."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from pdserve.bench.cluster import RunningCluster, running_cluster
from pdserve.bench.shapes import LLAMA_3_8B_CONFIG
from pdserve.deploy.observe.files import SCRAPE_INTERVAL, write_files
from pdserve.loadgen.load import Measurement, measure_load
from pdserve.model.cost.hardware import hardware, slowed
from pdserve.model.weights.random_checkpoint import write_tokenizer
from pdserve.planner.hardware_file import write_hardware_file
from pdserve.planner.workload.requests import SimulatedRequest

GPU = "h100-sxm"
MIN_WINDOW_S = 4
"""Windows are not shortened below a few scrapes."""
_SECONDS = {"s": 1, "m": 60, "h": 3600}


@contextmanager
def emulated_cluster(deployment: dict[str, Any], *options: str) -> Iterator[RunningCluster]:
    """A cluster that serves Llama 3 8B on emulated H100."""
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "llama-3-8b"
        write_tokenizer(folder, 512)
        (folder / "config.json").write_text(json.dumps(LLAMA_3_8B_CONFIG))
        model = {"path": str(folder), "dtype": "bfloat16", "max_model_len": 8192}
        with running_cluster({"model": model, **deployment}, "--emulate", GPU, *options) as cluster:
            yield cluster


@contextmanager
def mispredicted_cluster(deployment: dict[str, Any], *options: str) -> Iterator[RunningCluster]:
    """A cluster that serves the demo model on this machine's cores, predicted by a profile of ten times their speed."""
    num_cores = range(1, len(os.sched_getaffinity(0)) + 1)
    devices = [replace(slowed(hardware("cpu", num_cores=cores), 0.1), name=f"cpu-{cores}") for cores in num_cores]
    with tempfile.TemporaryDirectory() as work:
        profile = Path(work) / "profile.yaml"
        write_hardware_file(profile, devices)
        with running_cluster({"model": {"profile": str(profile)}, **deployment}, *options) as cluster:
            yield cluster


class Prometheus:
    """A running Prometheus."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=10, trust_env=False)

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Series of ``expr`` now: dictionaries with ``metric`` and ``value``."""
        result: list[dict[str, Any]] = self._get("query", query=expr)["result"]
        return result

    def number(self, expr: str) -> float:
        """The only value of ``expr``; NaN without one."""
        values = [float(each["value"][1]) for each in self.query(expr)]
        return values[0] if len(values) == 1 else float("nan")

    def query_range(self, expr: str, start_s: float, end_s: float, step_s: float) -> list[dict[str, Any]]:
        """Series of ``expr`` over time: dictionaries with ``metric`` and ``values``."""
        found = self._get("query_range", query=expr, start=str(start_s), end=str(end_s), step=str(step_s))
        result: list[dict[str, Any]] = found["result"]
        return result

    def rules_without_data(self) -> list[str]:
        """Recording rules that fail or have no series now."""
        groups = self._get("rules", type="record")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        return [rule["name"] for rule in rules if rule["health"] != "ok" or not self.query(rule["name"])]

    def firing(self) -> set[str]:
        """Names of the alerts that fire."""
        alerts = self._get("alerts")["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def _get(self, path: str, **parameters: str) -> dict[str, Any]:
        response = self._client.get(f"/api/v1/{path}", params=parameters)
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:  # it is starting
            response.raise_for_status()
        answer = response.json()
        if answer["status"] != "success":
            raise RuntimeError(f"{path} {parameters}: {answer.get('error')}")
        data: dict[str, Any] = answer["data"]
        return data


@contextmanager
def running_prometheus(admin_url: str, port: int, *, speed: float = 1) -> Iterator[Prometheus]:
    """Prometheus with the files of ``pdserve dashboards``, once it has scraped.

    Args:
        speed: windows and delays of rules are shorter by this factor.
    """
    with tempfile.TemporaryDirectory() as work:
        config, _ = write_files(Path(work), admin_url, "", "")
        config.write_text(config.read_text().replace(SCRAPE_INTERVAL, "1s"))
        rules = Path(work) / "rules.yml"
        rules.write_text(faster(rules.read_text(), speed))
        command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={work}/data"]
        command += [f"--web.listen-address=127.0.0.1:{port}"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            prometheus = Prometheus(f"http://127.0.0.1:{port}")
            if not wait_for(lambda: _is_scraping(prometheus), 60):
                raise RuntimeError("Prometheus did not scrape the router within 60 s")
            yield prometheus
        finally:
            process.terminate()
            process.wait()


def _is_scraping(prometheus: Prometheus) -> bool:
    try:
        return prometheus.number('up{job="pdserve"}') == 1
    except httpx.HTTPError:  # it is starting
        return False


def faster(rules: str, speed: float) -> str:
    """Rules with shorter windows and delays; names keep theirs."""

    def shorten(match: re.Match[str]) -> str:
        seconds = int(match[2]) * _SECONDS[match[3]] / speed
        return f"{match[1]}{max(round(seconds), MIN_WINDOW_S if match[1] == '[' else 0)}s"

    return re.sub(r"(\[|for: )(\d+)([smh])\b", shorten, rules)


def wait_for(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Poll until ``condition`` holds; returns whether it does."""
    deadline_s = time.monotonic() + timeout_s
    while not (holds := condition()) and time.monotonic() < deadline_s:
        time.sleep(0.5)
    return holds


def send(cluster: RunningCluster, requests: Sequence[SimulatedRequest]) -> Measurement:
    return measure_load(cluster.url, requests, vocab_size=LLAMA_3_8B_CONFIG["vocab_size"])


@contextmanager
def load(cluster: RunningCluster, rate: float, num_prompt_tokens: int, num_output_tokens: int) -> Iterator[None]:
    """Send requests meanwhile, ``rate`` a second."""
    command = ["bench", "serve", "--base-url", cluster.url]
    command += ["--request-rate", str(rate), "--num-prompts", str(round(rate * 600)), "--vocab-size", "512"]
    command += ["--random-input-len", str(num_prompt_tokens), "--random-output-len", str(num_output_tokens)]
    process = _pdserve(command)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def planning(admin_url: str) -> Iterator[None]:
    """Plan for the traffic meanwhile, and wait for the plan."""
    process = _pdserve(["plan", "--live", admin_url, "--window", "10", "--requests", "300"])
    try:
        yield
        process.wait(120)
    finally:
        process.kill()
        process.wait()


def _pdserve(arguments: list[str]) -> subprocess.Popen[bytes]:
    command = [str(Path(sys.executable).with_name("pdserve")), *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def processes(cluster: RunningCluster, mark: str) -> list[psutil.Process]:
    """Processes of the cluster with ``mark`` in their command line, the oldest first."""
    found = []
    for process in psutil.Process(cluster.pid).children(recursive=True):
        try:
            if mark in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue  # it has just ended
    return sorted(found, key=lambda each: each.create_time())
