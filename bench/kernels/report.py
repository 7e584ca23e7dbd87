"""Results of a kernel benchmark, as one table per kernel and as one JSON document.

Called by `pdserve.bench.kernels.run`; `pdserve.bench.gpu_model` prints its tables with it. Measures nothing. Tables are
plain without rich or without a terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import groupby
from typing import Any, NamedTuple

from pdserve.bench.kernels.measure import Result


class Report(NamedTuple):
    """All that is told of one run, filled in as it goes."""

    machine: Mapping[str, Any]
    """Device, date, versions, commit."""
    results: list[Result]
    clocks: dict[str, dict[str, str]]
    """By kernel, under its last shape."""
    failures: dict[str, str]
    """Shapes that our own kernel did not run, and why."""

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.machine,
            "clocks": self.clocks,
            "failures": self.failures,
            "results": [result.as_dict() for result in self.results],
        }

    def show(self, echo: Callable[[str], None]) -> None:
        """Print a table for each kernel, who is absent from it, and what went wrong."""
        device = self.machine["device"]
        if self.machine["hardware"] is None:
            echo(f"{device} is not in the catalogue, so there are no limits: name one like it with --hardware")
        if "torch_matmul_tflops" in self.machine:
            tflops, gbytes_per_s = self.machine["torch_matmul_tflops"], self.machine["torch_copy_gbytes_per_s"]
            echo(f"{device}: torch's large product {tflops:.0f} TFLOP/s, its large copy {gbytes_per_s:.0f} GB/s")
        for kernel, of_kernel in groupby(self.results, key=lambda result: result.kernel):
            results = list(of_kernel)
            clocks = ", ".join(f"{name} {value}" for name, value in self.clocks.get(kernel, {}).items())
            show_table(f"{kernel} on {device} ({clocks or 'clocks unknown'})", *_table(results), echo)
            for line in _notes(results):
                echo(line)
        for shape, reason in self.failures.items():
            echo(f"FAILED: {shape}: {reason}")


def _table(results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: peers are told by how many times longer they take."""
    peers = list(dict.fromkeys(name for result in results for name in result.ratios))
    header = ["shape", "us", "TFLOP/s", "GB/s", "% of limit", *peers]
    return header, [_row(result, peers) for result in results]


def _row(result: Result, peers: Sequence[str]) -> list[str]:
    share = result.limit_share
    cells = []
    for name in peers:
        mark = " !" if name in result.disagreeing else ""
        cells.append(f"{result.ratios[name]:.2f}x{mark}" if name in result.ratios else "-")
    return [
        result.shape,
        f"{result.own_s * 1e6:.1f}",
        f"{result.flops / result.own_s / 1e12:.1f}" if result.flops else "-",
        f"{result.num_bytes / result.own_s / 1e9:.0f}",
        "-" if share is None else f"{share:.0%}",
        *cells,
    ]


def _notes(results: Sequence[Result]) -> list[str]:
    """Absent peers with their reasons, and those whose results are not ours."""
    reasons = dict.fromkeys((name, reason) for result in results for name, reason in result.absent.items())
    notes = []
    for name, reason in reasons:
        shapes = [result.shape for result in results if result.absent.get(name) == reason]
        where = "" if len(shapes) == len(results) else f" ({'; '.join(shapes)})"
        notes.append(f"  {name} is absent: {reason}{where}")
    notes += [
        f"  ! {name} computes something else for {result.shape}: {result.differences[name]:.2g} of the largest value"
        for result in results
        for name in result.disagreeing
    ]
    return notes


def show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], echo: Callable[[str], None]) -> None:
    """Print one: with rich where it is installed and somebody looks, else plainly."""
    if sys.stdout.isatty() and find_spec("rich") is not None:
        from rich.console import Console
        from rich.table import Table

        table = Table(*header, title=title)
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    echo(title)
    for row in (header, *rows):
        first, *others = (
            f"{cell:<{width}}" if place == 0 else f"{cell:>{width}}"
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        echo("  ".join((first, *others)))
