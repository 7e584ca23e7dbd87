"""Prompts that wait until blocks of a tier are in the pool, and the blocks that the tier writes meanwhile.

A prompt about to be admitted whose prefix goes on in the tier, beyond the pool, waits for these blocks if reading them
takes less time than computing them, by the seconds that the last reads took. They enter the pool as cached blocks, and
the prompt is queued again where it was; others are computed meanwhile. A restore that takes as long as the computation
would have is given up, with the blocks that it got. Each prompt waits once.

Owned by `pdserve.engine.worker.scheduler`. Knows no file, thread or clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import NamedTuple, Protocol

from pdserve.engine.scheduling.sequence import Sequence
from pdserve.engine.scheduling.table import AdmissionBudget, SequenceTable

TRY_EVERY = 32
"""One in so many restores that seem too slow is tried all the same: a disk that was slow once may not be any more."""
NEWEST_WEIGHT = 0.25
"""Weight of the newest read in the mean that predicts the next one."""


class Tier(Protocol):
    """Copies of blocks by hash: `pdserve.kv_transfer.file_tier.FileTier`."""

    failure: str
    """Why it is off; empty while it works."""

    def match(self, hashes: Iterable[bytes]) -> list[bytes]: ...

    def restore(self, restore_id: int, hashes: Many[bytes], blocks: Many[int]) -> None: ...

    def end_restore(self, restore_id: int) -> tuple[int, float]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpace:
    """A tier, and when it pays off."""

    tier: Tier | None
    compute_s: Callable[[int, int], float]
    """Seconds to compute so many tokens of a prompt after so many cached ones."""


NO_TIER = TierSpace(tier=None, compute_s=lambda num_tokens, num_cached: 0.0)


class _Restore(NamedTuple):
    sequence: Sequence
    shared: list[int]
    """Blocks before, which stay in the pool meanwhile."""
    blocks: list[int]
    hashes: list[bytes]
    begun_s: float
    deadline_s: float


class Restores:
    """Restores in flight, and how long the last ones took."""

    def __init__(self, table: SequenceTable, space: TierSpace) -> None:
        self._table = table
        self._tier = space.tier
        self._compute_s = space.compute_s
        self._in_flight: dict[int, _Restore] = {}
        self.num_begun = self.num_given_up = self._num_declined = 0
        self._block_s = 0.0
        """Expected seconds of a block; 0 before the first restore."""
        self.num_restored_tokens = 0
        self.saved_s = 0.0
        """Predicted seconds to compute these, less those of restoring them."""

    @property
    def num_waiting(self) -> int:
        return len(self._in_flight)

    @property
    def tier_failure(self) -> str:
        return self._tier.failure if self._tier is not None else ""

    @property
    def num_tokens_left(self) -> int:
        """Tokens that the waiting prompts will have to compute."""
        return sum(
            len(each.sequence.tokens) - (len(each.shared) + len(each.blocks)) * each.sequence.block_size
            for each in self._in_flight.values()
        )

    def begin(self, sequence: Sequence, budget: AdmissionBudget, num_cacheable: int, now_s: float) -> bool:
        """Have the tier write what the pool lacks of a prompt's first ``num_cacheable`` blocks; returns whether the
        prompt is to wait for it. It must fit ``budget``, which it then takes its share of."""
        if self._tier is None or sequence.was_restored:
            return False
        pool, block_size = self._table.pool, sequence.block_size
        shared = pool.match_prefix(sequence.iter_block_hashes(num_cacheable))
        hashes = self._tier.match(islice(sequence.iter_block_hashes(num_cacheable), len(shared), None))
        num_taken = self._table.num_blocks_taken(sequence, shared)
        if not hashes or num_taken > budget.num_blocks:
            return False
        sequence.was_restored = True
        compute_s = self._compute_s(len(hashes) * block_size, len(shared) * block_size)
        if len(hashes) * self._block_s >= compute_s:
            self._num_declined += 1
            if self._num_declined % TRY_EVERY:
                return False
        budget.num_blocks -= num_taken
        pool.share(shared)
        blocks = pool.allocate(len(hashes))
        restore_id, self.num_begun = self.num_begun, self.num_begun + 1
        self._in_flight[restore_id] = _Restore(sequence, shared, blocks, hashes, now_s, now_s + compute_s)
        self._tier.restore(restore_id, hashes, blocks)
        return True

    def finish(self, restore_id: int, late_s: float = 0.0) -> Sequence | None:
        """End a restore, done or not: the blocks that it got are cached. Returns the prompt that waited for it; none if
        it was given up before.

        Args:
            late_s: seconds since it began, if it is given up.
        """
        restore = self._in_flight.pop(restore_id, None)
        if restore is None:
            return None
        assert self._tier is not None
        num_done, read_s = self._tier.end_restore(restore_id)
        block_s = max(read_s / max(1, num_done), late_s / len(restore.blocks))
        if block_s:
            self._block_s += (NEWEST_WEIGHT if self._block_s else 1.0) * (block_s - self._block_s)
        block_size = restore.sequence.block_size
        self.num_restored_tokens += num_done * block_size
        compute_s = self._compute_s(num_done * block_size, len(restore.shared) * block_size)
        self.saved_s += max(0.0, compute_s - max(read_s, late_s))
        self._table.pool.register(restore.blocks[:num_done], restore.hashes[:num_done])
        self._table.pool.release([*restore.shared, *restore.blocks])
        return restore.sequence

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence, if it waits."""
        for restore_id in [each for each, restore in self._in_flight.items() if restore.sequence is sequence]:
            self.finish(restore_id)

    def take_late(self, now_s: float) -> list[Sequence]:
        """Give up the restores that took as long as computing. Returns their prompts."""
        late = [(each, restore) for each, restore in self._in_flight.items() if restore.deadline_s <= now_s]
        for restore_id, restore in late:
            self.num_given_up += 1
            self.finish(restore_id, now_s - restore.begun_s)
        return [restore.sequence for _, restore in late]

    def next_deadline_s(self) -> float:
        """Infinite if no prompt waits."""
        return min((restore.deadline_s for restore in self._in_flight.values()), default=inf)
