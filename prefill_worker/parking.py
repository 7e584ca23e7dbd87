"""Prompts on offer to decode workers: grants, leases and expiry.

A prompt is *offered*, and parked, when its last chunk is planned, and *complete* once token 0 is known. It leaves
when its puller releases it, or when it times out without a pull; one that ended with token 0 soon does, because only a
puller that is on its way has to be told. Owned by `pdserve.engine.worker.scheduler`, which closes the sequences.
This class sends events to the transfer process and never frees a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from pdserve.contracts.events import RequestEvent, RequestEventKind
from pdserve.engine.scheduling.interface import FirstToken, GrantEvent, OfferEvent, WithdrawEvent
from pdserve.engine.scheduling.queue import SequenceQueue
from pdserve.engine.scheduling.sequence import Sequence
from pdserve.engine.scheduling.table import SequenceTable

FINISHED_OFFER_S = 5.0
"""Seconds for which a prompt that ended with token 0 stays on offer to a puller that is on its way."""


@dataclass(slots=True, eq=False)
class _Parked:
    sequence: Sequence
    num_granted_blocks: int = 0
    is_leased: bool = False
    expires_s: float = inf
    """Time at which the offer expires without a lease; infinite until token 0 is known."""


class Parking:
    """Offers by handle."""

    def __init__(self, table: SequenceTable, *, park_timeout_s: float, mint_handle: Callable[[], bytes]) -> None:
        self._table = table
        self._park_timeout_s = park_timeout_s
        self._mint_handle = mint_handle
        self._offers: dict[bytes, _Parked] = {}
        self.expiring = SequenceQueue()
        """Parked prompts without a lease, and those that ended with token 0."""
        self.num_parked = self.num_blocks = 0
        """Prompts on offer whose blocks wait to be pulled, and those blocks."""

    def offer(self, sequence: Sequence) -> None:
        """Offer a prompt whose last chunk is planned, and grant the blocks written so far."""
        handle = self._mint_handle()
        assert handle not in self._offers, "handles must be unique"
        sequence.handle = handle
        self._offers[handle] = _Parked(sequence)
        self.num_parked += 1
        self.num_blocks += len(sequence.block_table)
        self._table.events.append(RequestEvent(key=sequence.key, kind=RequestEventKind.LAST_CHUNK, handle=handle))
        self._table.events.append(OfferEvent(handle))
        self.grant_written(sequence)

    def grant_written(self, sequence: Sequence) -> None:
        """Grant the blocks that are full and not granted yet."""
        offer = self._offers[sequence.handle]
        num_full = sequence.num_written // sequence.block_size
        if num_full > offer.num_granted_blocks:
            self._table.events.append(self._grant(offer, num_full))

    def park(self, sequence: Sequence, first_token: FirstToken, now_s: float) -> None:
        """Grant the remaining blocks: token 0 is known. If it ended the request there is nothing to pull, but the
        puller must be informed."""
        offer = self._offers[sequence.handle]
        num_blocks = offer.num_granted_blocks if first_token.finish else len(sequence.block_table)
        if first_token.finish:
            self._uncount(sequence)
        offer.expires_s = now_s + (FINISHED_OFFER_S if first_token.finish else self._park_timeout_s)
        if first_token.finish or not offer.is_leased:
            self.expiring.push(sequence, offer.expires_s)
        self._table.events.append(self._grant(offer, num_blocks, first_token))

    def _grant(self, offer: _Parked, num_blocks: int, first_token: FirstToken | None = None) -> GrantEvent:
        """Grant of the blocks up to ``num_blocks`` not granted before; final if ``first_token`` is given."""
        sequence = offer.sequence
        first_index, offer.num_granted_blocks = offer.num_granted_blocks, num_blocks
        block_ids = tuple(sequence.block_table[first_index:num_blocks])
        return GrantEvent(
            handle=sequence.handle,
            first_index=first_index,
            block_ids=block_ids,
            generations=self._table.pool.generations(block_ids),
            num_tokens=0 if first_token is None else sequence.num_written,
            first_token=first_token,
        )

    def set_leased(self, handle: bytes, is_leased: bool) -> None:
        """Record that a puller came or left. An unknown handle is ignored."""
        offer = self._offers.get(handle)
        if offer is not None:
            offer.is_leased = is_leased
            if offer.expires_s < inf and not offer.sequence.is_over:
                self.expiring.discard(offer.sequence)
                if not is_leased:
                    self.expiring.push(offer.sequence, offer.expires_s)

    def take_released(self, handle: bytes) -> Sequence | None:
        """Remove an offer whose puller has every block. Returns its sequence unless that has already ended."""
        offer = self._remove(handle)
        return None if offer is None or offer.sequence.is_over else offer.sequence

    def withdraw(self, sequence: Sequence) -> None:
        """Withdraw the sequence's offer, if it has one."""
        if self._remove(sequence.handle) is not None:
            self._table.events.append(WithdrawEvent(sequence.handle))

    def _remove(self, handle: bytes) -> _Parked | None:
        offer = self._offers.pop(handle, None)
        if offer is not None:
            self.expiring.discard(offer.sequence)
            if not offer.sequence.is_over:
                self._uncount(offer.sequence)
        return offer

    def _uncount(self, sequence: Sequence) -> None:
        self.num_parked -= 1
        self.num_blocks -= len(sequence.block_table)

    def take_expired(self, now_s: float) -> list[Sequence]:
        """Withdraw expired offers. Returns their sequences, except those already ended."""
        expired = []
        while (sequence := self.expiring.first_due(now_s)) is not None:
            self.withdraw(sequence)
            if not sequence.is_over:
                expired.append(sequence)
        return expired

    def check_integrity(self) -> None:
        """Recount what is parked, and what may expire.

        Raises:
            AssertionError: a count is wrong, or an expiry is missing.
        """
        parked = [offer.sequence for offer in self._offers.values() if not offer.sequence.is_over]
        assert self.num_parked == len(parked)
        assert self.num_blocks == sum(len(sequence.block_table) for sequence in parked)
        for offer in self._offers.values():
            may_expire = offer.sequence.is_over or (offer.expires_s < inf and not offer.is_leased)
            assert may_expire == (offer.sequence in self.expiring)
        assert len(self.expiring) <= len(self._offers)
