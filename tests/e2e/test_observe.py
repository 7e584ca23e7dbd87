"""A real Prometheus reads a live cluster: panels, rules and alerts have data, and counts are those of the load."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.deploy.cluster.folder import running_clusters
from pdserve.deploy.observe import files
from pdserve.deploy.observe.grafana import dashboards
from pdserve.deploy.observe.rules import alerts, recording_rules
from tests.e2e.cluster import running_cluster
from tests.patience import HANG_S

NUM_CLIENTS = 4

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
    # Loading certificates takes longer than an answer.
    answer = httpx.get(f"{url}/api/v1/query", params={"query": expr}, verify=False).raise_for_status().json()
    assert answer["status"] == "success", (expr, answer)
    result: list[dict[str, Any]] = answer["data"]["result"]
    return result


def wait_for(url: str, expr: str, value: float) -> None:
    deadline_s = time.monotonic() + HANG_S
    while True:
        try:
            if [float(each["value"][1]) for each in query(url, expr)] == [value]:
                return
        except httpx.HTTPError:  # Prometheus is starting
            pass
        assert time.monotonic() < deadline_s, f"{expr} is not {value}"
        time.sleep(0.2)


def ask(url: str, number: int) -> None:
    body = {"messages": [{"role": "user", "content": f"{number} " * 50}], "max_tokens": 8}
    httpx.post(f"{url}/v1/chat/completions", json=body, timeout=HANG_S, verify=False).raise_for_status()


def test_every_query_has_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SCRAPE_INTERVAL", "1s")
    with running_cluster(tmp_path, {"router": {"replicas": 2}}) as cluster:
        [token_file] = [note.admin_token_file for note in running_clusters() if note.admin_url == cluster.admin_url]
        config, _ = files.write_files(tmp_path / "observe", cluster.admin_url, token_file, "")
        with running_prometheus(config, tmp_path / "data") as url:
            wait_for(url, "count(up == 1)", 2)
            num_asked = 0
            deadline_s = time.monotonic() + HANG_S
            while silent := [expr for expr in expressions() if not query(url, expr)]:
                assert time.monotonic() < deadline_s, silent
                with ThreadPoolExecutor() as pool:  # one after another, the decode worker would prefill: no handoff
                    list(pool.map(partial(ask, cluster.url), range(num_asked, num_asked + NUM_CLIENTS)))
                num_asked += NUM_CLIENTS
                time.sleep(1)  # a rate is of two scrapes
            wait_for(url, "sum(pdserve_slo_requests_total)", num_asked)
            wait_for(url, 'sum(pdserve_request_outcomes_total{outcome="failed"})', 0)
            wait_for(url, "sum(pdserve_ready_workers)", 2)
            assert not query(url, 'ALERTS{alertname=~"RouterDown|No.*Worker|KvDoesNotMove"}')


def expressions() -> Iterator[str]:
    """Everything that has data whenever a cluster serves, but prices, which a CPU has not, and figures of a plan."""
    panels = (panel for dashboard in dashboards() for row in dashboard.rows for panel in row.panels)
    queries = (expr for panel in panels for expr, _ in panel.queries)
    for expr in (*recording_rules(), *(alert.query for alert in alerts()), *queries):
        if "pdserve_worker_usd_per_hour" not in expr and "pdserve_plan_" not in expr:
            yield expr
