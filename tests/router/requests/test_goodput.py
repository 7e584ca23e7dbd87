"""The goodput policy: what a choice earns and what it costs others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import exp, inf
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.contracts.block_hash import block_hashes
from pdserve.contracts.worker_config import WorkerRole
from pdserve.router.requests import prefix_sources
from pdserve.router.requests.goodput import MAX_MEAN_STEP, MIN_SCORE, MIN_TTFT_SPREAD_S, Goodput
from pdserve.router.requests.goodput_rules import LATE_S, MAX_RETRY_AFTER_S, SLACK_MISSES, TPOT_SPREAD, TURN
from pdserve.router.requests.least_time import predict_ttft_s
from pdserve.router.requests.lengths import TTFT_SPREAD
from pdserve.router.requests.placement import Arrival, PrefillChoice, PromptBlocks, WorkerSnapshot, shortfall
from pdserve.router.requests.prefix_sources import PrefixSources
from tests.router.requests.test_least_time import BLOCK_SIZE, COST, COSTS, worker

P0, P1 = worker("prefill-0"), worker("prefill-1")
D0, D1 = (worker(f"decode-{index}", WorkerRole.DECODE, max_batch_size=64, num_free_blocks=10_000) for index in range(2))
TTFT_S = 0.5
STEP_S = COST.decode_s(17, 16_100)
"""A step of 17 answers, of 16,000 tokens and a prompt's 100."""


def arrival(request_id: int, num_tokens: int = 100, *, now_s: float = 0.0, ttft_s: float = TTFT_S) -> Arrival:
    return Arrival(request_id, PromptBlocks(range(num_tokens), BLOCK_SIZE), now_s, now_s + ttft_s)


def placed(policy: Goodput, one: Arrival, *workers: WorkerSnapshot) -> PrefillChoice:
    choice = policy.prefill(one, workers)
    assert choice is not None
    policy.placed(one, choice)
    return choice


def decoder(policy: Goodput, one: Arrival, *workers: WorkerSnapshot) -> str:
    binding = policy.decode(one, workers, set(), "")
    assert binding is not None
    return binding.worker_id


def with_answers(policy: Goodput, worker: WorkerSnapshot, num_answers: int, *, late_s: float) -> WorkerSnapshot:
    """``worker`` with answers of 100 tokens at second 0 that are ``late_s`` behind an even TPOT."""
    began_s = -100 * policy.tpot_slo_s - late_s
    for number in range(num_answers):
        policy.decoding(1000 + number, began_s, 100, worker)
    return worker._replace(num_decoding=num_answers, num_context_tokens=1000 * num_answers)


def test_where_nothing_binds_the_shortest_time_wins() -> None:
    policy = Goodput(COSTS, tpot_slo_s=0.05)
    assert placed(policy, arrival(1), P0._replace(num_waiting_tokens=3000), P1, D0).worker_id == "prefill-1"
    light = D1._replace(num_decoding=2, num_context_tokens=2000)
    assert decoder(policy, arrival(1), D0._replace(num_decoding=9, num_context_tokens=9000), light) == "decode-1"


def test_a_prompt_that_cannot_be_on_time_runs_behind_those_that_can() -> None:
    policy = Goodput(COSTS)
    queue = P0._replace(num_waiting_tokens=30_000)
    late = placed(policy, arrival(1, 8000, ttft_s=0.01), P0, D0)
    assert late.is_late
    assert not placed(policy, arrival(2), queue._replace(num_waiting_tokens=8000), D0).is_late
    hidden = placed(policy, arrival(3), P0._replace(num_waiting_tokens=8000), D0)
    assert hidden.ttft_s == COST.prefill_s(100, 0), "the late prompt does not delay it"
    policy.prefilled(1)
    assert placed(policy, arrival(4), P0._replace(num_waiting_tokens=8000), D0).ttft_s > COST.prefill_s(8000, 0) / 2


def test_a_health_probe_is_never_late() -> None:
    probe = arrival(1, 8000, ttft_s=0.0)._replace(is_probe=True)
    assert not placed(Goodput(COSTS, tpot_slo_s=0.05), probe, P0._replace(num_waiting_tokens=10**6), D0).is_late


def test_without_an_objective_the_lighter_batch_decodes() -> None:
    heavy = D0._replace(num_decoding=9, num_context_tokens=9000)
    assert decoder(Goodput(COSTS), arrival(1), heavy, D1) == "decode-1"


def test_without_an_objective_no_prompt_is_late() -> None:
    choice = placed(Goodput(COSTS), arrival(1, 8000, ttft_s=inf), P0._replace(num_waiting_tokens=10**6), D0)
    assert not choice.is_late


def test_answers_at_their_limit_keep_others_away() -> None:
    """Both workers are equally loaded; where answers are just on time, a longer step makes them miss."""
    policy = Goodput(COSTS, tpot_slo_s=STEP_S * 1.001)
    tight = with_answers(policy, D0, 16, late_s=0.0)
    slack = D1._replace(num_decoding=16, num_context_tokens=16_000)
    assert decoder(policy, arrival(1), tight, slack) == "decode-1"
    for number in range(16):
        policy.left(1000 + number, 0)
    lost = with_answers(policy, D0, 16, late_s=10.0)
    heavier = slack._replace(num_decoding=17, num_context_tokens=17_000)
    assert decoder(policy, arrival(1), lost, heavier) == "decode-0", "lost answers cost nothing"


