"""Searches of the planner, carried out in the test's own process."""

from __future__ import annotations

from pdserve.planner.search import rates
from pdserve.planner.search.goodput import Goodput, Result, Runner, Search, Trial, search_goodput


def find_goodput(runner: Runner, trial: Trial, start_rate: float, *, tolerance: float = 0.02) -> Goodput:
    """The result of `search_goodput`, one run after the other."""
    return carried_out(search_goodput(trial, start_rate, tolerance=tolerance), runner)


def carried_out(search: Search[Result], runner: Runner) -> Result:
    """The result of ``search``, whose runs ``runner`` simulates one after the other."""
    return rates.carried_out(search, lambda run: runner.attainment(*run))
