"""Plots a run of `pdserve.bench.gpu_model`: the share of the limit that each engine reaches. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from pdserve.bench.gpu_model.report import Report

_BAR = 0.3
"""Inches."""


def plot(report: Report, file: Path) -> None:
    """Write a picture with a bar for each row."""
    from matplotlib.figure import Figure

    labels = [f"{row.phase} {row.shape}: {row.engine}, {row.held}" for row in report.rows]
    figure = Figure(figsize=(10, 1.5 + _BAR * len(labels)), layout="constrained")
    axes = figure.subplots()
    colours = ["C0" if row.engine == "pdserve" else "C1" for row in report.rows]
    axes.barh(range(len(labels)), [100 * row.limit_share for row in report.rows], color=colours)
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.axvline(100, color="black", linewidth=0.5)
    axes.set_xlabel("% of the limit measured in the same run")
    axes.set_title(f"{report.machine['device']}, {report.machine['commit']}")
    figure.savefig(file)