def test_a_request_that_missed_its_ttft_earns_nothing_on_a_decode_worker() -> None:
    """It goes where all is lost, though its own answer would be faster elsewhere."""
    policy = Goodput(COSTS, tpot_slo_s=STEP_S * 1.02)
    on_time = with_answers(policy, D0, 16, late_s=0.0)
    lost = D1._replace(num_decoding=30, num_context_tokens=30_000)
    one = arrival(1)
    placed(policy, one, P0, on_time._replace(num_free_blocks=0), lost._replace(num_free_blocks=0))
    late = one._replace(now_s=TTFT_S + 1)
    on_time = on_time._replace(num_steps=int(late.now_s / policy.tpot_slo_s), stepped_s=late.now_s)
    assert decoder(policy, late, on_time, lost) == "decode-1"


def test_prefill_on_a_decode_worker_is_charged_with_the_answers_that_it_delays() -> None:
    hashes = frozenset(block_hashes(range(6000), BLOCK_SIZE))
    one = arrival(1, 7000)
    for late_s, expected in ((STEP_S * 199, "prefill-0"), (10.0, "decode-0")):
        policy = Goodput(COSTS, tpot_slo_s=STEP_S * 2)
        d0 = with_answers(policy, D0._replace(cached_blocks=hashes), 16, late_s=late_s)
        assert placed(policy, one, P0._replace(num_waiting_tokens=3000), d0).worker_id == expected


def test_a_mixed_worker_that_prefills_much_hands_off() -> None:
    policy = Goodput(COSTS, tpot_slo_s=2 * COST.decode_s(1, 2000))
    busy, mixed = P0._replace(num_waiting_tokens=10**5), worker("mixed-0", WorkerRole.MIXED)
    choices = [placed(policy, arrival(number, 2000, ttft_s=10.0), busy, D0, mixed) for number in range(30)]
    assert {choice.worker_id for choice in choices} == {"mixed-0"}
    assert not choices[0].handoff
    assert choices[-1].handoff
    assert not placed(policy, arrival(30, 2000, now_s=1000.0), busy, D0, mixed).handoff, "what it did is long ago"


def test_shared_blocks_are_not_missing() -> None:
    policy = Goodput(COSTS, tpot_slo_s=0.05)
    hashes = frozenset(block_hashes(range(4000), BLOCK_SIZE))
    shares = D0._replace(num_free_blocks=20, cached_blocks=hashes)
    assert decoder(policy, arrival(1, 4020), shares, D1._replace(num_free_blocks=900)) == "decode-0"


def test_the_price_follows_recent_harm_and_decays() -> None:
    policy = Goodput(COSTS)
    assert policy._prefill_cost.misses_per_s(0.0) == 0.0
    for number in range(20):
        placed(policy, arrival(number, 1000, ttft_s=COST.prefill_s(1000, 0)), P0, D0)
    cost = policy._prefill_cost.misses_per_s(0.0)
    assert cost > 0
    assert policy._prefill_cost.misses_per_s(10.0) == pytest.approx(cost * 0.0067, rel=0.01)


def test_a_decision_among_some_workers_leaves_the_answers_of_others_as_long_as_they_are() -> None:
    policy = Goodput(COSTS, tpot_slo_s=0.05)
    mixed = worker("mixed-0", WorkerRole.MIXED)._replace(num_steps=1000)
    policy.decoding(1, 0.0, 1, mixed)
    placed(policy, arrival(2), mixed._replace(num_steps=1400))
    decoder(policy, arrival(3), D0)
    view = policy._views["mixed-0"]
    assert view.answers.num_tokens(view.snapshot.num_steps).tolist() == [401]


def test_the_policy_forgets_what_has_left() -> None:
    policy = Goodput(COSTS, tpot_slo_s=0.02)
    for number in range(600):
        placed(policy, arrival(number, ttft_s=0.0), P0, D0._replace(num_free_blocks=0))
        if number % 2:
            policy.decoding(number, -inf, 1, D0)
    for number in range(600):
        policy.left(number, 10)
    assert not policy._requests
    assert policy._num_answers == len(policy._joining) == len(policy._late_joining) == 0
    assert not policy._late_tokens
    assert not policy._pulls.num_tokens("prefill-0", 1, 0)
    assert not any(len(view.prompts) or len(view.answers) for view in policy._views.values())


def test_a_decode_worker_prefills_only_while_its_mean_step_meets_tpot() -> None:
    """With a long queue on the prefill worker, all prompts would go to the decode worker, and its answers miss TPOT."""
    policy = Goodput(COSTS, tpot_slo_s=0.02)
    queue = P0._replace(num_waiting_tokens=40_000)
    busy = D0._replace(num_decoding=8, num_context_tokens=8000)
    chosen = [placed(policy, arrival(number, 2000, ttft_s=2.0), queue, busy).worker_id for number in range(60)]
    num_local = chosen.count("decode-0")
    assert 0 < num_local * COST.prefill_s(2000, 0) < 2.2
    assert set(chosen[num_local:]) == {"prefill-0"}


