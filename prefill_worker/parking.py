"""Prompts on offer to decode workers: grants, leases and expiry.

A prompt is *offered* when its last chunk is planned and *parked* once token 0 is known. It leaves when its puller
releases it, or when it times out without a pull. Owned by `pdserve.prefill_worker.scheduler`, which closes the
sequences. This class sends events to the transfer process and never frees a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from pdserve.contracts.events import RequestEvent, RequestEventKind
from pdserve.engine.scheduling.interface import FirstToken, GrantEvent, OfferEvent, WithdrawEvent
from pdserve.engine.scheduling.sequence import Sequence
from pdserve.engine.scheduling.table import SequenceTable


@dataclass(slots=True, eq=False)
class _Parked:
    sequence: Sequence
    num_granted_blocks: int = 0
    is_leased: bool = False
    expires_s: float = inf
    """Time at which the offer expires without a lease; infinite until token 0 is known."""

    @property
    def due_s(self) -> float:
        return inf if self.is_leased and not self.sequence.is_over else self.expires_s


class Parking:
    """Offers by handle."""

    def __init__(self, table: SequenceTable, *, park_timeout_s: float, mint_handle: Callable[[], bytes]) -> None:
        self._table = table
        self._park_timeout_s = park_timeout_s
        self._mint_handle = mint_handle
        self._offers: dict[bytes, _Parked] = {}

    @property
    def num_parked(self) -> int:
        """Prompts whose blocks wait to be pulled."""
        return [offer.sequence.is_over for offer in self._offers.values()].count(False)

    @property
    def num_blocks(self) -> int:
        """Blocks of the prompts on offer."""
        sequences = [offer.sequence for offer in self._offers.values()]
        return sum([len(sequence.block_table) for sequence in sequences if not sequence.is_over])

    def offer(self, sequence: Sequence) -> None:
        """Offer a prompt whose last chunk is planned, and grant the blocks written so far."""
        handle = self._mint_handle()
        assert handle not in self._offers, "handles must be unique"
        sequence.handle = handle
        self._offers[handle] = _Parked(sequence)
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
        offer.expires_s = now_s + self._park_timeout_s
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

    def take_released(self, handle: bytes) -> Sequence | None:
        """Remove an offer whose puller has every block. Returns its sequence unless that has already ended."""
        offer = self._offers.pop(handle, None)
        return None if offer is None or offer.sequence.is_over else offer.sequence

    def withdraw(self, sequence: Sequence) -> None:
        """Withdraw the sequence's offer, if it has one."""
        if self._offers.pop(sequence.handle, None) is not None:
            self._table.events.append(WithdrawEvent(sequence.handle))

    def take_expired(self, now_s: float) -> list[Sequence]:
        """Withdraw expired offers. Returns their sequences, except those already ended."""
        expired = [offer.sequence for offer in self._offers.values() if offer.due_s <= now_s]
        for sequence in expired:
            self.withdraw(sequence)
        return [sequence for sequence in expired if not sequence.is_over]

    def next_expiry_s(self) -> float:
        """Next expiry time; infinite if nothing can expire."""
        return min([offer.due_s for offer in self._offers.values()], default=inf)
