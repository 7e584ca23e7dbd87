"""Routing policy as a pure function: candidates, predictions, and choices."""

from __future__ import annotations

import random
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.contracts.block_hash import block_hashes
from pdserve.contracts.precision import Precision
from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.config.shape import ModelShape
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.hardware import hardware
from pdserve.router.requests.goodput import Goodput
from pdserve.router.requests.least_time import (
    LeastTime,
    may_prefill_locally,
    predict_tpot_s,
    predict_ttft_s,
)
from pdserve.router.requests.placement import (
    Arrival,
    Costs,
    Placement,
    PrefillChoice,
    PromptBlocks,
    WorkerSnapshot,
    prefill_candidates,
    shortfall,
)

BLOCK_SIZE = 4
SHAPE = ModelShape(
    num_layers=32,
    hidden_size=4096,
    intermediate_size=11008,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    vocab_size=32000,
)
COST = CostModel(SHAPE, hardware("h100-sxm"), Precision(dtype="bfloat16"), transport="nccl")
COSTS = dict.fromkeys(WorkerRole, COST)


def worker(worker_id: str, role: WorkerRole = WorkerRole.PREFILL, **fields: object) -> WorkerSnapshot:
    idle = WorkerSnapshot(
        worker_id=worker_id,
        role=role,
        max_batch_tokens=2048,
        max_batch_size=8,
        num_waiting_tokens=0,
        num_context_tokens=0,
        num_decoding=0,
        num_free_blocks=1000,
        prefill_correction=1.0,
        decode_correction=1.0,
        cached_blocks=frozenset(),
    )
    return idle._replace(**fields)  # type: ignore[arg-type]


def prompt(num_tokens: int) -> PromptBlocks:
    return PromptBlocks(range(num_tokens), BLOCK_SIZE)


P0, P1 = worker("prefill-0"), worker("prefill-1")
D0, D1 = worker("decode-0", WorkerRole.DECODE), worker("decode-1", WorkerRole.DECODE)
M0 = worker("mixed-0", WorkerRole.MIXED)


def names(workers: Sequence[WorkerSnapshot]) -> list[tuple[str, bool]]:
    return [(each.worker_id, each.role is WorkerRole.PREFILL) for each in prefill_candidates(workers)]


def test_candidates_by_what_is_up() -> None:
    assert names([P0, D0]) == [("prefill-0", True)]
    assert names([P0, D0, M0]) == [("prefill-0", True), ("mixed-0", False)]
    assert names([D0, M0]) == [("decode-0", False), ("mixed-0", False)]
    assert names([D0]) == [("decode-0", False)]
    assert names([P0]) == []
    assert names([P0, M0]) == [("mixed-0", False)]
    assert names([]) == []


def choose_prefill(
    blocks: PromptBlocks, workers: Sequence[WorkerSnapshot], costs: Costs, *, tpot_slo_s: float = 0.0
) -> PrefillChoice | None:
    arrival = Arrival(request_id=1, blocks=blocks, now_s=0.0, wanted_s=inf)
    return LeastTime(costs, tpot_slo_s=tpot_slo_s).prefill(arrival, workers)


def choose_decode(
    blocks: PromptBlocks,
    workers: Sequence[WorkerSnapshot],
    costs: Costs,
    cut_off: AbstractSet[str] = frozenset(),
    *,
    source_host: str = "",
) -> str | None:
    arrival = Arrival(request_id=1, blocks=blocks, now_s=0.0, wanted_s=inf)
    decoders = [worker for worker in workers if worker.role is WorkerRole.DECODE]
    binding = LeastTime(costs).decode(arrival, decoders, cut_off, source_host)
    return None if binding is None else binding.worker_id


def test_nobody_to_choose() -> None:
    assert choose_prefill(prompt(8), [], COSTS) is None
    assert choose_prefill(prompt(8), [P0], COSTS) is None
    assert choose_decode(prompt(8), [P0, M0], COSTS) is None


def test_ties_go_to_the_lowest_id() -> None:
    prefill = choose_prefill(prompt(8), [P1, P0, D0], COSTS)
    assert prefill is not None
    assert prefill.worker_id == "prefill-0"
    assert choose_decode(prompt(8), [D1, D0], COSTS) == "decode-0"