@pytest.mark.parametrize(("num_before", "num_spare", "expected"), [(0, -1, 0), (0, 1, 1), (1, 1, 0)])
def test_a_decode_worker_prefills_only_while_answers_have_room_for_what_they_keep_meanwhile(
    num_before: int, num_spare: int, expected: int
) -> None:
    """They take longer beside a prefill, and hold their blocks until they end; those about to join need some, too."""
    policy, queue = Goodput(COSTS, tpot_slo_s=0.05), P0._replace(num_waiting_tokens=40_000)
    for number in range(num_before):
        assert placed(policy, arrival(number), P0, D0._replace(num_free_blocks=0)).handoff
    busy = COST.prompt_s(2000, 0, D0.max_batch_tokens) / policy._answer_s()
    num_kept = 80_000 * busy / (1 - busy)
    num_growing = policy._lengths.mean * 9
    num_free = 2000 // BLOCK_SIZE + 1 + int((num_kept + num_growing) // BLOCK_SIZE) + num_spare
    decode = D0._replace(num_decoding=8, num_context_tokens=80_000, num_free_blocks=num_free)
    choice = placed(policy, arrival(9, 2000, ttft_s=2.0), queue, decode)
    assert choice.worker_id == ("prefill-0", "decode-0")[expected]


def test_behind_a_full_link_prompts_are_computed_where_they_decode() -> None:
    """Pulls between hosts take as long as prompts, so that those placed at once wait for each other."""
    policy = Goodput(COSTS, tpot_slo_s=0.05)

    def chosen(request_id: int, host: str) -> str:
        one = arrival(request_id, 1000, ttft_s=2.0)._replace(tpot_slo_s=0.05)
        return placed(policy, one, P0, D0._replace(host=host)).worker_id

    assert {chosen(number, P0.host) for number in range(20)} == {"prefill-0"}, "within a host none waits"
    assert chosen(20, "there") == "decode-0"
    for number in range(20):
        policy.decoding(number, 0.0, 1, D0)
    assert chosen(21, "there") == "prefill-0"


@pytest.mark.parametrize("ttft_s", [0.0, 30.0])
def test_no_prompt_waits_for_pulls_of_those_that_run_after_it(ttft_s: float) -> None:
    """Late ones, and those of a tier with a longer TTFT."""
    policy, far = Goodput(COSTS, tpot_slo_s=0.05), D0._replace(host="there")
    for number in range(100):
        other, queue = arrival(number, 1000, ttft_s=ttft_s), P0._replace(num_waiting_tokens=1000 * number)
        assert placed(policy, other, queue, far._replace(num_free_blocks=0)).handoff
    urgent = arrival(100, 1000)._replace(tpot_slo_s=0.05, share="urgent")
    assert placed(policy, urgent, P0._replace(num_waiting_tokens=100_000), far).handoff


@pytest.mark.parametrize("is_sibling", [True, False])
def test_what_decode_workers_cache_or_will_have_for_a_sibling_is_not_pulled(is_sibling: bool) -> None:
    policy, cached = Goodput(COSTS, tpot_slo_s=0.05), frozenset(block_hashes(range(1000), BLOCK_SIZE))
    full = D0._replace(num_free_blocks=0, cached_blocks=() if is_sibling else cached)
    for number in range(60):
        one = arrival(number, 1001)._replace(is_sibling=is_sibling and number > 0)
        assert placed(policy, one, P0, full).handoff
    num_pulled = 1001 + 59 * BLOCK_SIZE if is_sibling else 60
    assert policy._pulls.num_tokens("prefill-0", 1, 0) == num_pulled


def test_pulls_that_waited_for_others_correct_no_prediction() -> None:
    policy, factors = Goodput(COSTS, tpot_slo_s=0.05), [1.0]
    for number, source in enumerate((P0, P0, P1)):
        placed(policy, arrival(number, 1000), source, D0)
        policy.pulled(WorkerRole.DECODE, 1000, 1.0, source.worker_id, same_host=True)
        factors.append(policy.pull_corrections[True].factor)
    assert factors[0] < factors[1] == factors[2] < factors[3], "those from another worker do not wait"


def test_short_answers_stand_fewer_prefills_beside_them() -> None:
    queue = P0._replace(num_waiting_tokens=40_000)
    busy = D0._replace(num_decoding=8, num_context_tokens=8000)
    num_local = []
    for length in (20, 2000):
        policy = Goodput(COSTS, tpot_slo_s=0.02)
        for request_id in range(1000, 1320):
            policy.left(request_id, length)
        chosen = [placed(policy, arrival(number, 1000, ttft_s=2.0), queue, busy).worker_id for number in range(20)]
        num_local.append(chosen.count("decode-0"))
    assert num_local[0] < num_local[1] / 2


def test_errors_of_predictions_are_learned() -> None:
    """A prompt that is predicted to miss by a fifth is late, unless predictions were often further off."""
    policy = Goodput(COSTS, tpot_slo_s=0.05)
    tight = 0.75 * COST.prefill_s(2000, 0)
    assert placed(policy, arrival(1, 2000, ttft_s=tight), P0, D0).is_late
    for request_id in range(2, 60):
        choice = placed(policy, arrival(request_id, 2000), P0, D0)
        policy.decoding(request_id, choice.ttft_s * (2 if request_id % 2 else 0.5), 1, D0)
    assert not placed(policy, arrival(60, 2000, ttft_s=tight), P0, D0).is_late
    assert policy._errors[True].spread > TTFT_SPREAD == policy._errors[False].spread


