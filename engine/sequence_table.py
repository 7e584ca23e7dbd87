"""The sequences of one worker, the steps planned for them, and the events that they caused.

What every phase's scheduler does alike: open and close sequences, take a step's results one step late, apply the stop
rules, part the choices of a request, tell the prefix cache of complete blocks. Which sequence runs is the schedulers'
business, and `pdserve.engine.planned_step` builds the rows.

The rule of retiring blocks: a sequence that is over, or preempted, keeps its blocks until no planned step and no pull
writes to them, because both write whether or not anybody still wants the result; and until no planned step copies them
to the host, because a pull into their next owner would not wait for that step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from typing import NamedTuple

from pdserve.contracts.events import RefusalCode
from pdserve.contracts.request import FinishReason, GenerationRequest
from pdserve.contracts.step import ModelLimits, SampledToken, StepBatch, StepOutput
from pdserve.engine.planned_step import PlannedStep
from pdserve.engine.scheduler import (
    Event,
    FirstToken,
    PromptLogprobsEvent,
    RequestEvent,
    RequestEventKind,
    RequestKey,
    TokenEvent,
)
from pdserve.engine.sequence import Sequence
from pdserve.engine.sequence_group import SequenceGroup, fork
from pdserve.engine.sequence_queue import SequenceQueue
from pdserve.kv_transfer.block_pool import BlockPool


class RowResult(NamedTuple):
    """A completed row that its scheduler has to look at."""

    sequence: Sequence
    is_finished: bool
    """To be closed: no choice that it stands for goes on."""
    first_tokens: tuple[FirstToken, ...] = ()
    """Of a handoff: of each choice in order, if the row sampled."""
    forks: Iterable[Sequence] = ()
    """Sequences of the further choices, which go on from here."""


class SequenceTable:
    """Live sequences by key, steps in flight in order, events in order."""

    def __init__(self, pool: BlockPool, limits: ModelLimits) -> None:
        self.pool = pool
        self.limits = limits
        self.events: list[Event] = []
        self.num_retiring = 0
        """Sequences whose blocks come back when the steps in flight are completed."""
        self.must_drain = False
        """Nothing may be planned: the step in flight builds on one that failed and may fail with it. What is planned on
        top of it would fail in turn, and so on for as long as new sequences arrive."""
        self._live: dict[RequestKey, SequenceGroup] = {}
        self._deadlines = SequenceQueue()
        self._steps: deque[PlannedStep] = deque()
        self._num_opened = 0
        self._num_steps = 0

    # Requests

    def open(self, key: RequestKey, request: GenerationRequest, now_s: float, *, is_handoff: bool) -> Sequence | None:
        """Take a request, or reject one that could never run; a key that is alive already is ignored.

        Args:
            is_handoff: only its prompt is computed here, and parked; else it is decoded here to the end.
        """
        if key in self._live:
            return None
        sampling = request.sampling
        eos_token_ids = () if sampling.ignore_eos else self.limits.eos_token_ids
        ends = (*self.limits.eos_token_ids, *sampling.stop_token_ids) if sampling.min_tokens else ()
        sequence = Sequence(
            sequence_id=self._num_opened,
            key=key,
            request=request,
            arrived_s=now_s,
            block_size=self.pool.block_size,
            is_handoff=is_handoff,
            max_length=len(request.prompt_tokens) + sampling.max_tokens,
            stop_token_ids=frozenset((*eos_token_ids, *sampling.stop_token_ids)),
            early_end_ids=tuple(token for token in ends if token < self.limits.vocab_size),
            choice=request.choice,
            num_choices=request.num_choices,
        )
        refusal = self._refusal(sequence)
        if refusal:
            self.reject(key, refusal)
            return None
        self._num_opened += request.num_choices
        self._live[key] = SequenceGroup(sequence)
        self._deadlines.push(sequence, now_s + request.deadline_s)
        return sequence

    def _refusal(self, sequence: Sequence) -> str:
        """Why the request can never run here; empty when it can."""
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
        if request.num_choices < 1 or (request.num_choices > 1 and request.emitted_tokens):
            return f"{request.num_choices} choices after {len(request.emitted_tokens)} emitted tokens: ask for one each"
        num_kv_tokens = request.num_known_tokens if sequence.is_handoff else sequence.num_kv_tokens_max
        num_blocks = self.pool.num_blocks_for(num_kv_tokens)
        if num_blocks > self.pool.num_blocks:
            return (
                f"{num_kv_tokens} tokens need {num_blocks} KV blocks of {self.pool.block_size} and the worker has "
                f"{self.pool.num_blocks}: shorten the prompt, lower max_tokens, or raise kv_memory"
            )
        if not sequence.is_handoff and sequence.num_blocks_expected() > self.pool.num_blocks:
            return (
                f"{request.num_choices} choices need {sequence.num_blocks_expected()} KV blocks to start with and the "
                f"worker has {self.pool.num_blocks}: ask for fewer (n), shorten the prompt, or raise kv_memory"
            )
        return ""

    def get(self, key: RequestKey) -> SequenceGroup | None:
        return self._live.get(key)

    def group_of(self, sequence: Sequence) -> SequenceGroup:
        """The request that a sequence belongs to, which is not over."""
        return self._live[sequence.key]

    def reject(self, key: RequestKey, message: str) -> None:
        self.events.append(
            RequestEvent(key=key, kind=RequestEventKind.REJECTED, message=message, refusal=RefusalCode.INVALID)
        )

    def emit(self, key: RequestKey, kind: RequestEventKind, message: str = "") -> None:
        self.events.append(RequestEvent(key=key, kind=kind, message=message))

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def close(self, sequence: Sequence) -> None:
        """The choices of the sequence are over on this worker: retire its blocks. With its last sequence a request is
        forgotten."""
        assert not sequence.is_over, f"{sequence.key} is closed twice"
        sequence.is_over = True
        group = self._live[sequence.key]
        group.remove(sequence)
        if not group.sequences:
            del self._live[sequence.key]
            self._deadlines.discard(group.root)
        self.retire(sequence)

    def past_deadline(self, now_s: float) -> SequenceGroup | None:
        """A request whose deadline has come, for its scheduler to end."""
        root = self._deadlines.first_due(now_s)
        return self._live[root.key] if root is not None else None

    def next_deadline_s(self) -> float | None:
        return self._deadlines.first_instant_s()

    # Blocks

    def retire(self, sequence: Sequence) -> None:
        """Give the sequence's blocks back, at once or when nothing in flight writes to them any more."""
        if sequence.is_idle:
            self.pool.release(sequence.lose_blocks())
        elif not sequence.is_retiring:
            sequence.is_retiring = True
            self.num_retiring += sequence.num_in_flight > 0

    def settle(self, sequence: Sequence) -> None:
        """Something that wrote to the sequence's blocks has ended: give them back if they were waiting for it."""
        if sequence.is_retiring and sequence.is_idle:
            self.pool.release(sequence.lose_blocks())

    def register_written(self, sequence: Sequence) -> None:
        """Tell the prefix cache of every block that is full by now."""
        num_full = sequence.num_written // sequence.block_size
        if num_full == sequence.num_registered_blocks or not self.pool.caches_content:
            return
        num_known = sequence.num_registered_blocks
        self.pool.register(sequence.block_table[num_known:num_full], sequence.block_hashes(num_full, num_known))
        sequence.num_registered_blocks = num_full

    # Steps

    @property
    def steps_in_flight(self) -> Collection[PlannedStep]:
        """In the order in which they were planned."""
        return self._steps

    @property
    def next_step_id(self) -> int:
        """Of the next step that is committed."""
        return self._num_steps

    @property
    def num_chunk_tokens_in_flight(self) -> int:
        """Prompt tokens that the steps in flight compute."""
        return sum([step.num_chunk_tokens for step in self._steps])

    @property
    def is_forking(self) -> bool:
        """Whether a step in flight samples for several choices, whose sequences begin when it is completed."""
        return any(step.num_forking for step in self._steps)

    def begin_step(self) -> PlannedStep:
        assert len(self._steps) <= 1, "two steps are in flight already"
        return PlannedStep(StepBatch(step_id=self._num_steps, rows=[]))

    def commit(self, step: PlannedStep) -> StepBatch | None:
        """The step is decided; ``None`` if it is empty."""
        if step.is_empty:
            return None
        self._num_steps += 1
        self._steps.append(step)
        return step.batch

    def complete(self, output: StepOutput) -> list[RowResult]:
        """Take a step's results: KV written, tokens appended and emitted. Returns rows of sequences that finished or
        forked, and all rows of sequences with a handle."""
        step = self._take_step(output.step_id)
        self.must_drain = False
        results = []
        for index, (sequence, row, sampled) in enumerate(
            zip(step.sequences, step.batch.rows, output.sampled, strict=True)
        ):
            self._leave_step(sequence)
            if sequence.is_over:
                continue
            sequence.num_written = row.cached_length + row.num_new_tokens
            if sequence.num_written >= (sequence.num_registered_blocks + 1) * sequence.block_size:
                self.register_written(sequence)
            if row.prompt_targets:
                entries = output.prompt_logprobs[index]
                assert len(entries) == len(row.prompt_targets), f"{len(entries)} prompt logprobs of row {index}"
                self.events.append(PromptLogprobsEvent(sequence.key, row.cached_length + 1, entries))
            if row.num_choices > 1 and sampled is not None:
                results.append(self._take_first_tokens(sequence, [sampled, *output.forks[index]]))
            elif sampled is not None:
                finish = self._take_token(sequence, sampled)
                if finish or sequence.handle:
                    results.append(RowResult(sequence, bool(finish), (FirstToken(sampled.token, finish),)))
            elif sequence.handle:
                results.append(RowResult(sequence, False))
            if sequence.is_retiring:
                self.settle(sequence)
        for sequence in step.swapped_out:
            self._leave_step(sequence)
            self.settle(sequence)
        return results

    def _take_token(self, sequence: Sequence, sampled: SampledToken) -> FinishReason:
        sequence.num_pending -= 1
        index = len(sequence.tokens) - sequence.num_prompt_tokens
        token, logprobs = sampled
        finish = sequence.append(token)
        ends_request = bool(finish) and self._live[sequence.key].finish(sequence.choice)
        self.events.append(TokenEvent(sequence.key, sequence.choice, index, token, logprobs, finish, ends_request))
        return finish

    def _take_first_tokens(self, sequence: Sequence, sampled: list[SampledToken]) -> RowResult:
        """Token 0 of all the choices that a sequence stands for, each with a token of its own from here on."""
        group = self._live[sequence.key]
        sequence.num_pending -= 1
        index = sequence.num_answered
        first_tokens = []
        for choice, (token, logprobs) in zip(sequence.choices, sampled, strict=True):
            if choice not in group.open_choices:  # nobody wants it: nobody is to go on with it
                first_tokens.append(FirstToken(token, FinishReason.STOP))
                continue
            finish = sequence.finish_with(token)
            ends_request = bool(finish) and group.finish(choice)
            self.events.append(TokenEvent(sequence.key, choice, index, token, logprobs, finish, ends_request))
            first_tokens.append(FirstToken(token, finish))
        if sequence.is_handoff:
            return RowResult(sequence, not group.open_choices, tuple(first_tokens))
        return self._part(group, first_tokens)

    def receive(self, sequence: Sequence, num_tokens: int, first_tokens: Iterable[FirstToken]) -> RowResult:
        """The KV of a prompt was pulled and every choice's token 0 with it, which the worker that sampled it has
        emitted."""
        group = self._live[sequence.key]
        first_tokens = [
            FirstToken(first.token, first.finish or sequence.finish_with(first.token)) for first in first_tokens
        ]
        group.drop(choice for choice, first in zip(sequence.choices, first_tokens, strict=True) if first.finish)
        if not group.open_choices:
            return RowResult(sequence, True)
        sequence.receive(num_tokens)
        self.register_written(sequence)
        return self._part(group, first_tokens)

    def _part(self, group: SequenceGroup, first_tokens: list[FirstToken]) -> RowResult:
        """The choices of a request, whose prompt is computed, go on with their first tokens."""
        root = group.root
        forks = fork(group, self.pool, first_tokens) if root.num_choices > 1 else []
        root.append(first_tokens[0].token)
        return RowResult(root, root.choice not in group.open_choices, (), forks)

    def fail_step(self, step_id: int) -> list[SequenceGroup]:
        """A step raised: returns the live requests that it computed or copied for, for their scheduler to end. The
        prefix cache forgets their blocks."""
        step = self._take_step(step_id)
        self.must_drain = bool(self._steps)
        sequences = step.sequences + step.swapped_out
        for sequence in sequences:
            if not sequence.is_over:
                self.pool.forget(sequence.block_table)
            self._leave_step(sequence)
        return list(dict.fromkeys(self._live[sequence.key] for sequence in sequences if not sequence.is_over))

    def _take_step(self, step_id: int) -> PlannedStep:
        step = self._steps.popleft()
        assert step.batch.step_id == step_id, f"step {step_id} ended before step {step.batch.step_id}"
        self.pool.release(step.borrowed_blocks)
        return step

    def _leave_step(self, sequence: Sequence) -> None:
        sequence.num_in_flight -= 1
        if sequence.is_retiring and not sequence.num_in_flight:
            self.num_retiring -= 1
        if sequence.is_over:
            self.settle(sequence)
