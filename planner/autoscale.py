"""Decides how many prefill and decode workers a cluster has, by the work that arrives. Pure: no clock and no I/O.

The supervisor drives it live, the planner's simulator under the virtual clock. Workers that arriving work needs are
predicted by the cost model (`pdserve.router.requests.demand`), not by ratios of latencies, which stay small until they
are large.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from math import ceil
from statistics import fmean
from typing import NamedTuple

from pdserve.contracts.worker_config import WorkerRole
from pdserve.router.requests.demand import Demand

WINDOW_S = 5.0
"""Between two looks at the demand."""
PREFILL_SHARE = 0.7
"""Share of the time of prefill workers that arriving prompts may take: what is left keeps queues short."""
START_S = 30.0
"""Until a worker that starts now serves. A need is a mean over that time, as it cannot meet a shorter one, and a need
that grows is expected to grow on for so long."""
NUM_WINDOWS_MEAN, NUM_WINDOWS_MINUTE = int(START_S / WINDOW_S), int(60 / WINDOW_S)
NUM_WINDOWS_DOWN = 2 * NUM_WINDOWS_MINUTE
"""Successive windows in which all means need fewer workers before some leave."""
NUM_WINDOWS_KNOWN = 2
"""From which a mean is taken while there are no more."""
PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
ROLES = (PREFILL, DECODE)

Replicas = Mapping[WorkerRole, int]


class Bounds(NamedTuple):
    """Numbers of workers of a role."""

    least: int
    most: int


class Decision(NamedTuple):
    """Numbers of workers to have from now on."""

    replicas: Replicas
    reason: str
    """One of `pdserve.contracts.metrics.SCALE_REASONS`."""


class Autoscaler:
    """Looks at the demand every `WINDOW_S`. A window is left out if its demand is unknown or routers began anew, and
    then nothing changes before others follow."""

    def __init__(self, bounds: Mapping[WorkerRole, Bounds]) -> None:
        """``bounds``: of the roles whose numbers may change."""
        self._bounds = bounds
        self._last: tuple[float, Demand] | None = None
        self._needs: deque[dict[WorkerRole, float]] = deque(maxlen=NUM_WINDOWS_DOWN)
        """Workers that each window needed, the newest last."""
        self._num_since_change = NUM_WINDOWS_DOWN
        """Windows."""
        self._replicas: dict[WorkerRole, int] = {}
        """After the last decision."""
        self.wanted: Replicas = {}
        """Numbers that the load asked for last, whatever hosts hold."""

    def observe(self, now_s: float, demand: Demand | None) -> None:
        """The demand at an instant; None if routers did not answer."""
        last, self._last = self._last, None if demand is None else (now_s, demand)
        self._num_since_change += 1
        if demand is None or last is None or not demand.answer_s or demand.num_answers < last[1].num_answers:
            self._needs.clear()
            return
        before_s, before = last
        seconds = now_s - before_s
        prefill = max(0.0, demand.prefill_s - before.prefill_s) / seconds / PREFILL_SHARE
        decode = (demand.num_answers - before.num_answers) * demand.answer_s / seconds
        # What waits is to be gone within a minute.
        self._needs.append(
            {
                PREFILL: prefill + demand.waiting_s / 60,
                DECODE: max(decode + demand.num_waiting * demand.answer_s / 60, demand.num_full),
            }
        )

    def decide(self, replicas: Replicas, most_workers: int | None = None) -> Decision | None:
        """The change to make now, from ``replicas`` workers of each role, those that start included.

        Args:
            most_workers: that hosts hold; None if not known.
        """
        if self._replicas and self._replicas != replicas:  # somebody else changed them
            self._num_since_change = 0
        self._replicas = dict(replicas)
        decode = self._wanted(DECODE, replicas[DECODE])
        wanted = {PREFILL: self._wanted(PREFILL, replicas[PREFILL], decode), DECODE: decode}
        is_known = len(self._needs) >= NUM_WINDOWS_KNOWN
        for role, other in (ROLES, ROLES[::-1]):  # a worker that is spare takes a role before another starts
            lacking = wanted[role] - replicas[role]
            if lacking > 0 and is_known and other in self._bounds and wanted[other] == replicas[other]:
                needed = max(self._bounds[other].least, self._whole(other, self._soon, wanted[DECODE]))
                wanted[other] -= min(lacking, max(0, replicas[other] - needed))
        self.wanted = dict(wanted)
        if most_workers is not None and sum(wanted.values()) > most_workers and self._needs:
            # Roles that both lack workers take one from the other once a minute at most, or chance moves it about.
            is_soon = sum(replicas.values()) == most_workers and self._num_since_change < NUM_WINDOWS_MINUTE
            wanted = dict(replicas) if is_soon else self._shared(wanted, most_workers)
        if all(wanted[role] == replicas[role] for role in ROLES):
            return None
        self._num_since_change, self._replicas = 0, dict(wanted)
        short = [role for role in ROLES if wanted[role] > replicas[role]]
        return Decision(wanted, f"{short[0].value}_short" if short else "surplus")

    def _wanted(self, role: WorkerRole, count: int, num_decode: int = 0) -> int:
        if role not in self._bounds:
            return count
        least, most = self._bounds[role]
        up = self._whole(role, self._soon, num_decode) if len(self._needs) >= NUM_WINDOWS_KNOWN else 0
        is_settled = len(self._needs) == NUM_WINDOWS_DOWN <= self._num_since_change
        down = self._whole(role, self._lasting, num_decode) if is_settled else count
        return min(most, max(least, up if up > count else min(down, count)))

    def _whole(self, role: WorkerRole, needed: Callable[[WorkerRole], float], num_decode: int) -> int:
        """Workers that ``role`` needs. Prompts that would take a part of one more prefill worker go to decode workers
        if that part of them is spare, as routers send them there then."""
        need = needed(role)
        is_spare = role is PREFILL and need % 1 <= num_decode - needed(DECODE)
        return int(need) if is_spare else ceil(need)

    def _soon(self, role: WorkerRole) -> float:
        """The newest mean, and growth adds to it."""
        return self._means(role)[-1] + self._growth(role)

    def _lasting(self, role: WorkerRole) -> float:
        """The largest mean, and growth adds to it."""
        return max(self._means(role)) + self._growth(role)

    def _means(self, role: WorkerRole) -> list[float]:
        needs = [each[role] for each in self._needs]
        ends = range(min(NUM_WINDOWS_MEAN, len(needs)), len(needs) + 1)
        return [fmean(needs[max(0, end - NUM_WINDOWS_MEAN) : end]) for end in ends]

    def _growth(self, role: WorkerRole) -> float:
        """By how much the need will have grown in `START_S`, as it did from each third of the last minute to the next.
        A step grows once, and so does chance: that counts for half at most, and seldom."""
        third = NUM_WINDOWS_MINUTE // 3
        needs = [each[role] for each in self._needs][-NUM_WINDOWS_MINUTE:]
        if len(needs) < NUM_WINDOWS_MINUTE:
            return 0.0
        first, second, last = (fmean(needs[begin : begin + third]) for begin in range(0, NUM_WINDOWS_MINUTE, third))
        return max(0.0, min(second - first, last - second)) * START_S / (third * WINDOW_S)

    def _shared(self, wanted: Replicas, most_workers: int) -> dict[WorkerRole, int]:
        """Numbers with that sum, so that the role with the least for its need has the most."""
        needs = {role: max(1e-9, min(each[role] for each in [*self._needs][-NUM_WINDOWS_KNOWN:])) for role in ROLES}
        (first, last) = (self._bounds.get(role, Bounds(wanted[role], wanted[role])) for role in ROLES)
        counts = [
            count for count in range(first.least, first.most + 1) if last.least <= most_workers - count <= last.most
        ]
        if not counts:
            return dict(wanted)
        prefill = min(counts, key=lambda count: max(needs[PREFILL] / count, needs[DECODE] / (most_workers - count)))
        return {PREFILL: prefill, DECODE: most_workers - prefill}
