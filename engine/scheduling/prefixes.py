"""Prefixes that move between the prefix caches of workers: pulls of what another worker caches of a prompt, and blocks
lent to such pulls by others.

A prompt whose request names a `pdserve.contracts.request.PrefixSource` gets all its blocks at admission, as any other,
and is computed once its pull has ended, by success or not: from the first token that it then lacks. The transfer
process ends each pull at its deadline, so that no source has to answer. A lent block is referenced until the pull's
stream ends, which the transfer process bounds too, or until the worker needs blocks itself.

Owned by `pdserve.engine.worker.scheduler`. Neither class decides which sequence runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pdserve.contracts.request import MAX_PREFIX_BLOCKS, KvSource
from pdserve.engine.scheduling.interface import GrantEvent, PullResult, StartPullEvent, WithdrawEvent
from pdserve.engine.scheduling.sequence import Sequence
from pdserve.engine.scheduling.table import SequenceTable

MAX_PULL_S = 60.0
"""Longest time until the pull of a prefix times out."""


class PrefixPulls:
    """Pulls in flight. Each has its sequence's id; `AbortPullEvent` is for `Scheduler` to send."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        self._pulls: dict[int, tuple[Sequence, int]] = {}
        """Sequences, each with the number of tokens that it asked for, by pull."""

    def __contains__(self, pull_id: int) -> bool:
        return pull_id in self._pulls

    def sequences(self) -> Iterator[Sequence]:
        """Those that wait for their pull."""
        return (sequence for sequence, _ in self._pulls.values() if not sequence.is_over)

    @property
    def num_tokens_left(self) -> int:
        """Tokens that those sequences will have to compute if all pulls succeed."""
        pulls = self._pulls.values()
        return sum([sequence.num_uncomputed - num_asked for sequence, num_asked in pulls if not sequence.is_over])

    def try_start(self, sequence: Sequence, num_cacheable: int) -> bool:
        """Start the pull of a sequence that has its first blocks, if its request names a source and it lacks enough of
        what that has; returns whether it does.

        Args:
            num_cacheable: leading blocks that need not be computed.
        """
        source, block_size = sequence.request.prefix_source, sequence.block_size
        if source is None or sequence.is_preempted:
            return False
        first = sequence.num_registered_blocks
        end = min(source.num_tokens // block_size, num_cacheable, first + MAX_PREFIX_BLOCKS)
        num_tokens = (end - first) * block_size
        if num_tokens <= 0 or num_tokens < source.min_tokens:
            return False
        sequence.is_pulling = True
        self._pulls[sequence.sequence_id] = sequence, num_tokens
        pull = StartPullEvent(
            pull_id=sequence.sequence_id,
            source=KvSource(address=source.address, worker_epoch=source.worker_epoch, handle=b""),
            num_cached_blocks=0,
            block_ids=tuple(sequence.block_table[first:end]),
            num_tokens=num_tokens,
            deadline_s=min(MAX_PULL_S, source.max_s),
            prefix=tuple(sequence.block_hashes(end, first)),
        )
        self._table.events.append(pull)
        return True

    def finish(self, result: PullResult) -> Sequence | None:
        """Handle the end of a pull, after which nothing writes to its targets. Returns its sequence, to be computed
        from its first token without KV, unless that has ended."""
        sequence = self._table.end_pull(self._pulls.pop(result.pull_id)[0])
        if sequence is not None and not result.failure:
            sequence.receive_blocks(result.num_tokens // sequence.block_size)
            self._table.register_written(sequence)
        return sequence


class Lending:
    """Cached blocks on loan to pulls of other workers, by handle. Once a loan has ended, these blocks are the first to
    be evicted: the prompt is continued on the other worker, and a second copy would take the room of another prompt."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        self._lent: dict[bytes, list[int]] = {}
        """In order of the loans."""

    def lend(self, handle: bytes, hashes: Collection[bytes]) -> None:
        """Grant the leading blocks of ``hashes`` that are cached here, as long as half of the pool is not on loan."""
        pool = self._table.pool
        num_left = pool.num_blocks // 2 - sum(map(len, self._lent.values()))
        blocks = pool.match_prefix(hashes)[: max(0, num_left)]
        pool.share(blocks)
        self._lent[handle] = blocks
        self._table.events.append(
            GrantEvent(
                handle=handle,
                first_index=0,
                block_ids=tuple(blocks),
                generations=pool.generations(blocks),
                num_tokens=len(blocks) * pool.block_size,
                is_prefix=True,
            )
        )

    def end(self, handle: bytes) -> None:
        """The pull has ended. An unknown handle is ignored."""
        blocks = self._take_back(handle)
        self._table.pool.evict_first(blocks)

    def withdraw(self) -> bool:
        """Take back the blocks that were lent first, of which the puller then uses none that it has not verified;
        returns whether there were any."""
        handle = next(iter(self._lent), None)
        if handle is None:
            return False
        self._take_back(handle)
        self._table.events.append(WithdrawEvent(handle))
        return True

    def _take_back(self, handle: bytes) -> list[int]:
        blocks = self._lent.pop(handle, [])
        self._table.pool.release(blocks)
        return blocks
