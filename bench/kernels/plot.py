"""Plots a kernel benchmark: for every shape, the share of the limit that our kernel and its peers reach.

Called by `pdserve.bench.kernels.run` on request; needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from pdserve.bench.kernels.measure import Result

_BAR = 0.25
"""Inches."""


class Bars(NamedTuple):
    """One contender of one kernel."""

    rows: list[int]
    """Shapes that it ran, by their places."""
    percents: list[float]
    """Of the limit."""


def bars(results: Sequence[Result], name: str) -> Bars:
    """Of a contender in the results, with limits, of one kernel."""
    shown = [
        (row, 100 * result.limit_s / result.seconds[name])
        for row, result in enumerate(results)
        if name in result.seconds and result.limit_s is not None
    ]
    return Bars([row for row, _ in shown], [percent for _, percent in shown])


def plot(results: Sequence[Result], title: str, file: Path) -> None:
    """Write a picture with a part for each kernel.

    Args:
        results: with limits.
    """
    from matplotlib.figure import Figure

    kernels = [(kernel, list(of_kernel)) for kernel, of_kernel in groupby(results, key=lambda result: result.kernel)]
    sizes = [sum(len(result.seconds) + 1 for result in of_kernel) for _, of_kernel in kernels]
    figure = Figure(figsize=(9, 1 + _BAR * sum(sizes) + len(kernels)), layout="constrained")
    figure.suptitle(title)
    parts = figure.subplots(len(kernels), squeeze=False, height_ratios=sizes)[:, 0]
    for part, (kernel, of_kernel) in zip(parts, kernels, strict=True):
        names = list(dict.fromkeys(name for result in of_kernel for name in result.seconds))
        height = 1 / (len(names) + 1)
        for place, name in enumerate(names):
            rows, percents = bars(of_kernel, name)
            part.barh([row + place * height for row in rows], percents, height, align="edge", label=name)
        shapes = [result.shape for result in of_kernel]
        part.set_yticks([row + 0.5 for row in range(len(shapes))], shapes, fontsize=7)
        part.invert_yaxis()
        part.axvline(100, color="black", linewidth=0.5)
        part.set_xlabel("% of the limit")
        part.set_title(kernel)
        part.legend(fontsize=7)
    figure.savefig(file)