def test_what_would_earn_nothing_anywhere_is_refused_if_that_is_wished() -> None:
    """Refused ones are asked back when the backlog is gone, one after the other."""
    full, queue = D0._replace(num_free_blocks=0), P0._replace(num_waiting_tokens=40_000)
    one = arrival(1)._replace(may_refuse=True, tpot_slo_s=0.05)
    for waiting, wait_s in (
        (queue, predict_ttft_s(queue, 100, 0, COST)),
        (queue._replace(num_waiting_tokens=10**7), 0),
    ):
        policy = Goodput(COSTS, tpot_slo_s=0.05)
        first, second = (policy.prefill(one, [waiting, full]) for _ in range(2))
        assert first is not None
        assert second is not None
        own_s = COST.prefill_s(100, 0)
        assert first.retry_after_s == pytest.approx(wait_s + own_s if wait_s else MAX_RETRY_AFTER_S)
        assert second.retry_after_s == pytest.approx(wait_s + 2 * own_s if wait_s else MAX_RETRY_AFTER_S)
        assert placed(policy, one._replace(may_refuse=False), waiting, full).is_late
        assert not placed(policy, one, P0, full).retry_after_s
    light = one._replace(weight=1e-3)
    assert not placed(policy, light, P0, full).retry_after_s, "where nothing binds, none is hopeless"


def test_a_request_is_refused_if_answers_that_it_would_delay_are_worth_more() -> None:
    before_s, after_s = COST.decode_s(16, 16_000), COST.decode_s(17, 24_000)
    policy = Goodput(COSTS, tpot_slo_s=1.2 * after_s)
    late_s = policy._lengths.remaining[100] * (policy.tpot_slo_s - (before_s + after_s) / 2)
    one = arrival(1, 8000)._replace(may_refuse=True, tpot_slo_s=policy.tpot_slo_s)
    tight = with_answers(policy, D0._replace(num_free_blocks=one.blocks.num_blocks()), 16, late_s=late_s)
    assert placed(policy, one, P0, tight).retry_after_s > 0
    assert not placed(policy, one._replace(weight=100.0), P0, tight).retry_after_s, "of a tier that is worth more"
    assert not placed(policy, one, P0, tight, D1).retry_after_s


def loaded(policy: Goodput, share: float) -> WorkerSnapshot:
    """Decode worker on which an answer of 100 tokens would have a step of ``share`` of the objective."""
    step_s = share * policy.tpot_slo_s
    num_context = (step_s - COST.decode_s(17, 100)) / COST.decode_token_s
    return D0._replace(num_decoding=16, num_context_tokens=int(num_context))


def test_what_would_earn_nothing_waits_while_it_would_take_the_room_of_others() -> None:
    policy = Goodput(COSTS, tpot_slo_s=2 * STEP_S)
    worthless = arrival(1)._replace(weight=0.0, tpot_slo_s=1.0)
    full, light = loaded(policy, 0.9), loaded(policy, 0.8)
    for one, decode, waits in (
        (worthless, full, True),
        (worthless, light, False),
        (worthless, light._replace(num_free_blocks=0), True),
        (worthless, D0, False),
        (worthless, D0._replace(num_free_blocks=0), False),  # idle: what it lacks would never come
        (worthless, D0._replace(prefill_correction=99.0, decode_correction=99.0), False),
        (worthless._replace(wanted_s=inf), full, False),
        (worthless._replace(is_probe=True), full, False),
        (arrival(1)._replace(tpot_slo_s=policy.tpot_slo_s), full, False),
        (arrival(1)._replace(tpot_slo_s=policy.tpot_slo_s), loaded(policy, 1.5), False),  # nobody is in time
    ):
        choice = policy.prefill(one, [P0, decode])
        assert choice is not None
        assert choice.is_held == waits
        assert choice.is_late or not waits
    policy.decoding(1000, 0.0, 1, D1)
    choice = policy.prefill(arrival(1)._replace(tpot_slo_s=policy.tpot_slo_s), [P0, loaded(policy, 1.5)])
    assert choice is not None
    assert choice.is_held, "an answer may meet its objectives"
    unreachable = Goodput(COSTS, tpot_slo_s=0.5 * COST.decode_s(1, 100))
    choice = unreachable.prefill(worthless, [P0, full])
    assert choice is not None
    assert not choice.is_held, "nobody is spared"


@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_a_prompt_whose_next_token_is_its_last_waits_for_no_room_among_answers(weight: float) -> None:
    """It decodes nowhere, so it can harm none of them, nor miss TPOT."""
    policy = Goodput(COSTS, tpot_slo_s=2 * STEP_S)
    policy.decoding(1000, 0.0, 1, D1)
    full = loaded(policy, 1.5)
    answer = arrival(1)._replace(weight=weight, tpot_slo_s=policy.tpot_slo_s)
    choice = policy.prefill(answer, [P0, full])
    assert choice is not None
    assert choice.is_held
    single = placed(policy, answer._replace(decodes=False), P0, full)
    assert not single.is_held
    assert not single.is_late


def test_late_ones_on_their_way_count_for_those_that_wait() -> None:
    policy = Goodput(COSTS, tpot_slo_s=2 * STEP_S)
    worthless = arrival(1)._replace(weight=0.0, tpot_slo_s=1.0)
    one_left = D0._replace(max_batch_size=1)
    assert not placed(policy, worthless, P0, one_left).is_held
    following = policy.prefill(worthless._replace(request_id=2), [P0, one_left])
    assert following is not None
    assert following.is_held
    decoder(policy, worthless, one_left)
    again = policy.prefill(worthless._replace(request_id=2), [P0, one_left])
    assert again is not None
    assert not again.is_held


