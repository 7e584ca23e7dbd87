"""Both schedulers in a simulated cluster: every token correct, once and in order; no block lost; every request ends."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.contracts.request import Outcome, SamplingParams
from tests.guessed_worlds import GUESSES, draft_model, served
from tests.hash_chain_node import WorldConfig
from tests.hash_chain_world import World, submit_many

MAX_TURNS = 6000

configs = st.builds(
    WorldConfig,
    num_prefill=st.integers(0, 2),
    num_decode=st.integers(1, 2),
    num_prefill_blocks=st.sampled_from([20, 64]),
    num_decode_blocks=st.sampled_from([20, 64]),
    max_batch_tokens=st.sampled_from([3, 8, 32]),
    max_batch_size=st.sampled_from([1, 3, 8]),
    pipeline_depth=st.sampled_from([1, 2]),
    park_timeout_s=st.sampled_from([0.1, 2.0]),
    eos_period=st.sampled_from([0, 10]),
    local_share=st.sampled_from([0.0, 0.3]),
    pull_failure=st.sampled_from([0.0, 0.05]),
    step_failure=st.sampled_from([0.0, 0.01]),
    row_failure=st.sampled_from([0.0, 0.01]),
    cancel=st.sampled_from([0.0, 0.3]),
    num_swap_slots=st.sampled_from([0, 5, 40]),
    recompute_share=st.sampled_from([0.0, 0.3]),
    relabel=st.sampled_from([0.0, 0.0, 0.1]),
    is_staged=st.booleans(),
    right_guesses=st.sampled_from([None, 0.0, 0.5, 0.9, 1.0]),
    num_tier_blocks=st.sampled_from([0, 70, 200]),
    prefix_share=st.sampled_from([0.0, 0.5, 1.0]),
)


@given(configs, st.integers(0, 2**32), st.integers(1, 4))
@settings(max_examples=60)
def test_every_client_gets_its_tokens_and_every_block_comes_back(
    config: WorldConfig, seed: int, max_choices: int
) -> None:
    world = World(config, seed)
    submit_many(world, 25, max_prompt=30, max_answer=40, max_choices=max_choices)
    world.run(MAX_TURNS)
    outcomes = {Outcome.FINISHED, Outcome.CANCELLED} if config.cancel else {Outcome.FINISHED}
    assert {client.outcome for client in world.clients} <= outcomes


@pytest.mark.parametrize("is_staged", [False, True], ids=["in place", "staged"])
@pytest.mark.parametrize("num_prefill", [0, 1])
def test_restored_blocks_change_no_token(num_prefill: int, is_staged: bool) -> None:
    counts = Counter[str]()
    for seed in range(num_seeds := 4):
        num_blocks = 20 if seed % 4 < 2 else 64
        config = WorldConfig(
            num_prefill=num_prefill,
            num_decode=2,
            num_prefill_blocks=num_blocks,
            num_decode_blocks=num_blocks,
            num_tier_blocks=3 * num_blocks,
            kill=0.01,
            is_staged=is_staged,
            pipeline_depth=1 + seed % 2,
            num_swap_slots=5 * (seed % 2),
            local_share=0.3,
            relabel=0.01,
            pull_failure=0.02,
            step_failure=0.01,
            cancel=0.1,
            prefix_share=0.8,
            eos_period=30,
        )
        world = World(config, seed)
        submit_many(world, 80, max_prompt=50, max_answer=30, max_choices=2)
        world.run(MAX_TURNS)
        assert {client.outcome for client in world.clients} <= {Outcome.FINISHED, Outcome.CANCELLED}
        counts += world.counts
    assert counts["killed"] > 2 * num_seeds
    assert counts["restored tokens"] > 100 * num_seeds
    assert counts["prefix blocks pulled"] > num_seeds


LONG_ANSWERS = WorldConfig(num_decode_blocks=104, max_model_len=400)
"""Answers of up to 360 tokens, of which the admission rule expects 64: together they outgrow the pool."""


@pytest.mark.parametrize(
    "config",
    [
        replace(LONG_ANSWERS, pipeline_depth=1, right_guesses=0.8, num_swap_slots=60, cancel_preempted=0.2),
        replace(LONG_ANSWERS, pipeline_depth=2, right_guesses=0.8),
        replace(LONG_ANSWERS, num_decode=2, right_guesses=0.8, num_swap_slots=60, local_share=0.5, prefix_share=1.0),
    ],
    ids=["answers outgrow the pool", "steps are planned ahead", "prefixes are pulled"],
)
def test_guesses_change_no_token(config: WorldConfig) -> None:
    world = World(config, seed=5)
    submit_many(world, 15, max_prompt=30, max_answer=config.max_model_len - 40, max_choices=3)
    world.run(MAX_TURNS)
    assert world.counts["right guesses"] > 20
    assert world.counts["wrong guesses"] > 5


@pytest.mark.parametrize("kind", [*GUESSES, "draft"])
def test_guesses_of_no_kind_change_a_token(kind: str, tmp_path: Path) -> None:
    guesses = GUESSES[kind] if kind in GUESSES else draft_model(tmp_path)
    counts = served(guesses, seed=9).counts
    assert counts["killed"]
    assert bool(counts["right guesses"]) == (kind not in ("none", "wrong"))
    assert kind in ("none", "oracle") or counts["wrong guesses"]
    # Answers live long enough to be swapped where nothing dies.
    calm = Counter[str]()
    for seed in range(40, 80, 4):
        calm += served({**guesses, "kill": 0.0, "relabel": 0.0, "num_prefill": 1, "num_swap_slots": 60}, seed).counts
        if calm["preemptions"] and calm["swap-ins"]:
            return
    raise AssertionError(f"no answer was swapped: {calm}")


@pytest.mark.parametrize("num_swap_slots", [0, 60])
@pytest.mark.parametrize("pipeline_depth", [1, 2])
@pytest.mark.parametrize("num_prefill", [0, 1, 2])
def test_preempted_sequences_lose_no_token(num_prefill: int, pipeline_depth: int, num_swap_slots: int) -> None:
    config = replace(
        LONG_ANSWERS,
        num_prefill=num_prefill,
        num_decode=2 if num_prefill == 2 else 1,
        pipeline_depth=pipeline_depth,
        cancel=0.1,
        num_swap_slots=num_swap_slots,
    )
    num_preemptions = num_swaps = 0
    for seed in range(3):
        world = World(config, seed)
        submit_many(world, 12, max_prompt=30, max_answer=360, max_choices=1 + seed % 3)
        world.run(MAX_TURNS)
        num_preemptions += world.counts["preemptions"]
        num_swaps += world.counts["swap-ins"]
        assert world.counts["RESUMED"] <= world.counts["preemptions"]
    assert num_preemptions >= 8
    assert bool(num_swaps) == bool(num_swap_slots)


def test_swapped_sequences_are_cancelled_and_their_steps_fail() -> None:
    """Everything goes wrong, and answers outgrow the pool all the time."""
    config = replace(LONG_ANSWERS, num_decode_blocks=120, num_swap_slots=100, step_failure=0.003, cancel_preempted=0.4)
    num_swap_ins = num_lost = 0
    for seed in range(3):
        world = World(config, seed)
        submit_many(world, 20, max_prompt=30, max_answer=360, max_choices=1 + seed % 3)
        world.run(MAX_TURNS)
        num_swap_ins += world.counts["swap-ins"]
        num_lost += world.counts["swap-outs"] - world.counts["swap-ins"]
    assert num_swap_ins > 5
    assert num_lost > 5


def test_every_kind_of_trouble_is_met() -> None:
    """The tests above would prove nothing if their worlds never met trouble."""
    config = WorldConfig(
        num_prefill=2,
        num_decode=2,
        eos_period=10,
        local_share=0.2,
        pull_failure=0.05,
        step_failure=0.01,
        row_failure=0.01,
        cancel=0.3,
        park_timeout_s=0.1,
    )
    world = World(config, seed=1)
    submit_many(world, 300, max_prompt=30, max_answer=40, max_choices=4)
    world.run(MAX_TURNS)
    assert {client.outcome for client in world.clients} == {Outcome.FINISHED, Outcome.CANCELLED}
    for count in (
        "pulled",
        "ended at token 0",
        "pull failed: copy",
        "pull failed: aborted",
        "redispatched: injected",
        "redispatched: copy",
        "redispatched: parked",
        "rebound",
        "choice over cached blocks",
    ):
        assert world.counts[count] > 0, f"no {count!r}"


@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("num_blocks", [20, 64])
def test_prefixes_that_are_pulled_change_no_token(num_blocks: int, is_staged: bool) -> None:
    config = WorldConfig(
        num_prefill=2,
        num_decode=2,
        num_prefill_blocks=num_blocks,
        num_decode_blocks=num_blocks + 12,
        max_batch_tokens=8,
        num_swap_slots=20,
        relabel=0.02,
        local_share=0.3,
        pull_failure=0.05,
        step_failure=0.005,
        row_failure=0.005,
        cancel=0.2,
        prefix_share=0.8,
        is_staged=is_staged,
    )
    counts = Counter[str]()
    for seed in range(3):
        world = World(config, seed)
        submit_many(world, 80, max_prompt=40, max_answer=40, max_choices=3)
        world.run(MAX_TURNS)
        assert {client.outcome for client in world.clients} == {Outcome.FINISHED, Outcome.CANCELLED}
        counts += world.counts
    assert counts["prefix blocks pulled"] > 20
    assert counts["prefix pull failed: copy"] > 10


@pytest.mark.parametrize("num_workers", [2, 4])
@pytest.mark.parametrize("relabel", [0.02, 0.3])
def test_roles_change_while_requests_are_in_every_state(num_workers: int, relabel: float) -> None:
    config = WorldConfig(
        num_prefill=num_workers // 2,
        num_decode=num_workers // 2,
        num_swap_slots=20,
        relabel=relabel,
        eos_period=10,
        local_share=0.2,
        pull_failure=0.02,
        step_failure=0.005,
        cancel=0.1,
        is_staged=relabel > 0.1,
    )
    world = World(config, seed=num_workers)
    submit_many(world, 100, max_prompt=30, max_answer=40, max_choices=3)
    world.run(MAX_TURNS)
    assert {client.outcome for client in world.clients} == {Outcome.FINISHED, Outcome.CANCELLED}
    assert world.counts["relabelled"] > 4
    assert world.counts["pulled"] > 20
    assert num_workers > 2 or world.counts["redispatched: relabelled"] > 0


@pytest.mark.parametrize("num_decode", [1, 2])
def test_roles_change_once_at_each_turn_of_a_request(num_decode: int) -> None:
    states = Counter[str]()
    for num_turns in range(60):
        world = World(WorldConfig(num_decode=num_decode, max_batch_tokens=8, num_prefill_blocks=20), seed=7)
        submit_many(world, 6, max_prompt=30, max_answer=12, max_choices=2)
        for _ in range(num_turns):
            world.turn()
        states += Counter({node.name: bool(node.scheduler.load().num_blocks_referenced) for node in world.nodes})
        world.swap_roles()
        world.run(MAX_TURNS)
        assert {client.outcome for client in world.clients} == {Outcome.FINISHED}
    assert states["prefill-0"] > 20
    assert states["decode-0"] > 20


@given(st.integers(0, 2**32), st.sampled_from([1, 2]), st.sampled_from([0, 1]), st.sampled_from([0, 12, 64]))
@settings(max_examples=20)
def test_pools_of_a_quarter_of_the_need_always_advance(
    seed: int, pipeline_depth: int, num_prefill: int, num_swap_slots: int
) -> None:
    num_requests, num_tokens, block_size = 16, 64, 4
    num_blocks = num_requests * num_tokens // block_size // 4
    config = WorldConfig(
        num_prefill=num_prefill,
        num_prefill_blocks=num_blocks,
        num_decode_blocks=num_blocks,
        max_batch_size=16,
        max_batch_tokens=64,
        pipeline_depth=pipeline_depth,
        park_timeout_s=1e6,
        num_swap_slots=num_swap_slots,
    )
    world = World(config, seed)
    for index in range(num_requests):
        prompt = tuple(world.random.randrange(500) for _ in range(num_tokens // 2))
        sampling = SamplingParams(max_tokens=num_tokens // 2, ignore_eos=True)
        world.submit(prompt, sampling, num_choices=1 + index % 3)
    world.run(max_turns=2 * num_requests * num_tokens)
    assert {client.outcome for client in world.clients} == {Outcome.FINISHED}


def test_deadlines_end_requests_wherever_they_are() -> None:
    world = World(WorldConfig(num_prefill_blocks=20, num_decode_blocks=20), seed=3)
    for index in range(60):
        prompt = tuple(world.random.randrange(500) for _ in range(20))
        deadline_s = world.random.random()
        world.submit(prompt, SamplingParams(max_tokens=20), deadline_s=deadline_s, num_choices=1 + index % 3)
        world.turn()
    world.run(MAX_TURNS)
    assert {client.outcome for client in world.clients} == {Outcome.FINISHED, Outcome.FAILED}
