"""Guesses in the simulator: as many tokens a step as an emulated executor yields under the same scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from random import Random

import pytest

from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.events import RequestKey, TokenEvent
from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.request import GenerationRequest, SamplingParams
from pdserve.contracts.step import ModelLimits, StepBatch, StepHandle, StepRow
from pdserve.contracts.worker_config import WorkerRole
from pdserve.engine.scheduling.speculation import Speculation
from pdserve.engine.worker.scheduler import Scheduler
from pdserve.engine.worker.step_times import StepTimes
from pdserve.kv_transfer.block_pool import BlockPool
from pdserve.model.executors.emulated import EmulatedExecutor
from pdserve.model.executors.hash_chain import ROOT_STATE, HashVocabulary, link, mix64, sampling_salt
from pdserve.planner.layout import Guesses, Layout
from pdserve.planner.simulate.attainment import Attainment, measure
from pdserve.planner.simulate.simulator import simulate
from pdserve.planner.workload.requests import SimulatedRequest
from tests.planner.stand_ins import LLAMA_3_8B, a_pool

SLO = SloConfig(ttft_seconds=10.0, tpot_seconds=1.0)
NUM_PROMPT_TOKENS, NUM_BLOCKS = 32, 1024
VOCAB_SIZE = 500
POOL = a_pool(WorkerRole.MIXED)
COST = POOL.cost(LLAMA_3_8B)


class ChanceDrafter:
    """Makes all guesses that a row may have, each right with the same chance."""

    def __init__(self, share_right: float) -> None:
        self._random, self._share_right = Random(0), share_right
        self._vocabulary = HashVocabulary(VOCAB_SIZE)
        self._known: dict[int, tuple[int, int]] = {}
        """Tokens, and the state after them, by sequence."""

    def read(self, rows: Sequence[StepRow]) -> None: ...

    def guess(self, rows: Sequence[StepRow]) -> Sequence[Sequence[int]]:
        return [self._guess(row) for row in rows]

    def _guess(self, row: StepRow) -> list[int]:
        assert row.sample is not None
        guesses = list[int]()
        num_known, state = self._known.get(row.sequence_id, (0, ROOT_STATE))
        for token in row.history[num_known:]:
            state = mix64(link(state, token))
        self._known[row.sequence_id] = len(row.history), state
        for _ in range(row.max_guesses):
            right = self._vocabulary.next_token(state, sampling_salt(row.sample, row.choice), ())
            is_right = self._random.random() < self._share_right
            guesses.append(right if is_right else (right + 1) % VOCAB_SIZE)
            state = mix64(link(state, guesses[-1]))
        return guesses


def emulated(share_right: float, num_requests: int, num_output_tokens: int) -> float:
    """Tokens of a decoding sequence's step, of requests that are there at once. Steps take no time, but say how long
    they would."""
    layout = KvLayout(
        num_blocks=NUM_BLOCKS,
        num_kv_heads=1,
        num_layers=1,
        block_size=16,
        head_dim=1,
        dtype="uint64",
        model_hash="",
    )
    executor = EmulatedExecutor(
        layout=layout,
        pool=memoryview(bytearray(layout.pool_bytes)).cast("Q"),
        vocab_size=VOCAB_SIZE,
        cost=COST,
        time_scale=1e-9,
        check_context=False,
        drafter=ChanceDrafter(share_right),
    )
    times = StepTimes(COST)
    handles = count()
    scheduler = Scheduler(
        BlockPool(NUM_BLOCKS, 16),
        ModelLimits(max_model_len=8192, vocab_size=VOCAB_SIZE),
        mint_handle=lambda: next(handles).to_bytes(16, "big"),
        max_batch_tokens=2048,
        max_batch_size=256,
        speculation=Speculation(times.by_guesses, share_right, plans_ahead=True),
    )
    for number in range(num_requests):
        sampling = SamplingParams(seed=number, max_tokens=num_output_tokens, ignore_eos=True)
        prompt = tuple(Random(number).choices(range(VOCAB_SIZE), k=NUM_PROMPT_TOKENS))
        request = GenerationRequest(request_id=number, prompt_tokens=prompt, sampling=sampling)
        scheduler.add(RequestKey(0, number, 0), request, 0.0)
    num_rows = num_tokens = 0
    in_flight = deque[tuple[StepBatch, StepHandle]]()
    while (batch := scheduler.plan(0.0)) is not None or in_flight:
        if batch is not None:
            in_flight.append((batch, executor.submit(batch)))
            if len(in_flight) < executor.pipeline_depth:
                continue
        batch, handle = in_flight.popleft()
        output = handle.result()
        decoding = [index for index, row in enumerate(batch.rows) if row.cached_length]
        num_rows += len(decoding)
        scheduler.complete(output, 0.0)
        events = [event for event in scheduler.take_events() if isinstance(event, TokenEvent)]
        num_tokens += sum(event.index > 0 for event in events)
    executor.close()
    return num_tokens / num_rows


def simulated(share_right: float | None, num_requests: int, num_output_tokens: int) -> Attainment:
    guesses = None if share_right is None else Guesses(share_right=share_right)
    pool = replace(POOL, guesses=guesses)
    requests = [SimulatedRequest(0.0, NUM_PROMPT_TOKENS, num_output_tokens)] * num_requests
    simulation = simulate(LLAMA_3_8B, Layout(mixed=pool), requests, slo=SLO, policy="round-robin")
    assert (simulation.times.num_output_tokens == num_output_tokens).all()
    return measure(simulation, SLO, 1.0)


@pytest.mark.parametrize(
    ("share_right", "num_requests", "num_output_tokens"), [(0.8, 1, 3000), (0.8, 8, 300), (0.3, 64, 60)]
)
def test_tokens_a_step_are_those_of_emulation(share_right: float, num_requests: int, num_output_tokens: int) -> None:
    found = simulated(share_right, num_requests, num_output_tokens).pools[0].tokens_per_step
    assert found > 1.1
    assert found == pytest.approx(emulated(share_right, num_requests, num_output_tokens), rel=0.05)


def test_right_guesses_shorten_answers_and_wrong_ones_hardly_lengthen_them() -> None:
    none, wrong, right = (simulated(share, 8, 100).tpot.percentile(50) for share in (None, 0.0, 0.9))
    assert right < 0.5 * none
    assert none <= wrong < 1.02 * none