def test_ttft_of_an_idle_worker_is_the_cost_models() -> None:
    choice = choose_prefill(prompt(1000), [P0, D0], COSTS)
    assert choice is not None
    assert choice.handoff
    assert choice.ttft_s == COST.prefill_s(1000, 0)


def test_a_queue_and_a_slow_machine_cost() -> None:
    queue = P0._replace(num_waiting_tokens=4096)
    choice = choose_prefill(prompt(1000), [queue, P1, D0], COSTS)
    assert choice is not None
    assert choice.worker_id == "prefill-1"
    slow = P1._replace(prefill_correction=100.0)
    choice = choose_prefill(prompt(1000), [queue, slow, D0], COSTS)
    assert choice is not None
    assert choice.worker_id == "prefill-0"
    assert choice.ttft_s > COST.prefill_s(1000, 0) + COST.prefill_s(2048, 0)


def test_a_cached_prefix_outweighs_a_short_queue() -> None:
    tokens = range(8000)
    hashes = frozenset(block_hashes(tokens, BLOCK_SIZE))
    cached = P1._replace(cached_blocks=hashes, num_waiting_tokens=100)
    choice = choose_prefill(PromptBlocks(tokens, BLOCK_SIZE), [P0, cached, D0], COSTS)
    assert choice is not None
    assert choice.worker_id == "prefill-1"
    assert choice.num_cached_tokens == 8000 - BLOCK_SIZE


def test_decoding_beside_prefill_costs_a_mixed_worker() -> None:
    busy = M0._replace(num_decoding=64, num_context_tokens=64_000)
    choice = choose_prefill(prompt(1000), [P0, D0, busy], COSTS)
    assert choice is not None
    assert choice.worker_id == "prefill-0"


TPOT_S = 0.05
HISTORY = range(6000)
"""Earlier prompt and answer of a chat."""
TURN = PromptBlocks(range(6100), BLOCK_SIZE)
"""Next turn of the chat: a hundred tokens more."""
OF_HISTORY = frozenset(block_hashes(HISTORY, BLOCK_SIZE))


def chosen(blocks: PromptBlocks, *fleet: WorkerSnapshot, tpot_slo_s: float = TPOT_S) -> str:
    choice = choose_prefill(blocks, fleet, COSTS, tpot_slo_s=tpot_slo_s)
    assert choice is not None
    assert choice.handoff == choice.worker_id.startswith("prefill")
    return choice.worker_id


def test_a_turn_goes_where_the_history_is() -> None:
    d0 = D0._replace(cached_blocks=OF_HISTORY, num_free_blocks=2000)
    assert chosen(TURN, P0, d0) == "decode-0"
    choice = choose_prefill(TURN, [P0, d0], COSTS, tpot_slo_s=TPOT_S)
    assert choice is not None
    assert choice.num_cached_tokens == 6000
    assert choice.ttft_s == COST.prefill_s(100, 6000)
    assert chosen(TURN, P0._replace(cached_blocks=OF_HISTORY), d0) == "prefill-0"
    prompt_only = P0._replace(cached_blocks=frozenset(block_hashes(range(3000), BLOCK_SIZE)))
    assert chosen(TURN, prompt_only, d0, D1) == "decode-0"


def test_ties_go_to_mixed_workers() -> None:
    assert chosen(prompt(100), D0, M0) == "mixed-0"


def test_no_objective_or_no_choice() -> None:
    d0 = D0._replace(cached_blocks=OF_HISTORY, num_free_blocks=2000)
    assert chosen(TURN, P0, d0, tpot_slo_s=0.0) == "prefill-0"
    assert chosen(TURN, d0, tpot_slo_s=0.0) == "decode-0"


def test_a_prompt_that_nobody_caches_goes_to_a_prefill_worker() -> None:
    for num_tokens in (1, 20, 2000, 20_000):
        assert chosen(prompt(num_tokens), P0, D0._replace(num_free_blocks=10_000)) == "prefill-0"


