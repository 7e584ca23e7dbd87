"""Orders layouts by the results so far.

Used by `pdserve.planner.search.search`. Compares; simulates nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdserve.planner.layout import Layout
from pdserve.planner.search.estimates import Estimate
from pdserve.planner.search.goodput import Goodput, Screened
from pdserve.planner.search.plan import Objective, Question
from pdserve.planner.simulate.attainment import Attainment


@dataclass(slots=True, eq=False)
class Entry:
    """Results of one layout so far."""

    layout: Layout
    estimate: Estimate
    dollars_per_hour: float | None
    expected_rate: float
    """The goodput as far as it is known without a simulation of the layout: the estimate, or what the scout found,
    corrected by what was found of others."""
    screened: Screened | None = None
    """By the scout."""
    goodput: Goodput | None = None
    beaten: Attainment | None = None
    """Result at the goodput of a better layout of its kind, which it does not reach: instead of ``goodput``."""

    @property
    def rate(self) -> float:
        """Goodput if simulated, otherwise the expected one."""
        return self.expected_rate if self.goodput is None else self.goodput.rate

    def result_at(self, rate: float) -> Attainment | None:
        """What it attains at ``rate``; ``None`` if that was not simulated."""
        points = [*(self.goodput.points if self.goodput else ()), *([self.beaten] if self.beaten else ())]
        return next((point for point in points if point.rate == rate), None)


class Ranking:
    """Orders layouts by a question's objective."""

    def __init__(self, question: Question) -> None:
        self._question = question

    def serves(self, rate: float) -> bool:
        """Whether a goodput of ``rate`` answers the question."""
        return not self._question.objective.has_rate or rate >= self._question.rate

    def ranked(self, entries: Iterable[Entry], optimism: float = 1.0) -> list[Entry]:
        """Best first, with all rates scaled by ``optimism``."""
        return sorted(entries, key=lambda entry: self.key(entry, entry.rate * optimism))

    def may_beat(self, entries: Iterable[Entry], rivals: Iterable[Entry], optimism: float) -> list[Entry]:
        """Entries that beat all rivals of their kind if their rates are ``optimism`` times higher, best first."""
        best = best_of_kinds(self.ranked(rivals))
        return [
            entry
            for entry in self.ranked(entries, optimism)
            if (rival := best.get(entry.layout.is_colocated)) is None
            or not rival.rate
            or self.key(entry, entry.rate * optimism) < self.key(rival, rival.rate)
        ]

    def rival(self, entry: Entry, finalists: Iterable[Entry]) -> tuple[Goodput, float] | None:
        """The best goodput of the kind of ``entry``, and the rate at which ``entry`` is as good; ``None`` if there is
        none above 0, or if not the rate alone decides."""
        best = best_of_kinds(self.ranked(finalists)).get(entry.layout.is_colocated)
        if best is None or best.goodput is None or not best.rate or self._question.objective.has_rate:
            return None
        is_per_device = self._question.objective is Objective.RATE_PER_DEVICE
        size = entry.layout.num_devices / best.layout.num_devices if is_per_device else 1.0
        return best.goodput, best.rate * size

    def key(self, entry: Entry, rate: float) -> tuple[float, ...]:
        """Sort key at a goodput of ``rate``; lower is better."""
        num_devices, objective = entry.layout.num_devices, self._question.objective
        if objective is Objective.RATE:
            return (-rate, num_devices)
        if objective is Objective.RATE_PER_DEVICE:
            return (-rate / num_devices, num_devices)
        if not self.serves(rate):
            return (1.0, -rate)
        if objective is Objective.FEWEST_DEVICES:
            return (0.0, num_devices, -rate)
        assert entry.dollars_per_hour is not None, "the search asks for prices"
        return (0.0, entry.dollars_per_hour, -rate)


def best_of_kinds(ranked: Iterable[Entry]) -> dict[bool, Entry]:
    """The first colocated (``True``) and the first disaggregated entry, if there are any."""
    best: dict[bool, Entry] = {}
    for entry in ranked:
        best.setdefault(entry.layout.is_colocated, entry)
    return best


def of_both_kinds(ranked: Sequence[Entry], count: int) -> list[Entry]:
    """The first ``count`` entries, half colocated and half disaggregated if there are enough of each."""
    num_each = max(1, count // 2)
    kinds = [[entry for entry in ranked if entry.layout.is_colocated is kind] for kind in (False, True)]
    assured = [entry for kind in kinds for entry in kind[:num_each]]
    others = [entry for entry in ranked if entry not in assured]
    chosen = assured + others[: max(0, count - len(assured))]
    return [entry for entry in ranked if entry in chosen]
