"""Prometheus rules of a cluster, as rules.yaml has them, and `docs/runbook.md`, which is written from its alerts."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    name: str
    expr: str
    for_: str
    severity: str
    """``page`` or ``ticket``."""
    impact: str
    query: str
    """What to look at first."""
    steps: str


@cache
def rule_file() -> dict[str, Any]:
    """Contents of a Prometheus rule file."""
    found: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("rules.yaml").read_text(encoding="utf-8"))
    return found


def recording_rules() -> dict[str, str]:
    """Expressions by name."""
    recording, _ = rule_file()["groups"]
    return {rule["record"]: rule["expr"] for rule in recording["rules"]}


def alerts() -> list[Alert]:
    _, alerting = rule_file()["groups"]
    return [
        Alert(
            name=rule["alert"],
            expr=rule["expr"],
            for_=rule["for"],
            severity=rule["labels"]["severity"],
            impact=rule["annotations"]["summary"],
            query=rule["annotations"]["query"],
            steps=rule["annotations"]["description"],
        )
        for rule in alerting["rules"]
    ]


def runbook() -> str:
    """Text of `docs/runbook.md`."""
    parts = [
        "# Runbook\n\nWhat each alert means and what to do. "
        "Written by `python -m pdserve.deploy.observe.rules` from its alerts.\n"
    ]
    for alert in alerts():
        parts.append(
            f"## {alert.name}\n\n{alert.impact}\n\nLook at first:\n\n```promql\n{alert.query}\n```\n\n{alert.steps}\n\n"
            f"It fires ({alert.severity}) after {alert.for_} of:\n\n```promql\n{alert.expr}\n```\n"
        )
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(runbook())
