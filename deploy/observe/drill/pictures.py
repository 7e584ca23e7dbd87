"""Pictures of the dashboards, drawn from Prometheus' answers in the places that Grafana would give them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from pdserve.deploy.observe.drill.live import Prometheus, faster
from pdserve.deploy.observe.grafana import dashboard_json, dashboards

POINTS = 120
CELL_INCHES = 0.62, 0.28
"""Width and height of a cell of Grafana's grid."""
_SCALES = {"percentunit": (100.0, "%"), "s": (1.0, "s"), "Bps": (1.0, "B/s"), "bytes": (1.0, "B")}


def draw_all(prometheus: Prometheus, folder: Path, start_s: float, end_s: float, *, speed: float = 1) -> None:
    """A picture of each dashboard from ``start_s`` to ``end_s``, in seconds since 1970; ``speed`` as for the rules."""
    folder.mkdir(parents=True, exist_ok=True)
    for dashboard in dashboards():
        panels = json.loads(faster(json.dumps(dashboard_json(dashboard)["panels"]), speed))
        draw(prometheus, dashboard.title, panels, folder / f"{dashboard.uid}.png", start_s, end_s)


def draw(
    prometheus: Prometheus, title: str, panels: list[dict[str, Any]], path: Path, start_s: float, end_s: float
) -> None:
    from matplotlib.figure import Figure

    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = Figure(figsize=(24 * CELL_INCHES[0], (height + 2) * CELL_INCHES[1]), dpi=70)
    figure.suptitle(title, fontsize=14)
    step_s = max((end_s - start_s) / POINTS, 1)
    for panel in panels:
        place = panel["gridPos"]
        rows = height + 2
        box = place["x"] / 24, 1 - (place["y"] + place["h"] + 2) / rows, place["w"] / 24, place["h"] / rows
        if panel["type"] == "timeseries":
            pad = 1.6 / (height + 2)
            axes = figure.add_axes((box[0] + 0.035, box[1] + 1.4 * pad, box[2] - 0.045, box[3] - 2.6 * pad))
            _plot(axes, panel, prometheus, start_s, end_s, step_s)
        else:
            text, size = (panel["title"], 12) if panel["type"] == "row" else (panel["options"]["content"], 8)
            figure.text(box[0] + 0.005, box[1] + box[3] / 2, text, fontsize=size, va="center", wrap=True)
    figure.savefig(path)


def _plot(
    axes: Any, panel: dict[str, Any], prometheus: Prometheus, start_s: float, end_s: float, step_s: float
) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    scale, unit = _SCALES.get(defaults["unit"], (1.0, ""))
    x = [index * step_s for index in range(POINTS + 2)]
    base, num_series = [0.0] * len(x), 0
    for target in panel["targets"]:
        for series in prometheus.query_range(target["expr"], start_s, end_s, step_s):
            num_series += 1
            values = {round((float(at) - start_s) / step_s): scale * float(value) for at, value in series["values"]}
            y = [values.get(index, math.nan) for index in range(len(x))]
            name = _legend(target["legendFormat"], series["metric"])
            if name.startswith("objective"):
                axes.plot(x, y, "r--", linewidth=1, label=name)
            elif "stacking" in defaults["custom"]:
                top = [low + (0 if math.isnan(high) else high) for low, high in zip(base, y, strict=True)]
                axes.fill_between(x, base, top, alpha=0.6, label=name)
                base = top
            else:
                axes.plot(x, y, linewidth=1.2, label=name)
    axes.set_title(f"{panel['title']} {unit and f'({unit})'}", fontsize=8, loc="left")
    axes.tick_params(labelsize=6)
    axes.set_xlim(0, end_s - start_s)
    axes.set_ylim(bottom=0)
    if num_series:
        axes.legend(fontsize=5, loc="upper left", bbox_to_anchor=(0, -0.14), ncol=3, frameon=False)
    else:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color="grey")


def _legend(template: str, labels: dict[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda match: labels.get(match[1], ""), template)