def test_a_decode_worker_whose_steps_took_less_of_what_was_predicted_is_not_believed_to_be_faster() -> None:
    slow = P0._replace(prefill_correction=2.0)
    assert chosen(prompt(100), slow, D0) == "prefill-0"
    assert chosen(prompt(100), slow, P1, D0) == "prefill-1"
    waited_for = slow._replace(num_waiting_tokens=10)
    choice = choose_prefill(prompt(100), [waited_for, D0], COSTS, tpot_slo_s=TPOT_S)
    assert choice is not None
    assert (choice.worker_id, choice.ttft_s) == ("decode-0", 2 * COST.prefill_s(100, 0))


def test_a_decode_worker_helps_out_with_short_prompts_only() -> None:
    queue = P0._replace(num_waiting_tokens=4096)
    assert chosen(prompt(100), queue, D0) == "decode-0"
    assert chosen(prompt(2000), queue, D0, tpot_slo_s=0.03) == "prefill-0"


def test_a_busy_decode_worker_keeps_its_tpot() -> None:
    """Refused exactly where a step with the prompt in it would exceed the objective."""
    for busy in (
        D0._replace(num_decoding=6, num_context_tokens=150_000),
        D0._replace(num_waiting_tokens=1500),
        D0._replace(decode_correction=3.0),
        D0._replace(prefill_correction=3.0),
    ):
        d0 = busy._replace(cached_blocks=OF_HISTORY, num_free_blocks=2000)
        num_new = 100 + d0.num_waiting_tokens
        factor = max(d0.prefill_correction, d0.decode_correction)
        step_s = factor * COST.mixed_s(num_new, 6000, d0.num_decoding, d0.num_context_tokens)
        assert chosen(TURN, P0, d0, tpot_slo_s=step_s * 1.001) == "decode-0"
        assert chosen(TURN, P0, d0, tpot_slo_s=step_s * 0.999) == "prefill-0"


def test_a_decode_worker_without_room_prefills_nothing() -> None:
    d0 = D0._replace(cached_blocks=OF_HISTORY, num_free_blocks=TURN.num_blocks())
    assert chosen(TURN, P0, d0) == "decode-0"
    assert chosen(TURN, P0, d0._replace(num_free_blocks=TURN.num_blocks() - 1)) == "prefill-0"
    assert chosen(TURN, P0, d0._replace(num_decoding=7)) == "decode-0"
    assert chosen(TURN, P0, d0._replace(num_decoding=8)) == "prefill-0"


def test_another_tenants_history_attracts_nobody() -> None:
    d0 = D0._replace(cached_blocks=frozenset(block_hashes(HISTORY, BLOCK_SIZE, b"a")), num_free_blocks=2000)
    assert chosen(PromptBlocks(range(6100), BLOCK_SIZE, b"a"), P0, d0) == "decode-0"
    assert chosen(PromptBlocks(range(6100), BLOCK_SIZE, b"b"), P0, d0) == "prefill-0"
    assert chosen(TURN, P0, d0) == "prefill-0"


def test_a_prompt_of_which_all_must_be_computed_is_at_home_nowhere() -> None:
    d0 = D0._replace(cached_blocks=OF_HISTORY, num_free_blocks=2000)
    assert chosen(PromptBlocks(range(6100), BLOCK_SIZE, may_use_cache=False), P0, d0) == "prefill-0"


def test_of_equally_loaded_decode_workers_the_one_with_less_to_pull() -> None:
    d1 = D1._replace(cached_blocks=OF_HISTORY, num_free_blocks=2000, num_decoding=1, num_context_tokens=100)
    d0 = D0._replace(num_free_blocks=2000)
    assert choose_decode(TURN, [d0, d1], COSTS) == "decode-1"
    loaded = d1._replace(num_context_tokens=50_000)
    assert choose_decode(TURN, [d0, loaded], COSTS) == "decode-0"


def test_a_decode_worker_on_the_host_of_the_prompt_pulls_faster() -> None:
    far, near = D0._replace(host="10.0.0.2"), D1._replace(host="10.0.0.1")
    for source_host, expected in (("10.0.0.1", "decode-1"), ("10.0.0.2", "decode-0")):
        assert choose_decode(prompt(1000), [far, near], COSTS, source_host=source_host) == expected


