"""Output of `pdserve up`: one line per started process, one banner, then one line per event."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

READY = "pdserve is ready"
"""Words of the banner, which is written at once."""


class Progress:
    """Writes lines with the seconds since its creation; a cluster outlives a full disk, or the reader of its pipe."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begin_s = time.monotonic()

    def note(self, name: str, text: str, colour: str = "cyan") -> None:
        """Write one line: subject and text."""
        elapsed_s = time.monotonic() - self._begin_s
        self._write(f"[dim]{elapsed_s:6.1f}s[/]  [{colour}]{escape(name):<12}[/] {escape(text)}")

    def warn(self, name: str, text: str) -> None:
        """Write one line about a problem that is being handled."""
        self.note(name, text, "yellow")

    def banner(self, rows: Sequence[tuple[str, str]], command: str) -> None:
        """Write readiness, addresses, and a command to try on the last line."""
        lines = ["", f"[bold green]{READY}[/] after {time.monotonic() - self._begin_s:.1f} s"]
        lines += [f"  [cyan]{escape(name):<12}[/] {escape(value)}" for name, value in rows]
        self._write("\n".join([*lines, "", escape(command)]))

    def _write(self, markup: str) -> None:
        with contextlib.suppress(OSError, SystemExit):  # rich's for a pipe without a reader
            with self._console.capture() as line:  # a console writes all again that it could not write before
                self._console.print(markup, highlight=False, soft_wrap=True)
            self._console.file.write(line.get())
            self._console.file.flush()
