"""Report of a whole-model benchmark, as plain tables and as one JSON document.

`pdserve.bench.gpu_model.run` fills it in row by row. Measures nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from pdserve.bench.kernels.report import show_table

_HEADER = ("shape", "who", "ms", "tokens/s", "% of limit", "device ms", "host ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One shape of one phase, by one engine."""

    phase: str
    """``decode``, ``prefill`` or ``handoff``."""
    engine: str
    held: str
    """Dtypes of weights and KV."""
    num_rows: int
    context_tokens: int
    """Of the last step; of others, the prompt's."""
    num_tokens: int
    """That a step computes."""
    step_s: float
    limit_s: float
    device_s: float | None = None
    host_s: float | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.step_s

    @property
    def limit_share(self) -> float:
        return self.limit_s / self.step_s

    @property
    def shape(self) -> str:
        return f"{self.num_rows} x {self.context_tokens}"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_s": self.tokens_per_s, "limit_share": self.limit_share}


@dataclass(slots=True)
class Report:
    """All that is told of one run."""

    machine: Mapping[str, Any]
    rows: list[Row] = field(default_factory=list)
    clocks: dict[str, dict[str, str]] = field(default_factory=dict)
    """By what ran meanwhile."""
    notes: list[str] = field(default_factory=list)
    """What was not measured and why, and how peers were."""
    failures: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.machine,
            "clocks": self.clocks,
            "notes": self.notes,
            "failures": self.failures,
            "rows": [row.as_dict() for row in self.rows],
        }

    def write(self, folder: Path) -> Path:
        """The dated file, anew; parts of the whole have files of their own."""
        machine = self.machine
        words = (machine["measured"][:10], "gpu_model", machine["part"], machine["hardware"] or "unknown")
        file = folder / f"{'_'.join(filter(None, words))}.json"
        file.write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")
        return file

    def show(self, echo: Callable[[str], None]) -> None:
        machine = self.machine
        echo(
            f"{machine['device']}: torch's large product {machine['torch_matmul_tflops']:.3g} TFLOP/s, "
            f"its large copy {machine['torch_copy_gbytes_per_s']:.4g} GB/s{_data_sheet(machine)}"
        )
        in_order = sorted(self.rows, key=lambda row: (row.phase, row.num_rows, row.context_tokens))
        for phase, rows in groupby(in_order, key=lambda row: row.phase):
            show_table(
                f"{phase}, a {'step' if phase == 'decode' else 'prompt'}", _HEADER, [_cells(row) for row in rows], echo
            )
        for what, clocks in self.clocks.items():
            echo(f"{what}: {', '.join(f'{name} {value}' for name, value in clocks.items()) or 'clocks unknown'}")
        for note in self.notes:
            echo(note)
        for failure in self.failures:
            echo(f"FAILED: {failure}")


def _data_sheet(machine: Mapping[str, Any]) -> str:
    if "peak_tflops" not in machine:
        return ""
    return f"; by its data sheet {machine['peak_tflops']:.3g} and {machine['peak_gbytes_per_s']:.4g}"


def _cells(row: Row) -> list[str]:
    return [
        row.shape,
        f"{row.engine}, {row.held}",
        f"{row.step_s * 1e3:.3f}",
        f"{row.tokens_per_s:.0f}",
        f"{row.limit_share:.1%}",
        *("-" if seconds is None else f"{seconds * 1e3:.3f}" for seconds in (row.device_s, row.host_s)),
    ]