@pytest.mark.parametrize("policy", [LeastTime, Goodput])
def test_pulls_take_as_long_as_others_took(policy: type[Placement]) -> None:
    """A worker with a little less to do that pulls all of the prompt, beside one that caches most of it."""
    placement = policy(COSTS, tpot_slo_s=0.015)
    d1 = D1._replace(cached_blocks=OF_HISTORY, num_free_blocks=2000, num_decoding=1, num_context_tokens=8000)
    arrival = Arrival(1, TURN, 0.0, 1.0, tpot_slo_s=0.015)
    chosen = []
    for same_host in (None, True, False):
        for _ in range(60 if same_host is not None else 0):
            placement.pulled(WorkerRole.DECODE, 1000, 1.0, "prefill-0", same_host=bool(same_host))
        binding = placement.decode(arrival, [D0._replace(num_free_blocks=2000), d1], frozenset(), "another host")
        assert binding is not None
        chosen.append(binding.worker_id)
    assert chosen == ["decode-0", "decode-0", "decode-1"], "those within a host tell nothing of those between two"


def test_decode_prefers_the_lighter_batch() -> None:
    heavy = D0._replace(num_decoding=4, num_context_tokens=40_000)
    assert choose_decode(prompt(100), [heavy, D1], COSTS) == "decode-1"
    assert predict_tpot_s(D1, 100, COST) == COST.decode_s(1, 100)


def test_decode_prefers_room_over_speed() -> None:
    full = D0._replace(num_free_blocks=3)
    no_seat = D0._replace(num_decoding=8)
    slow = D1._replace(decode_correction=50.0)
    for other in (full, no_seat):
        assert shortfall(prompt(100), other) > shortfall(prompt(100), slow) == 0
        assert choose_decode(prompt(100), [other, slow], COSTS) == "decode-1"


def test_a_worker_that_is_cut_off_is_the_last_resort() -> None:
    for workers, expected in (
        ([D0, D1], "decode-1"),
        ([D0, D1._replace(num_free_blocks=3)], "decode-1"),
        ([D0], D0[0]),
    ):
        assert choose_decode(prompt(100), workers, COSTS, {"decode-0"}) == expected


def test_where_nobody_has_room_the_least_shortfall_wins() -> None:
    worse, better = D0._replace(num_free_blocks=3), D1._replace(num_free_blocks=20)
    assert shortfall(prompt(100), worse) > shortfall(prompt(100), better) > 0
    assert choose_decode(prompt(100), [worse, better], COSTS) == "decode-1"


def test_the_last_token_is_always_computed() -> None:
    tokens = range(2 * BLOCK_SIZE)
    blocks = PromptBlocks(tokens, BLOCK_SIZE)
    assert blocks.num_cached_tokens(frozenset(block_hashes(tokens, BLOCK_SIZE))) == BLOCK_SIZE


def test_another_tenant_shares_nothing() -> None:
    hashes = frozenset(block_hashes(range(40), BLOCK_SIZE, b"a"))
    assert PromptBlocks(range(40), BLOCK_SIZE, b"a").num_cached_tokens(hashes) == 36
    assert PromptBlocks(range(40), BLOCK_SIZE, b"b").num_cached_tokens(hashes) == 0


def test_hashes_are_computed_only_as_far_as_they_match() -> None:
    class Tokens(list[int]):
        slices = 0

        def __getitem__(self, key):  # type: ignore[no-untyped-def]
            self.slices += 1
            return super().__getitem__(key)

    tokens = Tokens(range(4000))
    blocks = PromptBlocks(tokens, BLOCK_SIZE)
    for _ in range(5):
        assert blocks.num_cached_tokens(frozenset()) == 0
    assert tokens.slices == 1


loads = st.builds(
    worker,
    st.sampled_from([f"w{i}" for i in range(20)]),
    st.sampled_from(WorkerRole),
    num_waiting_tokens=st.integers(0, 10_000),
    num_context_tokens=st.integers(0, 100_000),
    num_decoding=st.integers(0, 16),
    num_free_blocks=st.integers(-50, 1000),
    prefill_correction=st.floats(0.1, 10),
    decode_correction=st.floats(0.1, 10),
)
fleets = st.lists(loads, max_size=6, unique_by=lambda snapshot: snapshot.worker_id)


