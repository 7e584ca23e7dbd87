"""Grafana dashboards of a cluster: the rows of panels of dashboards.yaml, and their JSON for Grafana 10 or later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_NUM_COLUMNS = 24
_TEXT_HEIGHT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    title: str
    unit: str
    """Grafana's name, such as ``s``, ``reqps``, ``percentunit`` or ``short``."""
    queries: tuple[tuple[str, str], ...]
    """(expression, legend)."""
    about: str = ""
    width: int = 8
    height: int = 8
    is_stacked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    title: str
    reading: str
    """How to read the row, in Markdown."""
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    uid: str
    title: str
    rows: tuple[Row, ...]


@cache
def dashboards() -> tuple[Dashboard, ...]:
    text = Path(__file__).with_name("dashboards.yaml").read_text(encoding="utf-8")
    return tuple(
        Dashboard(
            uid=board["uid"],
            title=board["title"],
            rows=tuple(
                Row(title=row["title"], reading=row["reading"], panels=tuple(map(_panel, row["panels"])))
                for row in board["rows"]
            ),
        )
        for board in yaml.safe_load(text)
    )


def _panel(fields: Mapping[str, Any]) -> Panel:
    quantiles, queries = fields.get("quantiles"), fields.get("queries", {})
    lines = [*(_quantiles(**quantiles) if quantiles else ()), *((expr, legend) for legend, expr in queries.items())]
    others = {name: value for name, value in fields.items() if name not in ("quantiles", "queries")}
    return Panel(queries=tuple(lines), **others)


def _quantiles(metric: str, selector: str = "", by: str = "") -> list[tuple[str, str]]:
    """p50, p90 and p99 of a histogram, for each value of the label ``by`` if given."""
    labels, legend = ("le", "") if not by else (f"le, {by}", f"{{{{{by}}}}} ")
    return [
        (f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket{selector}[5m])))", f"{legend}p{name}")
        for share, name in ((0.5, 50), (0.9, 90), (0.99, 99))
    ]


def dashboard_json(dashboard: Dashboard) -> dict[str, Any]:
    """Dashboard as Grafana 10 or later loads it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in dashboard.rows:
        panels.append({"type": "row", "title": row.title, "collapsed": False, "gridPos": _place(0, top, 24, 1)})
        text = {"mode": "markdown", "content": row.reading}
        panels.append({"type": "text", "options": text, "gridPos": _place(0, top + 1, 24, _TEXT_HEIGHT)})
        top += 1 + _TEXT_HEIGHT
        left = 0
        for panel in row.panels:
            assert left + panel.width <= _NUM_COLUMNS, f"the row {row.title} is too wide"
            panels.append(_panel_json(panel) | {"gridPos": _place(left, top, panel.width, panel.height)})
            left += panel.width
        top += max(panel.height for panel in row.panels)
    for number, each in enumerate(panels, 1):
        each["id"] = number
    others = {"type": "dashboards", "title": "pdserve", "tags": ["pdserve"], "asDropdown": True, "keepTime": True}
    datasource = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["pdserve"],
        "schemaVersion": 39,
        "timezone": "browser",
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "graphTooltip": 1,
        "links": [others],
        "templating": {"list": [datasource]},
        "annotations": {"list": [_alert_annotation()]},
        "panels": panels,
    }


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _alert_annotation() -> dict[str, Any]:
    """Firing alerts, as regions in every panel."""
    return {
        "name": "Alerts",
        "datasource": _DATASOURCE,
        "expr": 'ALERTS{alertstate="firing", job=~"pdserve|"}',
        "titleFormat": "{{alertname}}",
        "enable": True,
        "iconColor": "red",
    }


def _panel_json(panel: Panel) -> dict[str, Any]:
    custom: dict[str, Any] = {"fillOpacity": 20 if panel.is_stacked else 0, "showPoints": "never"}
    if panel.is_stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    line = {"matcher": {"id": "byRegexp", "options": "/^objective/"}, "properties": [
        {"id": "color", "value": {"mode": "fixed", "fixedColor": "red"}},
        {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [10, 10]}},
        {"id": "custom.fillOpacity", "value": 0},
    ]}  # fmt: skip
    has_objective = any(legend.startswith("objective") for _, legend in panel.queries)
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": _DATASOURCE,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATASOURCE,
                "expr": expr,
                "legendFormat": legend,
                "exemplar": "histogram_quantile" in expr,
            }
            for index, (expr, legend) in enumerate(panel.queries)
        ],
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": custom},
            "overrides": [line] if has_objective else [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
    }
