"""A worker of the simulated cluster in `tests.hash_chain_world`: real scheduler, pool and executor."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from random import Random
from typing import cast

import numpy as np
import torch

from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.step import BlockCopy, ModelLimits, StepBatch, StepHandle, StepOutput, StepRow
from pdserve.decode_worker.swapping import SwapSpace
from pdserve.engine.scheduling.interface import Event
from pdserve.engine.scheduling.speculation import Speculation
from pdserve.engine.worker.scheduler import Scheduler
from pdserve.kv_transfer.block_pool import BlockPool
from pdserve.kv_transfer.file_tier import FileTier
from pdserve.kv_transfer.host_staging import HostStaging
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.model.executors.drafting import Drafter
from pdserve.model.executors.emulated import EmulatedExecutor
from pdserve.model.executors.hash_chain import ROOT_STATE, HashVocabulary, link, mix64, sampling_salt
from pdserve.prefill_worker.restores import TierSpace

VOCAB_SIZE = 500
EOS = 7


@dataclass(frozen=True, kw_only=True)
class WorldConfig:
    num_prefill: int = 1
    """0: the decode workers are mixed workers."""
    num_decode: int = 1
    num_prefill_blocks: int = 64
    num_decode_blocks: int = 64
    block_size: int = 4
    max_batch_tokens: int = 32
    max_batch_size: int = 8
    max_model_len: int = 128
    vocab_size: int = VOCAB_SIZE
    num_swap_slots: int = 0
    recompute_share: float = 0.0
    """Share of preemptions that recompute although slots are free."""
    pipeline_depth: int = 2
    park_timeout_s: float = 2.0
    eos_period: int = 0
    local_share: float = 0.0
    """Share of requests prefilled on a decode worker although there are prefill workers."""
    relabel: float = 0.0
    """Share of turns before which all workers get roles at random; with two or more workers."""
    pull_failure: float = 0.0
    step_failure: float = 0.0
    row_failure: float = 0.0
    cancel: float = 0.0
    """Share of requests whose client leaves at some time."""
    prefix_share: float = 0.0
    """Share of prompts for which another worker is named, to pull a prefix from."""
    cancel_preempted: float = 0.0
    """Share of preemptions soon after which the client leaves."""
    is_staged: bool = False
    """Pulls read and write a staging copy of the pool; orders and messages of transfer processes wait for it."""
    num_tier_blocks: int = 0
    """Slots of each worker's tier, a file; 0 without."""
    kill: float = 0.0
    """Share of turns before which a worker is killed, and the file of its tier damaged half the time; another one
    starts."""
    right_guesses: float | None = None
    """Share of drafts on decode workers that are right throughout; ``None`` if nothing is guessed."""
    first_wrong_guess: int | None = None
    """Number of right guesses before the others' first wrong one; random if ``None``."""
    new_drafter: Callable[[WorldConfig], Drafter] | None = None
    """Makes the drafter of a decode worker that starts, in place of one of ``right_guesses``."""


class RandomDrafter:
    """Drafts of random lengths, which go on behind the end of an answer; some are wrong from a random guess on."""

    def __init__(
        self, random: Random, vocabulary: HashVocabulary, share_right: float, first_wrong: int | None = None
    ) -> None:
        self._random = random
        self._vocabulary = vocabulary
        self._share_right = share_right
        self._first_wrong = first_wrong

    def read(self, rows: Sequence[StepRow]) -> None:
        pass

    def guess(self, rows: Sequence[StepRow]) -> Sequence[Sequence[int]]:
        return [self._guess(row) for row in rows]

    def _guess(self, row: StepRow) -> Sequence[int]:
        assert row.sample is not None
        assert len(row.history) == row.sample_position
        state, salt = ROOT_STATE, sampling_salt(row.sample, row.choice)
        for token in row.history:
            state = mix64(link(state, token))
        guesses: list[int] = []
        for _ in range(self._random.randint(0, row.max_guesses)):
            guesses.append(self._vocabulary.next_token(state, salt, row.banned_tokens))
            state = mix64(link(state, guesses[-1]))
        if guesses and self._random.random() >= self._share_right:
            first = self._random.randrange(len(guesses)) if self._first_wrong is None else self._first_wrong
            size = self._vocabulary.size
            wrong = [(token + self._random.randrange(1, size)) % size for token in guesses[first:]]
            guesses[first:] = wrong
        return guesses


