"""A real Prometheus reads a live cluster: panels, rules and alerts have data, and counts are those of the load."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.deploy.cluster.folder import running_clusters
from pdserve.deploy.observe import files
from pdserve.deploy.observe.dashboards import DASHBOARDS
from pdserve.deploy.observe.rules import ALERTS, recording_rules
from tests.e2e.cluster import running_cluster

NUM_REQUESTS = 8

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Prometheus (apt install prometheus)")


@contextmanager
def running_prometheus(config: Path, folder: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    command = [
        "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={folder}",
        f"--web.listen-address={address}",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://{address}"
    finally:
        process.kill()
        process.wait()


def query(url: str, expr: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{url}/api/v1/query", params={"query": expr}).raise_for_status().json()
    assert answer["status"] == "success", (expr, answer)
    result: list[dict[str, Any]] = answer["data"]["result"]
    return result


def wait_for(url: str, expr: str, value: float) -> None:
    deadline_s = time.monotonic() + 30
    while True:
        try:
            if [float(each["value"][1]) for each in query(url, expr)] == [value]:
                return
        except httpx.HTTPError:  # Prometheus is starting
            pass
        assert time.monotonic() < deadline_s, f"{expr} is not {value}"
        time.sleep(0.2)


def ask(url: str) -> None:
    body = {"messages": [{"role": "user", "content": "What is a decode worker?"}], "max_tokens": 8}
    httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status()


def test_every_query_has_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SCRAPE_INTERVAL", "1s")
    with running_cluster(tmp_path, {"router": {"replicas": 2}}) as cluster:
        [token_file] = [note.admin_token_file for note in running_clusters() if note.admin_url == cluster.admin_url]
        config, _ = files.write_files(tmp_path / "observe", cluster.admin_url, token_file, "")
        with running_prometheus(config, tmp_path / "data") as url:
            ask(cluster.url)
            wait_for(url, "sum(pdserve_slo_requests_total)", 1)
            for _ in range(NUM_REQUESTS - 1):
                ask(cluster.url)
            wait_for(url, "sum(pdserve_slo_requests_total)", NUM_REQUESTS)
            wait_for(url, 'sum(pdserve_request_outcomes_total{outcome="failed"})', 0)
            wait_for(url, "count(up == 1)", 2)
            wait_for(url, "sum(pdserve_ready_workers)", 2)
            time.sleep(3)  # rules are evaluated after the scrape
            absent = ("pdserve_worker_usd_per_hour", "pdserve_plan_")  # of a CPU, and before a plan
            silent = [expr for expr in expressions() if not query(url, expr) and not any(map(expr.count, absent))]
            assert not silent
            assert not query(url, 'ALERTS{alertname=~"RouterDown|No.*Worker|KvDoesNotMove"}')


def expressions() -> Iterator[str]:
    """Everything that has data whenever a cluster serves."""
    yield from recording_rules()
    for alert in ALERTS:
        yield alert.query
    for dashboard in DASHBOARDS:
        for row in dashboard.rows:
            for panel in row.panels:
                for expr, _ in panel.queries:
                    yield expr
