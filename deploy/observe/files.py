"""Files with which Prometheus and Grafana show a cluster: configuration, rules, dashboards, provisioning."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from pdserve.deploy.observe.grafana import dashboard_json, dashboards
from pdserve.deploy.observe.rules import rule_file

SCRAPE_INTERVAL = "5s"


def write_files(folder: Path, admin_url: str, token_file: str, prometheus_url: str) -> list[Path]:
    """Write all files to ``folder``; returns the file that Prometheus reads, and the folder that Grafana provisions
    from.

    Args:
        admin_url: of the first router, which reports for all workers.
        token_file: with the token of the admin port; empty if it needs none.
        prometheus_url: where Grafana finds Prometheus.

    Raises:
        OSError: a file cannot be written.
    """
    folder = folder.resolve()
    provisioning, boards = folder / "grafana" / "provisioning", folder / "grafana" / "dashboards"
    login = {"authorization": {"type": "Bearer", "credentials_file": token_file}} if token_file else {}
    discovery = {"url": f"{admin_url.rstrip('/')}/targets", "refresh_interval": "30s", **login}
    job = {
        "job_name": "pdserve",
        "scrape_interval": SCRAPE_INTERVAL,
        "http_sd_configs": [discovery],
        **login,
    }
    datasource = {"name": "pdserve", "type": "prometheus", "uid": "pdserve", "url": prometheus_url, "isDefault": True}
    provider = {"name": "pdserve", "type": "file", "folder": "pdserve", "options": {"path": str(boards)}}
    files = {
        folder / "prometheus.yml": {
            "global": {"evaluation_interval": SCRAPE_INTERVAL},
            "rule_files": ["rules.yml"],
            "scrape_configs": [job],
        },
        folder / "rules.yml": rule_file(),
        provisioning / "datasources" / "pdserve.yml": {"apiVersion": 1, "datasources": [datasource]},
        provisioning / "dashboards" / "pdserve.yml": {"apiVersion": 1, "providers": [provider]},
    }
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(content, sort_keys=False, width=120))
    boards.mkdir(parents=True, exist_ok=True)
    for dashboard in dashboards():
        (boards / f"{dashboard.uid}.json").write_text(json.dumps(dashboard_json(dashboard), indent=1) + "\n")
    return [folder / "prometheus.yml", provisioning]
