"""Sequences of one worker, the steps planned for them, and the events they caused.

Part of `pdserve.engine.worker.scheduler`: opens and closes sequences, processes results one step late, applies the stop
rules, registers complete blocks in the prefix cache. Never decides which sequence runs.

Retiring blocks: a sequence that has ended or was preempted keeps its blocks until no planned step and no pull writes
to them, because both write even if the result is no longer needed. It also keeps them until no planned step copies
them to the host, because a pull into their next owner would not wait for that step.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from pdserve.contracts.events import (
    PromptLogprobsEvent,
    RefusalCode,
    RequestEvent,
    RequestEventKind,
    RequestKey,
    TokenEvent,
)
from pdserve.contracts.request import FinishReason, GenerationRequest
from pdserve.contracts.step import BlockCopy, ModelLimits, SampledToken, StepBatch, StepOutput, StepRow
from pdserve.engine.scheduling.interface import Event, FirstToken
from pdserve.engine.scheduling.queue import SequenceQueue
from pdserve.engine.scheduling.sequence import Sequence
from pdserve.kv_transfer.block_pool import BlockPool


@dataclass(slots=True)
class AdmissionBudget:
    """Capacity for sequences that start to take blocks in a step."""

    num_slots: int
    """Batch slots: number of sequences that may start."""
    num_blocks: int
    """Maximum total of blocks they are expected to need."""


@dataclass(slots=True)
class PlannedStep:
    """A step under construction, with the sequence of each row."""

    batch: StepBatch
    spare_rows: list[StepRow] = field(default_factory=list)
    """Of `SequenceTable`."""
    sequences: list[Sequence] = field(default_factory=list)
    swapped_out: list[Sequence] = field(default_factory=list)
    num_chunk_tokens: int = 0
    """Prompt tokens in its prefill chunks."""

    @property
    def num_rows(self) -> int:
        return len(self.sequences)

    def add_chunk(self, sequence: Sequence, num_tokens: int) -> None:
        """Add a row that computes the next ``num_tokens`` known tokens and samples if they are the last ones."""
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
                choice=sequence.request.choice,
            )
        )
        self._account(sequence, end, samples)

    def add_decode(self, sequence: Sequence) -> None:
        """Add a row that computes the newest token, known or pending, and samples the next one."""
        start, tokens, spare = sequence.num_computed, sequence.tokens, self.spare_rows
        is_pending = start == len(tokens)
        row = spare.pop() if spare else StepRow(sequence_id=0, tokens=(), cached_length=0, block_table=(), sample=None)
        row.sequence_id = sequence.sequence_id
        row.tokens = () if is_pending else (tokens[start],)
        row.previous_row = sequence.last_row if is_pending else -1
        row.cached_length = start
        row.block_table = sequence.block_table
        row.sample = sequence.sampling
        row.sample_position = start + 1
        row.history = sequence.history
        row.num_prompt_tokens = sequence.num_prompt_tokens
        row.banned_tokens = sequence.early_end_ids and sequence.banned_at(start + 1)
        row.choice = sequence.request.choice
        self.batch.rows.append(row)
        self._account(sequence, start + 1, True)

    def allow_guesses(self, index: int, num_guesses: int, num_forced: int = 0) -> None:
        """Let the executor guess up to so many tokens in a row of one known token, as far as the row's blocks reach.

        Args:
            num_forced: those that the row's grammar may prescribe instead.
        """
        row, sequence = self.batch.rows[index], self.sequences[index]
        room = len(row.block_table) * sequence.block_size - row.cached_length - 1
        row.max_guesses, row.max_forced = min(num_guesses, room), min(num_forced, room)
        row.history = sequence.tokens
        self.batch.may_guess |= row.max_guesses > 0 or row.max_forced > 0

    def add_swap_out(self, sequence: Sequence, slots: list[int]) -> None:
        """Copy the sequence's leading blocks to host slots, as they are after all earlier steps."""
        self.batch.swap_outs += map(BlockCopy, sequence.block_table, slots)
        sequence.num_in_flight += 1
        self.swapped_out.append(sequence)

    def add_swap_in(self, sequence: Sequence, slots: list[int], num_skipped: int) -> None:
        """Copy host slots back to the sequence's blocks, except the first ``num_skipped``, then decode."""
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