@given(fleets, st.integers(1, 3000), st.floats(0, 0.2), st.randoms())
def test_choices_do_not_depend_on_order(
    fleet: list[WorkerSnapshot], num_tokens: int, tpot_slo_s: float, rng: random.Random
) -> None:
    blocks = prompt(num_tokens)
    shuffled = list(fleet)
    rng.shuffle(shuffled)
    assert choose_prefill(blocks, fleet, COSTS, tpot_slo_s=tpot_slo_s) == choose_prefill(
        blocks, shuffled, COSTS, tpot_slo_s=tpot_slo_s
    )
    assert choose_decode(blocks, fleet, COSTS) == choose_decode(blocks, shuffled, COSTS)


@given(fleets, st.integers(1, 3000))
def test_the_choice_is_the_best_candidate(fleet: list[WorkerSnapshot], num_tokens: int) -> None:
    blocks = prompt(num_tokens)
    choice = choose_prefill(blocks, fleet, COSTS)
    candidates = dict(names(fleet))
    assert (choice is None) == (not candidates)
    if choice is not None:
        assert candidates[choice.worker_id] is choice.handoff
        predicted = [predict_ttft_s(other, num_tokens, 0, COST) for other in fleet if other.worker_id in candidates]
        assert choice.ttft_s == min(predicted) > 0


@given(fleets, st.integers(1, 3000), st.floats(0, 0.2))
def test_prefill_on_a_decode_worker_is_faster_and_harmless(
    fleet: list[WorkerSnapshot], num_tokens: int, tpot_slo_s: float
) -> None:
    blocks = prompt(num_tokens)
    usual = choose_prefill(blocks, fleet, COSTS)
    choice = choose_prefill(blocks, fleet, COSTS, tpot_slo_s=tpot_slo_s)
    if usual is None or choice is None or not any(handoff for _, handoff in names(fleet)):
        assert choice == usual
    elif choice != usual:
        (guest,) = (snapshot for snapshot in fleet if snapshot.worker_id == choice.worker_id)
        assert guest.role is WorkerRole.DECODE
        assert choice.ttft_s < usual.ttft_s
        assert may_prefill_locally(guest, num_tokens, 0, COST, tpot_slo_s=tpot_slo_s)
        assert not shortfall(blocks, guest)


@given(loads.filter(lambda snapshot: snapshot.role is WorkerRole.DECODE), st.integers(1, 3000))
def test_room_means_blocks_and_a_seat(snapshot: WorkerSnapshot, num_tokens: int) -> None:
    blocks = prompt(num_tokens)
    has_blocks = snapshot.num_free_blocks >= blocks.num_blocks()
    has_slot = snapshot.num_decoding < snapshot.max_batch_size
    assert (shortfall(blocks, snapshot) == 0) == (has_blocks and has_slot)


def test_every_role_has_a_cost_model_of_its_own() -> None:
    slow_links = CostModel(SHAPE, replace(hardware("h100-sxm"), network_bandwidth=1e7), Precision(dtype="bfloat16"))
    costs = {**COSTS, WorkerRole.DECODE: slow_links}
    near, far = D0._replace(num_context_tokens=9000, num_decoding=3, host="a"), D1._replace(host="b")
    assert choose_decode(prompt(100), [near, far], COSTS, source_host="a") == "decode-1"
    assert choose_decode(prompt(100), [near, far], costs, source_host="a") == "decode-0"
    prefill = choose_prefill(prompt(100), [P0, D0], costs)
    assert prefill is not None
    assert prefill.ttft_s == COST.prefill_s(100, 0)


@given(st.integers(1, 200), st.lists(st.integers(0, 60), max_size=5))
def test_the_longest_prefix_is_found_whatever_was_hashed_before(num_tokens: int, caches: list[int]) -> None:
    hashes = block_hashes(range(num_tokens), BLOCK_SIZE)
    expected = [min(each, (num_tokens - 1) // BLOCK_SIZE) * BLOCK_SIZE for each in caches]
    blocks, others = (PromptBlocks(range(num_tokens), BLOCK_SIZE) for _ in range(2))
    cached = [frozenset(hashes[:each]) for each in caches]
    assert [blocks.num_cached_tokens(each) for each in cached] == expected
    workers = [worker(str(index), cached_blocks=each) for index, each in enumerate(cached)]
    assert others.cached_on(workers) == {str(index): each for index, each in enumerate(expected) if each}