def test_one_in_eight_is_one_that_has_waited_for_long_unless_it_is_of_no_worth() -> None:
    policy = Goodput(COSTS, tpot_slo_s=2 * STEP_S)
    full = loaded(policy, 1.5)
    for weight, expected in ((1.0, 3), (0.0, 0)):
        num_turns = 0
        for number in range(2 * TURN + 1):
            one = arrival(100, now_s=LATE_S, ttft_s=-LATE_S)._replace(tpot_slo_s=policy.tpot_slo_s, weight=weight)
            choice = policy.prefill(one, [P0, full])
            assert choice is not None
            if not choice.is_held:
                num_turns += 1
                policy.placed(one, choice)
            placed(policy, arrival(number), P0, D0)
        assert num_turns == expected


def test_what_has_waited_for_long_has_a_turn_though_nothing_else_moves() -> None:
    policy = Goodput(COSTS, tpot_slo_s=2 * STEP_S)
    full = loaded(policy, 1.5)
    policy.decoding(1000, 0.0, 1, D1)
    turns_s = []
    for now_s in range(4 * round(LATE_S)):
        one = arrival(100 + now_s, now_s=now_s, ttft_s=-now_s)._replace(tpot_slo_s=policy.tpot_slo_s)
        choice = policy.prefill(one._replace(queued_s=0.0), [P0, full])
        assert choice is not None
        if not choice.is_held:
            turns_s.append(now_s)
            policy.placed(one._replace(queued_s=0.0), choice)
    assert turns_s == [LATE_S, 2 * LATE_S, 3 * LATE_S]


def test_a_resumed_answer_is_due_at_once_and_never_late() -> None:
    policy = Goodput(COSTS)
    for number in range(20):
        placed(policy, arrival(number, 1000, ttft_s=COST.prefill_s(1000, 0)), P0, D0)
    queue = P0._replace(num_waiting_tokens=20_000)
    resumed = arrival(30, 4000)._replace(wanted_s=inf)
    assert placed(policy, resumed, queue, D0).is_late, "it costs more than it is worth"
    choice = placed(policy, resumed._replace(request_id=31, is_resumed=True), queue, D0)
    assert not choice.is_late
    assert choice.due_s == -inf
    assert choice.ttft_s == predict_ttft_s(P0, 4000, 0, COST)


def test_what_earns_nothing_waits_for_room_rather_than_harm_others() -> None:
    policy = Goodput(COSTS, tpot_slo_s=2 * STEP_S)
    worthless = arrival(1)._replace(weight=0.0, tpot_slo_s=1.0)
    full = loaded(policy, 0.9)._replace(worker_id="decode-1")
    assert decoder(policy, worthless, full, D0._replace(num_decoding=64)) == "decode-0"
    assert decoder(policy, worthless._replace(weight=1.0), full, D0._replace(num_decoding=64)) == "decode-1"


def test_a_prompt_waits_for_late_ones_that_are_computed_already() -> None:
    policy = Goodput(COSTS)
    assert placed(policy, arrival(1, 8000, ttft_s=0.01), P0, D0).is_late
    running = P0._replace(num_waiting_tokens=8000, num_tokens_in_flight=2000)
    choice = policy.prefill(arrival(2), [running, D0])
    assert choice is not None
    assert choice.ttft_s == predict_ttft_s(P0._replace(num_waiting_tokens=2000), 100, 0, COST)


def test_a_prompt_of_no_worth_delays_no_other() -> None:
    """Unless it would do so when late, too: because it is computed at once, in one chunk."""
    policy = Goodput(COSTS)
    for number in range(20):
        placed(policy, arrival(number, 1000, ttft_s=COST.prefill_s(1000, 0)), P0, D0)
    queue, worthless = P0._replace(num_waiting_tokens=1000), arrival(30, 1000, ttft_s=60.0)._replace(weight=0.0)
    assert placed(policy, worthless, queue, D0).is_late
    assert not placed(policy, arrival(31, 1000, ttft_s=60.0), queue, D0).is_late
    long = arrival(32, 8000, ttft_s=60.0)._replace(weight=0.0)
    idle, unknown = P0._replace(worker_id="prefill-2"), policy.prefill(long, [P1, D0])
    assert not placed(policy, worthless._replace(request_id=33), idle, D0).is_late
    assert unknown is not None
    assert unknown.is_late


def test_a_share_waits_behind_its_own_work() -> None:
    """A tenant that has sent 20 prompts does not delay the first one of another, who would wait behind a third's."""
    policy, num_waiting = Goodput(COSTS), 0
    for number in range(20):
        placed(policy, arrival(number, 1000)._replace(share="a"), P0._replace(num_waiting_tokens=num_waiting), D0)
        num_waiting += 1000
    queue = P0._replace(num_waiting_tokens=num_waiting)
    other, same = (policy.prefill(arrival(30, 1000)._replace(share=share), [queue, D0]) for share in "ba")
    assert other is not None
    assert same is not None
    assert other.ttft_s == predict_ttft_s(P0._replace(num_waiting_tokens=1000), 1000, 0, COST)
    assert same.ttft_s == predict_ttft_s(queue, 1000, 0, COST)
    light = policy.prefill(arrival(30, 1000)._replace(share="a", weight=0.5), [queue, D0])
    assert light is not None
    assert light.due_s - TTFT_S == pytest.approx(2 * (same.due_s - TTFT_S), rel=1e-4)
    for number in range(20):
        policy.prefilled(number)
    assert placed(policy, arrival(31, 1000)._replace(share="a"), P0, D0).due_s == TTFT_S