class SequenceTable:
    """Live sequences by key, steps in flight in order, events in order."""

    def __init__(self, pool: BlockPool, limits: ModelLimits, ids: Iterator[int] | None = None) -> None:
        """``ids``: of sequences, rising; from 0 by default."""
        self.pool = pool
        self.limits = limits
        self.events: list[Event] = []
        self.num_retiring = 0
        """Sequences whose blocks are freed when the steps in flight complete."""
        self.spare_rows: list[StepRow] = []
        """Rows without guesses and prompt logprobs that the driver gave back, because nobody reads them any more:
        decode rows use them again. A simulator does, to which a new object for each token is a tenth of its time."""
        self.num_to_decode = 0
        """Live sequences that are not handed off."""
        self.must_drain = False
        """Nothing may be planned: the step in flight depends on a failed one and may fail too. Any step planned on
        top of it would fail in turn, for as long as new sequences arrive."""
        self._live: dict[RequestKey, Sequence] = {}
        self.deadlines = SequenceQueue()
        """When requests are given up whose answer has not begun: the wait for that is bounded, not the answer."""
        self.steps_in_flight: deque[PlannedStep] = deque()
        """In planning order; callers must not modify it."""
        self._failed: list[tuple[Sequence, str]] = []
        self._ids = ids or itertools.count()
        self._num_steps = 0

    # Requests

    def open(self, key: RequestKey, request: GenerationRequest, now_s: float, *, is_handoff: bool) -> Sequence | None:
        """Add a request, or reject one that could never run. A key that is already live is ignored.

        Args:
            is_handoff: True to compute only the prompt here and park it; False to decode here to the end.
        """
        if key in self._live:
            return None
        sampling = request.sampling
        eos_token_ids = () if sampling.ignore_eos else self.limits.eos_token_ids
        ends = (*self.limits.eos_token_ids, *sampling.stop_token_ids) if sampling.min_tokens else ()
        sequence = Sequence(
            sequence_id=next(self._ids),
            key=key,
            request=request,
            arrived_s=now_s,
            block_size=self.pool.block_size,
            is_handoff=is_handoff,
            max_length=len(request.prompt_tokens) + sampling.max_tokens,
            stop_token_ids=frozenset((*eos_token_ids, *sampling.stop_token_ids)),
            early_end_ids=tuple(token for token in ends if token < self.limits.vocab_size),
        )
        refusal = self._refusal(sequence)
        if refusal:
            self.emit(key, RequestEventKind.REJECTED, refusal, RefusalCode.INVALID)
            return None
        self._live[key] = sequence
        self.num_to_decode += not is_handoff
        self.deadlines.push(sequence, now_s + request.deadline_s)
        return sequence

    def _refusal(self, sequence: Sequence) -> str:
        """Reason why the request can never run here; empty if it can."""
        request = sequence.request
        num_prompt, max_tokens = len(request.prompt_tokens), request.sampling.max_tokens
        limit = self.limits.max_model_len
        if num_prompt + max_tokens > limit:
            return (
                f"{num_prompt} prompt tokens and max_tokens {max_tokens} exceed max_model_len {limit}: "
                "shorten the prompt, lower max_tokens, or raise max_model_len"
            )
        if not num_prompt or len(request.emitted_tokens) >= max_tokens:
            return f"nothing to generate: {num_prompt} prompt tokens, all of max_tokens {max_tokens} emitted already"
        num_kv_tokens = request.num_known_tokens if sequence.is_handoff else sequence.num_kv_tokens_max
        num_blocks = self.pool.num_blocks_for(num_kv_tokens)
        if num_blocks > self.pool.num_blocks:
            return (
                f"{num_kv_tokens} tokens need {num_blocks} KV blocks of {self.pool.block_size} and the worker has "
                f"{self.pool.num_blocks}: shorten the prompt, lower max_tokens, or raise kv_memory"
            )
        return ""

    def get(self, key: RequestKey) -> Sequence | None:
        return self._live.get(key)

    def emit(
        self, key: RequestKey, kind: RequestEventKind, message: str = "", refusal: RefusalCode = RefusalCode.NONE
    ) -> None:
        self.events.append(RequestEvent(key, kind, message, refusal=refusal))

    def emit_started(self, sequence: Sequence, now_s: float) -> None:
        waited_s = now_s - sequence.arrived_s
        self.events.append(
            RequestEvent(
                sequence.key, RequestEventKind.STARTED, num_cached_tokens=sequence.num_written, waited_s=waited_s
            )
        )

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def close(self, sequence: Sequence) -> None:
        """Forget a request that has ended on this worker and retire its blocks."""
        assert not sequence.is_over, f"{sequence.key} is closed twice"
        sequence.is_over = True
        del self._live[sequence.key]
        self.num_to_decode -= not sequence.is_handoff
        self.deadlines.discard(sequence)
        self.retire(sequence)

    # Blocks

    def start(self, sequence: Sequence, budget: AdmissionBudget, num_cacheable: int) -> bool:
        """Allocate a sequence's first blocks if those it is expected to need fit ``budget``; returns whether they do.

        Leading ones come from the prefix cache, which may hold up to ``num_cacheable`` of them. A prompt to hand off
        needs blocks for itself only; one to decode here also starts with headroom.
        """
        pool = self.pool
        cached = pool.match_prefix(sequence.iter_block_hashes(num_cacheable))
        num_taken = self.num_blocks_taken(sequence, cached)
        if budget.num_slots <= 0 or num_taken > budget.num_blocks:
            return False
        is_handoff, num_known = sequence.is_handoff, len(sequence.tokens)
        num_blocks = sequence.num_blocks_for(num_known) if is_handoff else sequence.num_blocks_with_headroom()
        pool.share(cached)
        sequence.start_at(cached, pool.allocate(num_blocks - len(cached)))
        budget.num_slots -= 1
        budget.num_blocks -= num_taken
        return True

    def num_blocks_taken(self, sequence: Sequence, cached: list[int]) -> int:
        """Available blocks that the sequence is expected to need if it starts with the ``cached`` ones."""
        is_handoff, num_known = sequence.is_handoff, len(sequence.tokens)
        num_expected = sequence.num_blocks_for(num_known) if is_handoff else sequence.num_blocks_expected()
        return num_expected - len(cached) + self.pool.num_unreferenced(cached)

    def retire(self, sequence: Sequence) -> None:
        """Free the sequence's blocks, now or once nothing in flight writes to them."""
        if sequence.is_idle:
            self.pool.release(sequence.lose_blocks())
        elif not sequence.is_retiring:
            sequence.is_retiring = True
            self.num_retiring += sequence.num_in_flight > 0

    def end_pull(self, sequence: Sequence) -> Sequence | None:
        """Nothing writes to the targets of a sequence's pull any more. Returns it unless it has ended."""
        sequence.is_pulling = False
        if sequence.is_retiring:
            self.pool.release(sequence.lose_blocks())
        return None if sequence.is_over else sequence

    def register_written(self, sequence: Sequence) -> None:
        """Register every full block in the prefix cache."""
        num_full = sequence.num_written // sequence.block_size
        if num_full == sequence.num_registered_blocks or not self.pool.caches_content:
            return
        num_known = sequence.num_registered_blocks
        self.pool.register(sequence.block_table[num_known:num_full], sequence.block_hashes(num_full, num_known))
        sequence.num_registered_blocks = num_full

    # Steps

    @property
    def is_guessing(self) -> bool:
        """Whether a step in flight may have guesses: until it ends, nobody knows where its sequences go on."""
        return any(step.batch.may_guess for step in self.steps_in_flight)

    def begin_step(self) -> PlannedStep:
        assert len(self.steps_in_flight) <= 1, "two steps are in flight already"
        return PlannedStep(StepBatch(step_id=self._num_steps, rows=[]), self.spare_rows)

    def commit(self, step: PlannedStep) -> StepBatch | None:
        """Commit a step; ``None`` if it has neither rows nor copies."""
        if not step.sequences and not step.swapped_out:
            return None
        self._num_steps += 1
        self.steps_in_flight.append(step)
        return step.batch

    def complete(self, output: StepOutput) -> list[tuple[Sequence, FirstToken | None]]:
        """Process a step's results: mark KV as written, append and emit tokens. Returns the sequences that finished
        or have a handle, each with the token that it sampled."""
        step = self._take_step(output.step_id)
        self.must_drain = False
        caches_content, more = self.pool.caches_content, output.more
        results: list[tuple[Sequence, FirstToken | None]] = []
        for index, (sequence, row, sampled) in enumerate(
            zip(step.sequences, step.batch.rows, output.sampled, strict=True)
        ):
            if sequence.is_over:
                self.leave_step(sequence)
                continue
            if index in output.failed:
                sequence.num_pending -= 1
                self.pool.forget(sequence.block_table)
                self._failed.append((sequence, output.failed[index]))
                self.leave_step(sequence)
                continue
            sequence.num_written = num_written = row.cached_length + (len(row.tokens) or 1)
            if caches_content and num_written >= (sequence.num_registered_blocks + 1) * sequence.block_size:
                self.register_written(sequence)
            if row.prompt_targets:
                entries = output.prompt_logprobs[index]
                assert len(entries) == len(row.prompt_targets), f"{len(entries)} prompt logprobs of row {index}"
                self.events.append(PromptLogprobsEvent(sequence.key, row.cached_length + 1, entries))
            if sampled is not None:
                finish = self.take_token(sequence, sampled)
                if more and not finish and index in more:
                    finish = self._take_more(sequence, more[index])
                if finish or sequence.handle:
                    results.append((sequence, FirstToken(sampled.token, finish)))
            elif sequence.handle:
                results.append((sequence, None))
            if sequence.is_retiring:
                self.leave_step(sequence)
            else:  # most rows, without a call
                sequence.num_in_flight -= 1
        for sequence in step.swapped_out:
            self.leave_step(sequence)
        return results

    def take_failed(self) -> list[tuple[Sequence, str]]:
        """Return the live sequences whose rows failed since the last call, each with the reason, for their scheduler to
        end. Their blocks are removed from the prefix cache."""
        failed, self._failed = self._failed, []
        return failed

    def take_token(self, sequence: Sequence, sampled: SampledToken) -> FinishReason:
        sequence.num_pending -= 1
        index = len(sequence.tokens) - sequence.num_prompt_tokens
        token, logprobs = sampled
        finish = sequence.append(token)
        self.events.append(TokenEvent(sequence.key, sequence.request.choice, index, token, logprobs, finish))
        return finish

    def _take_more(self, sequence: Sequence, more: Collection[SampledToken]) -> FinishReason:
        """Take the tokens after the first of a row, up to the end of the answer. The KV of each but the last is that
        of a right guess; what wrong ones left behind it is written over."""
        assert not sequence.is_retiring, "a sequence keeps its blocks while its length is not known"
        finish = FinishReason.NONE
        for sampled in more:
            sequence.num_pending += 1
            sequence.num_computed += 1
            finish = self.take_token(sequence, sampled)
            if finish:
                break
        sequence.num_written = sequence.num_computed
        self.register_written(sequence)
        return finish

    def receive(self, sequence: Sequence, num_tokens: int, first: FirstToken) -> FinishReason:
        """Record a pulled prompt and its token 0, which the prefill worker has emitted. Returns the finish reason of
        that token."""
        if first.finish:
            return first.finish
        sequence.receive(num_tokens)
        self.register_written(sequence)
        return sequence.append(first.token)

    def fail_step(self, step_id: int) -> list[Sequence]:
        """Handle a failed step: return the live sequences it computed or copied, for their scheduler to end. Their
        blocks are removed from the prefix cache."""
        step = self._take_step(step_id)
        self.must_drain = bool(self.steps_in_flight)
        sequences = step.sequences + step.swapped_out
        for sequence in sequences:
            if not sequence.is_over:
                self.pool.forget(sequence.block_table)
            self.leave_step(sequence)
        return [sequence for sequence in dict.fromkeys(sequences) if not sequence.is_over]

    def _take_step(self, step_id: int) -> PlannedStep:
        step = self.steps_in_flight.popleft()
        assert step.batch.step_id == step_id, f"step {step_id} ended before step {step.batch.step_id}"
        return step

    def leave_step(self, sequence: Sequence) -> None:
        """A step in flight that computed or copied the sequence has ended, and its results are taken."""
        sequence.num_in_flight -= 1
        if sequence.is_retiring and not sequence.num_in_flight:
            self.num_retiring -= 1
            self.pool.release(sequence.lose_blocks())
