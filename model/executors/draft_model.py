"""Guesses by a smaller model with the same tokens, on the device of the model whose tokens it guesses.

A draft model draws with the target's parameters, seed and position, so that both draw alike where their distributions
are alike, at any temperature (Daliri et al., "Coupling without communication and drafter-invariant speculative
decoding", 2024, arXiv 2408.07978). Its KV pool has the target's block ids. What a sequence lacks in it is computed when
guesses are wanted: nothing is sent, swapped or kept for it. Which tokens a block holds is known from their hash,
because blocks change hands unnoticed. A wrong entry costs right guesses, and no token.

Shape suffixes: B rows with guesses, V vocabulary, T new tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.precision import Precision
from pdserve.contracts.step import StepRow
from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.selection import select_kernels, select_sampling_kernels
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.decoder.decoder import Decoder
from pdserve.model.executors.drafting import num_right
from pdserve.model.executors.step_inputs import StepShape, StepTensors, pack_step
from pdserve.model.sampling.sampling import Sampler, likeliest, plan_draws

_MAX_SEQUENCES = 1024
"""Sequences kept: more than a step has guesses for."""
_MOST_LATE = 16
"""Known tokens of a row without KV at most when it guesses; more are computed before, apart."""
_MAX_HASH = 2**63 - 1


@dataclass(slots=True)
class _Written:
    """What a sequence wrote."""

    hashes: list[int] = field(default_factory=list)
    """Of its known tokens up to the end of each full block."""
    num_known: int = 0
    """Known tokens with KV."""
    guesses: list[int] = field(default_factory=list)
    """Tokens after those, with KV."""


class _Chunk(NamedTuple):
    """New tokens of a row."""

    row: int
    start: int
    tokens: Sequence[int]


class DraftModel:
    """Implements `pdserve.model.executors.drafting.Drafter`. Not thread-safe."""

    def __init__(
        self,
        *,
        folder: Path,
        config: DecoderConfig,
        layout: KvLayout,
        precision: Precision,
        vocab_size: int,
        max_batch_tokens: int,
    ) -> None:
        """Load the checkpoint in ``folder``, whose tokens are the target's, and allocate its pool.

        Args:
            layout: of the draft model, with the blocks of the target's pool.
            vocab_size: of the target, at least the draft model's.
            max_batch_tokens: known tokens computed in a step at most; rows that lack more guess later.

        Raises:
            ValueError: unusable weights.
        """
        pool_bytes = torch.zeros(layout.pool_bytes, dtype=torch.uint8)
        self._pool = KvPool(pool_bytes, layout.shape, getattr(torch, layout.dtype))
        self._layout = layout
        self._model = Decoder(folder, config, precision, select_kernels(self._pool))
        self._sampler = Sampler(select_sampling_kernels(torch.device("cpu")))
        self._max_length, self._num_embedded = config.max_context_length, config.shape.vocab_size
        self._vocab_size, self._eos_token_ids = vocab_size, config.eos_token_ids
        self._max_batch_tokens = max_batch_tokens
        self._written: OrderedDict[int, _Written] = OrderedDict()
        """By sequence; the least recently used first."""
        self._held = np.zeros(layout.num_blocks, np.int64)
        """By block: the hash of all tokens up to its end if it is full, else one of `_marks`."""

    @torch.inference_mode()
    def read(self, rows: Sequence[StepRow]) -> None:
        """Compute the known tokens without KV, except the last ones, as far as the step has room for them."""
        chunks, room = [], self._max_batch_tokens
        for index, row in enumerate(rows):
            if (start := self._find(row)) is not None and len(row.history) - start > _MOST_LATE:
                end = min(len(row.history) - 1, start + room)
                chunks.append(_Chunk(index, start, row.history[start:end]))
                room -= end - start
        if chunks := [chunk for chunk in chunks if chunk.tokens]:
            self._forward(rows, chunks, [])

    @torch.inference_mode()
    def guess(self, rows: Sequence[StepRow]) -> Sequence[Sequence[int]]:
        drafts: list[list[int]] = [[] for _ in rows]
        chunks = []
        for index, row in enumerate(rows):
            if (start := self._find(row)) is not None and len(row.history) - start <= _MOST_LATE:
                chunks.append(_Chunk(index, start, row.history[start:]))
        while chunks:
            num_guesses = [len(drafts[chunk.row]) for chunk in chunks]
            tokens = self._draw([rows[chunk.row] for chunk in chunks], num_guesses, self._forward(rows, chunks, chunks))
            more = []
            for chunk, token in zip(chunks, tokens, strict=True):
                row, draft = rows[chunk.row], drafts[chunk.row]
                if token not in self._ends(row):
                    draft.append(token)
                    if len(draft) < row.max_guesses:
                        more.append(_Chunk(chunk.row, chunk.start + len(chunk.tokens), [token]))
            chunks = more
        for row, draft in zip(rows, drafts, strict=True):
            if draft:
                self._written[row.sequence_id].guesses = draft[:-1]
        return drafts

    def _ends(self, row: StepRow) -> tuple[int, ...]:
        """Tokens that nothing follows."""
        assert row.sample is not None
        return (
            row.sample.stop_token_ids if row.sample.ignore_eos else (*self._eos_token_ids, *row.sample.stop_token_ids)
        )

    def _find(self, row: StepRow) -> int | None:
        """How many of the row's known tokens, except the last, have KV; None if the model cannot compute the row."""
        written = self._written.pop(row.sequence_id, None) or _Written()
        self._written[row.sequence_id] = written
        if len(self._written) > _MAX_SEQUENCES:
            self._written.popitem(last=False)
        history, hashes, block_size = row.history, written.hashes, self._layout.block_size
        num_full = len(history) // block_size
        while len(hashes) < num_full:
            end = (len(hashes) + 1) * block_size
            hashes.append(hash((hashes[-1] if hashes else 0, *history[end - block_size : end])) & _MAX_HASH)
        held = self._held[np.asarray(row.block_table[: num_full + 1], np.intp)]
        is_other = held[:num_full] != hashes[:num_full]
        num_blocks = int(is_other.argmax()) if is_other.any() else num_full
        num_tokens = num_blocks * block_size
        num_known = written.num_known + num_right(written.guesses, history[written.num_known :])
        places = range(num_blocks, min(self._layout.num_blocks_for(num_known), len(held)))
        if (
            written.num_known // block_size == num_blocks
            and (held[num_blocks : places.stop] == _marks(row, places)).all()
        ):
            num_tokens = num_known
        start = min(num_tokens, len(history) - 1)
        is_possible = len(history) + row.max_guesses <= self._max_length and max(history[start:]) < self._num_embedded
        return start if is_possible else None

    def _forward(self, rows: Sequence[StepRow], chunks: Sequence[_Chunk], drawing: Sequence[_Chunk]) -> torch.Tensor:
        """Write the KV of chunks. Returns hidden states after those that are ``drawing``: all of them, or none."""
        new = []
        for index, start, tokens in chunks:
            row, end = rows[index], start + len(tokens)
            self._note(row, start, end)
            new.append(
                StepRow(
                    sequence_id=row.sequence_id,
                    tokens=tokens,
                    cached_length=start,
                    block_table=row.block_table,
                    sample=None,
                )
            )
        lengths = [len(tokens) for _, _, tokens in chunks]
        outputs = [end - 1 for end in accumulate(lengths)] if drawing else []
        words = pack_step(new, [-1] * len(new), outputs, self._layout, self._num_embedded)
        shape = StepShape.of(lengths, len(outputs))
        tensors = StepTensors.of(torch.from_numpy(words), shape)
        return self._model.forward(tensors.tokens.long(), self._pool, tensors.metadata, tensors.outputs)

    def _note(self, row: StepRow, start: int, end: int) -> None:
        """Record that the row writes the KV of its tokens up to ``end``, which may be guesses."""
        num_known, block_size = len(row.history), self._layout.block_size
        if end > num_known:
            return
        written, num_full, first = self._written[row.sequence_id], end // block_size, start // block_size
        written.num_known, written.guesses = end, []
        blocks = np.asarray(row.block_table[: self._layout.num_blocks_for(end + row.max_guesses)], np.intp)
        self._held[blocks[first:num_full]] = written.hashes[first:num_full]
        self._held[blocks[num_full:]] = _marks(row, range(num_full, len(blocks)))

    def _draw(self, rows: Sequence[StepRow], num_guesses: Sequence[int], hidden_BE: torch.Tensor) -> list[int]:
        """Draw the token of each row after so many guesses, as the target would."""
        logits_BV = self._model.logits(hidden_BE)
        if self._num_embedded < self._vocab_size:
            logits_BV = pad(logits_BV, (0, self._vocab_size - self._num_embedded), value=-torch.inf)
        sampling = [_as_drafted(row) for row in rows]
        draws = plan_draws(sampling, self._vocab_size, num_guesses)
        best_B, token_B = likeliest(logits_BV)
        self._sampler.sample(logits_BV, best_B, token_B, sampling, draws, torch.from_numpy(draws.words), _no_token)
        tokens: list[int] = token_B.tolist()
        return tokens


def _marks(row: StepRow, places: range) -> list[int]:
    """What stands for a row's blocks that are not full, by their place in its table: a sequence may come back with the
    same blocks in another order."""
    return [-1 - (hash((row.sequence_id, place)) & _MAX_HASH) for place in places]


def _as_drafted(row: StepRow) -> StepRow:
    """The row as a draft samples it: without log probabilities, and without the mask of a grammar."""
    assert row.sample is not None
    if row.sample.num_logprobs < 0 and row.sample.grammar is None:
        return row
    return replace(row, sample=replace(row.sample, num_logprobs=-1, grammar=None))


def _no_token(row: int) -> int:
    raise AssertionError("rows with guesses have known tokens only")