def test_an_answer_that_goes_on_elsewhere_does_not_hold_up_its_share() -> None:
    """Its prompt has no objective any more; those of later requests do."""
    policy = Goodput(COSTS)
    placed(policy, arrival(1, ttft_s=inf), P0, D0)
    assert placed(policy, arrival(2), P0, D0).due_s < 2 * TTFT_S


@given(st.lists(st.tuples(st.floats(0, 1.0), st.integers(1, 9000), st.booleans()), max_size=20))
def test_one_share_is_served_in_the_order_of_arrival(prompts: list[tuple[float, int, bool]]) -> None:
    """Whatever is computed meanwhile, and though what a prompt has computed counts until its last chunk."""
    policy, now_s, last_s, waiting = Goodput(COSTS), 0.0, 0.0, list[int]()
    for number, (gap_s, num_tokens, ends) in enumerate(prompts):
        now_s += gap_s
        choice = placed(policy, arrival(number, num_tokens, now_s=now_s, ttft_s=60.0), P0, D0)
        assert choice.due_s >= last_s or not waiting
        last_s = choice.due_s
        waiting.append(number)
        if ends:
            policy.prefilled(waiting.pop(0))


@given(
    st.lists(st.tuples(st.floats(0, 1.0), st.integers(1, 9000), st.integers(0, 2), st.integers(0, 40_000)), max_size=30)
)
def test_none_gives_way_for_longer_than_a_late_prompt(prompts: list[tuple[float, int, int, int]]) -> None:
    """Whatever its share sends, whatever that is worth, and late or not: workers compute what is due first."""
    policy, now_s = Goodput(COSTS), 0.0
    for number, (gap_s, num_tokens, share, num_waiting) in enumerate(prompts):
        now_s += gap_s
        one = arrival(number, num_tokens, now_s=now_s)._replace(share=str(share), weight=(0.0, 0.01, 1.0)[share])
        choice = placed(policy, one, P0._replace(num_waiting_tokens=num_waiting), D0)
        assert choice.due_s <= one.wanted_s + LATE_S


@given(st.lists(st.tuples(st.floats(0, 0.1), st.integers(1, 4000), st.booleans()), max_size=20))
def test_the_same_events_give_the_same_decisions(events: list[tuple[float, int, bool]]) -> None:
    def decide() -> list[PrefillChoice | None]:
        policy, now_s, choices = Goodput(COSTS, tpot_slo_s=0.03), 0.0, list[PrefillChoice | None]()
        for number, (gap_s, num_tokens, ends) in enumerate(events):
            now_s += gap_s
            one = arrival(number, num_tokens, now_s=now_s)._replace(may_refuse=number % 3 == 0, share=str(number % 2))
            queue = P0._replace(num_waiting_tokens=number * 500)
            choices.append(choice := policy.prefill(one, [queue, P1, D0]))
            if choice is not None and not choice.retry_after_s:
                policy.placed(one, choice)
                policy.prefilled(number)
                policy.decoding(number, now_s, 1, D0)
                if ends:
                    policy.left(number, 5)
        return choices

    assert decide() == decide()


def plain_gains(policy: Goodput, one: Arrival, workers: Sequence[WorkerSnapshot]) -> dict[str, float]:
    """Gain of each candidate for prefill, one after the other, before any was placed."""
    blocks, tpot_slo_s, length = one.blocks, policy.tpot_slo_s, policy._lengths.remaining[0]
    own_s, decodes = dict[str, float](), dict[str, tuple[float, float]]()
    for each in workers:
        num_cached = blocks.num_cached_tokens(each.cached_blocks)
        prefill_s = COST.prefill_s(blocks.num_tokens - num_cached, num_cached)
        own_s[each.worker_id] = prefill_s * each.prefill_correction
        step_s = COST.decode_s(each.num_decoding + 1, each.num_context_tokens + blocks.num_tokens)
        step_s *= each.decode_correction
        tpot_s = step_s + (COST.pipeline_depth - 0.5) * step_s / length
        if each.num_free_blocks < blocks.num_blocks():
            lacking = shortfall(blocks, each, num_cached_tokens=num_cached)
            tpot_s += step_s * lacking * BLOCK_SIZE / max(each.num_context_tokens, blocks.num_tokens)
        chance = 1 / (1 + exp(-(1 - tpot_s / tpot_slo_s) / TPOT_SPREAD))
        view = policy._updated(each)
        harm = view.misses_of_steps(0.0, step_s - view.step_s, policy._lengths)
        decodes[each.worker_id] = chance, harm + SLACK_MISSES * tpot_s / tpot_slo_s
    best = max(decodes[each.worker_id][0] - decodes[each.worker_id][1] for each in workers[-2:])
    gains = {}
    for each in workers:
        num_cached = blocks.num_cached_tokens(each.cached_blocks)
        ttft_s = predict_ttft_s(each, blocks.num_tokens, num_cached, COST)
        chance = 1 / (1 + exp(min(50, (ttft_s - TTFT_S) / max(MIN_TTFT_SPREAD_S, TTFT_SPREAD * ttft_s))))
        gain = best - (1 - chance) * max(0.0, best)
        if each.role is WorkerRole.DECODE:
            own = own_s[each.worker_id]
            step_s = COST.decode_s(each.num_decoding + 1, each.num_context_tokens + blocks.num_tokens)
            share = own / (policy._lengths.median * tpot_slo_s)
            num_kept = each.num_context_tokens * share / (1 - share)
            left = each.num_free_blocks - (num_kept + length * (each.num_decoding + 1)) // BLOCK_SIZE
            lacking = shortfall(blocks, each._replace(num_free_blocks=left), num_cached_tokens=num_cached)
            if step_s * each.decode_correction > MAX_MEAN_STEP * tpot_slo_s * (1 - share) or lacking:
                continue
            delay = policy._views[each.worker_id].misses_of_delay(own, policy._lengths)
            gain = chance * decodes[each.worker_id][0] - decodes[each.worker_id][1] - delay
        gains[each.worker_id] = gain - SLACK_MISSES * ttft_s / max(TTFT_S, ttft_s)
    return gains