class LateExecutor:
    """Computes a step when its result is requested, so that a block freed while a step is in flight receives the
    step's writes or corrupts its reads. A step made to fail leaves garbage. The step planned before the failure was
    known may fail with it; no other may."""

    def __init__(self, inner: EmulatedExecutor, memory: np.ndarray, fails: Callable[[], bool]) -> None:
        self._inner = inner
        self._memory = memory
        self._fails = fails
        self._may_fail = False

    def submit(self, batch: StepBatch) -> StepHandle:
        for row in batch.rows:
            _check_sampling(row)
        rows = [replace(row, block_table=tuple(row.block_table), history=tuple(row.history)) for row in batch.rows]
        return _LateStep(self, replace(batch, rows=rows))

    def compute(self, batch: StepBatch) -> StepOutput:
        try:
            output = self._inner.submit(batch).result()
        except RuntimeError as error:
            if not self._may_fail:
                raise AssertionError("a step failed by itself") from error
            self._may_fail = False
            raise
        self._may_fail = self._fails()
        if self._may_fail:
            for row in batch.rows:
                self._scribble(row)
            self._spoil_copies(batch)
            raise RuntimeError("injected")
        return output

    def _scribble(self, row: StepRow) -> None:
        block_size = self._memory.shape[-2]
        for position in range(row.cached_length, row.cached_length + row.num_new_tokens + row.max_guesses):
            self._memory[row.block_table[position // block_size], ..., position % block_size, :] = 1

    def _spoil_copies(self, batch: StepBatch) -> None:
        """Fill every target of the step's swap copies with garbage. Slots are reached through a block saved
        meanwhile."""
        block, saved = 0, self._memory[0].copy()
        self._memory[block] = 1
        spoiled = [BlockCopy(block, copy.target) for copy in batch.swap_outs]
        self._inner.submit(StepBatch(step_id=batch.step_id, rows=[], swap_outs=spoiled))
        self._memory[block] = saved
        self._memory[[copy.target for copy in batch.swap_ins]] = 1


def _check_sampling(row: StepRow) -> None:
    """Check that every input of sampling except the KV is complete, although the previous token may not be known
    yet."""
    if row.sample is None:
        assert not row.history
        assert not row.banned_tokens
        return
    num_late = int(row.previous_row >= 0)
    if row.max_guesses:
        assert not num_late
        assert not row.sample.reads_history
        num_answered = row.sample_position - row.num_prompt_tokens
        assert num_answered + row.max_guesses < row.sample.max_tokens
        if row.banned_tokens:
            assert num_answered + row.max_guesses < row.sample.min_tokens
    if row.sample.has_penalties:
        assert len(row.history) + num_late == row.sample_position
        assert [*row.history[row.cached_length :]] == [*row.tokens]
    is_early = row.sample_position - row.num_prompt_tokens < row.sample.min_tokens
    assert set(row.banned_tokens) == ({EOS, *row.sample.stop_token_ids} if is_early else set())


@dataclass
class _LateStep:
    executor: LateExecutor
    batch: StepBatch

    def result(self) -> StepOutput:
        return self.executor.compute(self.batch)


def _random_seconds(random: Random) -> Callable[[StepBatch], Callable[[int, int], float]]:
    """Steps of which guesses cost nothing, or much."""

    def by_guesses(batch: StepBatch) -> Callable[[int, int], float]:
        guess_s = random.choice((0.0, 0.05, 0.5))
        return lambda num_guesses, depth: len(batch.rows) + guess_s * num_guesses

    return by_guesses


def _staging(memory: np.ndarray, layout: KvLayout) -> tuple[HostStaging, np.ndarray]:
    staged = PoolMemory.create(layout)
    blocks = torch.from_numpy(memory.view(np.uint8).reshape(layout.num_blocks, layout.block_bytes))
    staging = HostStaging(blocks, staged)
    view = np.frombuffer(staged.blocks, np.uint64).reshape(layout.shape)
    staged.close()  # closes its descriptor; the views keep the mapping
    return staging, view


def damage(path: Path, random: Random) -> None:
    """Flip bytes of a tier's file, or cut it."""
    with path.open("r+b") as file:
        size = path.stat().st_size
        if random.random() < 0.3:
            file.truncate(random.randrange(size))
            return
        for _ in range(random.randrange(1, 40)):
            file.seek(random.randrange(4096, size))
            file.write(bytes([random.randrange(256)]))


class Node:
    """A worker: a scheduler, its pool, and the executor under both."""

    def __init__(self, config: WorldConfig, name: str, *, decodes: bool, random: Random, folder: Path) -> None:
        self.name = name
        self.config, self._decodes, self._random = config, decodes, random
        self.tier_path = folder / f"{name}.kv"
        self.tier: FileTier | None = None
        self.handles = (f"{name}/{number}".encode() for number in count())
        self.start()

    def start(self) -> None:
        """Begin with an empty pool, and with what the file of the tier holds."""
        config, decodes, random = self.config, self._decodes, self._random
        layout = KvLayout(
            num_blocks=config.num_decode_blocks if decodes else config.num_prefill_blocks,
            num_kv_heads=1,
            num_layers=1,
            block_size=config.block_size,
            head_dim=1,
            dtype="uint64",
            model_hash="hash-chain",
        )
        own = PoolMemory.create(layout)
        self.generations = cast(MutableSequence[int], own.generations)
        self.pool = BlockPool(layout.num_blocks, config.block_size, self.generations)
        self.memory = np.frombuffer(own.blocks, np.uint64).reshape(layout.shape)
        os.close(own.fd)  # the views keep the mapping
        own.fd = -1
        if config.num_tier_blocks:
            self.tier = FileTier(
                self.tier_path,
                own,
                self.pool,
                size_bytes=(config.num_tier_blocks + 2) * 4500,
                max_model_len=config.max_model_len,
                secret="the cluster's",
                on_restored=lambda restore_id: self.scheduler.restored(restore_id),
            )
        self.staging: HostStaging | None = None
        self.transferred = self.memory
        """Memory that pulls read and write."""
        if config.is_staged:
            self.staging, self.transferred = _staging(self.memory, layout)
        self.orders: deque[Event] = deque()
        """To the transfer process."""
        self.messages: deque[Callable[[], None]] = deque()
        """From the transfer process: each calls the scheduler."""
        eos = (EOS,)
        drafter = self._drafter() if decodes else None
        inner = EmulatedExecutor(
            layout=layout,
            pool=self.memory,
            vocab_size=config.vocab_size,
            eos_token_ids=eos,
            eos_period=config.eos_period,
            num_swap_slots=config.num_swap_slots,
            drafter=drafter,
        )
        self._fails_row: Callable[[], bool] = lambda: config.row_failure > 0 and random.random() < config.row_failure
        self.executor = LateExecutor(inner, self.memory, lambda: random.random() < config.step_failure)
        self.pipeline_depth = config.pipeline_depth
        self.in_flight: deque[tuple[int, StepHandle]] = deque()
        self.sleeps_until_turn = 0
        self.max_batch_tokens = config.max_batch_tokens
        limits = ModelLimits(max_model_len=config.max_model_len, vocab_size=config.vocab_size, eos_token_ids=eos)
        space = SwapSpace(
            num_slots=config.num_swap_slots,
            is_cheaper=lambda num_tokens, num_cached: random.random() >= config.recompute_share,
        )
        self.scheduler = Scheduler(
            self.pool,
            limits,
            mint_handle=lambda: next(self.handles),
            max_batch_tokens=config.max_batch_tokens,
            max_batch_size=config.max_batch_size,
            park_timeout_s=config.park_timeout_s,
            swap_space=space,
            tier_space=TierSpace(tier=self.tier, compute_s=lambda num_tokens, num_cached: 0.01 * num_tokens),
            speculation=None
            if drafter is None
            else Speculation(_random_seconds(random), plans_ahead=config.pipeline_depth > 1),
        )

    def _drafter(self) -> Drafter | None:
        config = self.config
        if config.new_drafter is not None:
            return config.new_drafter(config)
        if config.right_guesses is None:
            return None
        vocabulary = HashVocabulary(config.vocab_size, (EOS,), config.eos_period)
        return RandomDrafter(self._random, vocabulary, config.right_guesses, config.first_wrong_guess)

    def kill(self) -> None:
        """Start anew, after damage to the file half the time."""
        if self.tier is not None:
            self.tier.close()
            if self._random.random() < 0.5:
                damage(self.tier_path, self._random)
        self.start()

    def turn(self, now_s: float) -> bool:
        """One turn of a step loop; returns whether there was anything to do."""
        if self.tier is not None:
            self.tier.follow(self.pool.take_cache_events())
            self._work()
        batch = self.scheduler.plan(now_s)
        if batch is not None:
            num_guesses = sum([row.max_guesses for row in batch.rows])
            assert batch.num_new_tokens + num_guesses <= self.max_batch_tokens
            self.in_flight.append((batch.step_id, self.executor.submit(batch)))
        if self.in_flight and (batch is None or len(self.in_flight) >= self.pipeline_depth):
            step_id, handle = self.in_flight.popleft()
            try:
                output = handle.result()
            except RuntimeError as error:
                self.scheduler.fail_step(step_id, str(error), now_s)
            else:
                self._fail_rows(output)
                self.scheduler.complete(output, now_s)
        self._work()
        return batch is not None or bool(self.in_flight)

    def _work(self) -> None:
        """The tier's thread gets on: before it is told what the pool has lost, too."""
        if self.tier is not None:
            for _ in range(self._random.choice((0, 0, 0, 0, 0, 0, 1, 30))):
                self.tier.work()

    def _fail_rows(self, output: StepOutput) -> None:
        output.sampled = list(output.sampled)  # the executor reads its own
        for row, sampled in enumerate(output.sampled):
            if sampled is not None and self._fails_row():
                output.sampled[row], output.failed[row] = None, "bad row"
                output.more.pop(row, None)
