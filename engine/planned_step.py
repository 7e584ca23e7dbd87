"""A step while its scheduler decides it: the rows, the block copies before them, and the sequence that each belongs to.

Begun and taken back by `pdserve.engine.sequence_table`; in between the schedulers add to it. Knows neither pool nor
other steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.contracts.step import BlockCopy, StepBatch, StepRow
from pdserve.engine.sequence import Sequence


@dataclass(slots=True)
class PlannedStep:
    """A step and the sequence of each of its rows."""

    batch: StepBatch
    sequences: list[Sequence] = field(default_factory=list)
    swapped_out: list[Sequence] = field(default_factory=list)
    borrowed_blocks: list[int] = field(default_factory=list)
    """Sources of block copies, with a reference to each until the step has ended."""
    num_chunk_tokens: int = 0
    """Tokens of its chunks of prompts."""
    num_forking: int = 0
    """Rows that sample for several choices."""

    @property
    def num_rows(self) -> int:
        return len(self.sequences)

    @property
    def is_empty(self) -> bool:
        """Whether it has neither rows nor copies."""
        return not self.num_rows and not self.swapped_out

    def add_chunk(self, sequence: Sequence, num_tokens: int) -> None:
        """A row that computes the next ``num_tokens`` known tokens, and samples if they are the last ones."""
        start = sequence.num_computed
        end = start + num_tokens
        self.num_chunk_tokens += num_tokens
        samples = end == len(sequence.tokens)
        self.batch.rows.append(
            StepRow(
                sequence_id=sequence.sequence_id,
                tokens=sequence.tokens[start:end],
                cached_length=start,
                block_table=sequence.block_table,
                sample=sequence.sampling if samples else None,
                sample_position=end,
                history=sequence.history if samples else (),
                num_prompt_tokens=sequence.num_prompt_tokens,
                banned_tokens=sequence.banned_at(end) if samples else (),
                prompt_targets=sequence.tokens[start + 1 : end + 1] if sequence.wants_prompt_logprobs else (),
                num_prompt_logprobs=sequence.sampling.num_prompt_logprobs,
                choice=sequence.choice,
                num_choices=sequence.num_choices if samples else 1,
            )
        )
        self.num_forking += samples and sequence.num_choices > 1
        self._account(sequence, end, samples)

    def add_decode(self, sequence: Sequence) -> None:
        """A row that computes the newest token, known or not yet, and samples the one after it."""
        start, tokens = sequence.num_computed, sequence.tokens
        is_pending = start == len(tokens)
        if sequence.copy_source >= 0:
            self._add_block_copy(sequence)
        self.batch.rows.append(
            StepRow(
                sequence_id=sequence.sequence_id,
                tokens=() if is_pending else (tokens[start],),
                previous_row=sequence.last_row if is_pending else -1,
                cached_length=start,
                block_table=sequence.block_table,
                sample=sequence.sampling,
                sample_position=start + 1,
                history=sequence.history,
                num_prompt_tokens=sequence.num_prompt_tokens,
                banned_tokens=sequence.early_end_ids and sequence.banned_at(start + 1),
                choice=sequence.choice,
            )
        )
        self._account(sequence, start + 1, True)

    def _add_block_copy(self, sequence: Sequence) -> None:
        """Before its first row, a fork gets what its root has in the last block of the prompt."""
        target = sequence.block_table[sequence.num_computed // sequence.block_size]
        self.batch.block_copies.append(BlockCopy(sequence.copy_source, target))
        self.borrowed_blocks += sequence.take_copy_source()

    def add_swap_out(self, sequence: Sequence, slots: list[int]) -> None:
        """Copy the sequence's leading blocks to host slots, as they are when the steps before have run."""
        self.batch.swap_outs += map(BlockCopy, sequence.block_table, slots)
        sequence.num_in_flight += 1
        self.swapped_out.append(sequence)

    def add_swap_in(self, sequence: Sequence, slots: list[int], num_skipped: int) -> None:
        """Copy host slots back to the sequence's blocks, all but the first ``num_skipped``; then decode."""
        blocks = sequence.block_table[num_skipped : len(slots)]
        self.batch.swap_ins += map(BlockCopy, slots[num_skipped:], blocks)
        sequence.num_computed = len(sequence.tokens) - 1
        self.add_decode(sequence)

    def _account(self, sequence: Sequence, num_computed: int, samples: bool) -> None:
        sequence.num_computed = num_computed
        sequence.num_in_flight += 1
        sequence.num_pending += samples
        sequence.last_row = len(self.sequences)
        self.sequences.append(sequence)