HASHES = block_hashes(range(9000), BLOCK_SIZE)


class NoSources(PrefixSources):
    def of(self, arrival: Arrival, workers: Iterable[WorkerSnapshot], cached: Mapping[str, int]) -> None:
        return None


@given(
    st.lists(
        st.tuples(
            st.integers(0, 20_000),
            st.integers(0, 60),
            st.integers(0, 12_000),
            st.sampled_from([0.7, 1.0, 1.4]),
            st.integers(0, len(HASHES)),
        ),
        min_size=4,
        max_size=4,
    ),
    st.integers(1, 9000),
    st.floats(-0.5, 0.2),
)
def test_the_best_candidate_of_all_is_chosen(
    loads: list[tuple[int, int, int, float, int]], num_tokens: int, late_s: float
) -> None:
    policy, workers = Goodput(COSTS, tpot_slo_s=0.03), list[WorkerSnapshot]()
    policy._prefix_sources = NoSources(COSTS, policy.pull_corrections)
    for each, (num_waiting, num_answers, num_free, correction, num_cached) in zip((P0, P1, D0, D1), loads, strict=True):
        is_decode = each.role is WorkerRole.DECODE
        one = each._replace(
            num_waiting_tokens=0 if is_decode else num_waiting,
            num_decoding=num_answers * is_decode,
            num_context_tokens=700 * num_answers * is_decode,
            num_free_blocks=num_free,
            prefill_correction=correction,
            decode_correction=correction,
            cached_blocks=frozenset(HASHES[:num_cached]),
        )
        workers.append(one)
        for number in range(one.num_decoding):
            policy.decoding(1000 * len(workers) + number, -number * policy.tpot_slo_s - late_s, number, one)
    prompt = arrival(1, num_tokens)._replace(tpot_slo_s=policy.tpot_slo_s)
    gains, choice = plain_gains(policy, prompt, workers), policy.prefill(prompt, workers)
    assert choice is not None
    if choice.is_late:
        assert max(gains.values()) < MIN_SCORE
    else:
        assert gains[choice.worker_id] == pytest.approx(max(gains.values()), abs=1e-6)


def test_a_prefix_is_pulled_from_the_worker_that_caches_most_and_answers_soonest() -> None:
    policy, prompt = Goodput(COSTS, tpot_slo_s=0.05), arrival(1, 8000)
    cached = frozenset(HASHES[: 7000 // BLOCK_SIZE])
    busy = P0._replace(num_waiting_tokens=30_000, cached_blocks=cached)
    less = D1._replace(cached_blocks=frozenset(HASHES[: 3000 // BLOCK_SIZE]), num_free_blocks=0)
    idle = D0._replace(cached_blocks=cached, num_free_blocks=0)
    choice = placed(policy, prompt, busy, P1, idle, less)
    pull = choice.prefix
    assert pull is not None
    assert (choice.worker_id, pull.worker_id) == ("prefill-1", "decode-0")
    assert pull.num_tokens == choice.num_cached_tokens == 7000 // BLOCK_SIZE * BLOCK_SIZE
    assert pull.pull_s == COST.pull_s(pull.num_tokens, same_host=True)
    whole_s, rest_s = (COST.prompt_s(8000 - each, each, P1.max_batch_tokens) for each in (0, pull.num_tokens))
    assert pull.prefill_s == whole_s - rest_s
    assert choice.ttft_s == pull.pull_s + rest_s
    assert pull.min_tokens / pull.num_tokens == pytest.approx(pull.pull_s / pull.prefill_s, rel=0.01)
    policy.left(1, 0)
    waits = idle._replace(num_waiting_tokens=2000)
    later = placed(policy, prompt, busy, P1, waits, less).prefix
    assert later is not None
    assert later.pull_s > pull.pull_s, "it is asked in the midst of a step"


def test_a_prefix_that_is_faster_to_compute_is_not_pulled() -> None:
    prompt = arrival(1, 200)
    source = D0._replace(cached_blocks=frozenset(HASHES[:1]), num_free_blocks=0)
    assert placed(Goodput(COSTS), prompt, P1, source).prefix is None
    slow = Goodput(COSTS)
    source = source._replace(cached_blocks=frozenset(HASHES), host="there")
    assert placed(slow, arrival(2, 8000), P1, source).prefix is not None
    slow.pull_corrections[False].factor = 1000.0
    assert placed(slow, arrival(3, 8000), P1, source).prefix is None


@pytest.mark.parametrize(("num_cached", "is_pulled"), [(3000, False), (5000, True)])
def test_a_pull_brings_most_of_what_is_lacking(num_cached: int, is_pulled: bool) -> None:
    source = D0._replace(cached_blocks=frozenset(HASHES[: num_cached // BLOCK_SIZE]), num_free_blocks=0)
    assert (placed(Goodput(COSTS), arrival(1, 8000), P1, source).prefix is not None) is is_pulled


def test_what_is_beyond_the_bound_of_a_pull_is_predicted_to_be_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    source = D0._replace(cached_blocks=frozenset(HASHES), num_free_blocks=0)
    whole = placed(Goodput(COSTS), arrival(1, 8000), P1, source)
    monkeypatch.setattr(prefix_sources, "MAX_PREFIX_BLOCKS", 5000 // BLOCK_SIZE)
    part = placed(Goodput(COSTS), arrival(1, 8000), P1, source)
    assert part.prefix is not None
    assert part.prefix.num_tokens == part.num_cached_tokens == 5000 // BLOCK_SIZE * BLOCK_SIZE
    assert part.ttft_s > 2 * whole.ttft_s
    monkeypatch.setattr(prefix_sources, "MAX_PREFIX_BLOCKS", 3000 // BLOCK_SIZE)
    assert placed(Goodput(COSTS), arrival(1, 8000), P1, source).prefix is None, "that is not most of it"


def test_prefixes_are_pulled_from_one_source_in_turns_and_not_from_one_that_failed() -> None:
    policy = Goodput(COSTS)
    source = D0._replace(cached_blocks=frozenset(HASHES), num_free_blocks=0)
    waits_s = []
    for number in range(3):
        pull = placed(policy, arrival(number, 8000), worker(f"prefill-{number}"), source).prefix
        assert pull is not None
        waits_s.append(pull.pull_s)
    assert waits_s == pytest.approx([waits_s[0] * number for number in (1, 2, 3)])
    policy.prefix_failed("decode-0", 10.0)
    assert placed(policy, arrival(4, 8000), P1, source).prefix is None
    assert placed(policy, arrival(5, 8000, now_s=10.0), P1, source).prefix is not None


def test_a_micro_batch_is_no_source_of_a_prefix() -> None:
    """Those of a worker share the address from which others pull."""
    source = D0._replace(worker_id="decode-0.1", cached_blocks=frozenset(HASHES), num_free_blocks=0)
    assert placed(Goodput(COSTS), arrival(1, 8000), P1, source).prefix is None


def test_what_an_answer_may_lose_is_told_unless_all_is_lost() -> None:
    policy = Goodput(COSTS, tpot_slo_s=0.05)
    one = arrival(1)._replace(tpot_slo_s=0.05)
    placed(policy, one, P0, D0._replace(num_free_blocks=0))
    binding = policy.decode(one, [D0], set(), "")
    assert binding is not None
    step_s = COST.decode_s(1, 100)
    assert binding.stall_slo_s == pytest.approx(policy._lengths.remaining[0] * (0.05 - step_s))
    late = policy.decode(one._replace(now_s=TTFT_S + 1), [D0], set(), "")
    assert late is not None
    assert late.stall_slo_s == 0.0
    bound_late = policy.decode(one._replace(now_s=TTFT_S + 1, token_s=TTFT_S - 0.01), [D0], set(), "")
    assert bound_late is not None
    assert bound_late.stall_slo_s == binding.stall_slo_s, "token 0 came in time"


def test_a_request_that_would_wait_too_long_for_blocks_is_refused() -> None:
    policy = Goodput(COSTS, tpot_slo_s=0.02)
    full = D0._replace(num_decoding=16, num_context_tokens=16_000, num_free_blocks=0)
    one = arrival(1)._replace(may_refuse=True, tpot_slo_s=0.02)
    assert not placed(policy, one, P0, full).retry_after_s
    assert placed(policy, one, P0, full._replace(num_free_blocks=-8000)).retry_after_s > 0


def test_answers_that_a_prefill_beside_them_delays_count_against_it() -> None:
    policy, one = Goodput(COSTS, tpot_slo_s=1.1 * STEP_S), arrival(1, 4000, ttft_s=10.0)
    view = policy._updated(with_answers(policy, D0, 16, late_s=0.0))
    there = policy._decode_option(one, view, {})
    option = policy._prefill_option(one, view, there, None, 0, 0.0)
    delayed = view.misses_of_delay(option.prefill_s, policy._lengths)
    assert delayed > 0.01
    assert option.gain == pytest.approx(there.gain(option.chance) - SLACK_MISSES * option.ttft_s / 10.0)
    assert option.harm(policy._lengths) == pytest.approx(there.harm(policy._lengths) + delayed)


class Choice(NamedTuple):
    number: int
    gain: float
    cost: float

    def harm(self, _: object) -> float:
        return self.cost


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=9))
def test_the_least_key_is_found_though_harm_is_computed_only_where_it_may_decide(
    drawn: list[tuple[float, float]],
) -> None:
    choices = [Choice(number, *each) for number, each in enumerate(drawn)]
    asked = list[int]()

    def key(choice: Choice, harm: float) -> tuple[float, int]:
        asked.extend([choice.number] * (harm > 0))
        return harm - choice.gain, choice.number

    least, best = Goodput(COSTS)._least(choices, key)  # type: ignore[type-var]
    assert all(-choices[number].gain <= least[0] for number in asked)
    assert (least, best) == min((key(choice, choice.cost), choice) for choice in choices)
