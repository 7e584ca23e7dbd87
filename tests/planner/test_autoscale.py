"""Numbers of workers by the demand, window after window."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from pdserve.contracts.metrics import SCALE_REASONS
from pdserve.contracts.worker_config import WorkerRole
from pdserve.planner.autoscale import PREFILL_SHARE, WINDOW_S, Autoscaler, Bounds, Decision
from pdserve.router.requests.demand import Demand

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
BOUNDS = {PREFILL: Bounds(1, 6), DECODE: Bounds(1, 6)}


class Cluster:
    """Has what is decided at once."""

    def __init__(self, prefill: int, decode: int, bounds: dict[WorkerRole, Bounds] | None = None) -> None:
        self.autoscaler = Autoscaler(BOUNDS if bounds is None else bounds)
        self.replicas = {PREFILL: prefill, DECODE: decode}
        self.most: int | None = None
        self.demand = Demand(answer_s=1.0)
        self.now_s = 0.0
        self.autoscaler.observe(0.0, self.demand)

    def window(self, prefill: float, decode: float, **more: float) -> Decision | None:
        """Work for so many prefill and decode workers arrives."""
        self.now_s += WINDOW_S
        demand = self.demand._replace(
            prefill_s=self.demand.prefill_s + prefill * PREFILL_SHARE * WINDOW_S,
            num_answers=self.demand.num_answers + round(decode * WINDOW_S),
        )
        self.demand = demand
        self.autoscaler.observe(self.now_s, demand._replace(**more))  # type: ignore[arg-type]
        decision = self.autoscaler.decide(self.replicas, self.most)
        if decision is not None:
            self.replicas = dict(decision.replicas)
            assert decision.reason in SCALE_REASONS
        return decision

    def windows(self, number: int, prefill: float, decode: float) -> list[Decision | None]:
        return [self.window(prefill, decode) for _ in range(number)]


def test_the_mean_of_half_a_minute_adds_workers_and_a_window_does_not() -> None:
    cluster = Cluster(1, 1)
    assert cluster.window(0.5, 2.6) is None
    assert cluster.window(0.5, 2.6) == Decision({PREFILL: 1, DECODE: 3}, "decode_short")
    assert cluster.windows(30, 0.5, 2.6) == [None] * 30
    assert cluster.windows(2, 2.5, 2.6) == [None] * 2
    assert cluster.window(2.5, 2.6) == Decision({PREFILL: 2, DECODE: 3}, "prefill_short")
    cluster.windows(40, 2.5, 2.6)
    assert cluster.replicas == {PREFILL: 3, DECODE: 3}
    assert cluster.windows(30, 2.5, 2.6) == [None] * 30


def test_workers_leave_after_two_minutes_in_which_the_load_fits_those_that_are_left() -> None:
    cluster = Cluster(1, 4)
    assert cluster.windows(23, 0.5, 1.6) == [None] * 23
    assert cluster.window(0.5, 1.6) == Decision({PREFILL: 1, DECODE: 2}, "surplus")
    cluster = Cluster(1, 3)
    for _ in range(6):
        assert cluster.windows(20, 0.5, 1.6) == [None] * 20
        assert cluster.windows(2, 0.5, 3.4) == [None] * 2, "too short for more, and too much for fewer"


def test_a_load_that_grows_is_expected_to_grow_on() -> None:
    cluster = Cluster(1, 3)
    for decode in np.linspace(0.6, 2.8, 12):
        cluster.window(0.5, float(decode))
    assert cluster.replicas[DECODE] == 4


def test_part_of_a_prefill_worker_is_not_added_where_decode_workers_have_room() -> None:
    cluster = Cluster(1, 3)
    assert cluster.windows(20, 1.5, 2.4) == [None] * 20
    cluster.windows(6, 1.5, 2.6)
    assert cluster.replicas == {PREFILL: 2, DECODE: 3}
    cluster.windows(40, 1.5, 2.4)
    assert cluster.replicas == {PREFILL: 1, DECODE: 3}


def test_what_waits_asks_for_workers_that_compute_it_within_a_minute() -> None:
    cluster = Cluster(1, 1)
    cluster.window(0.5, 0.4, waiting_s=90.0, num_waiting=120)
    assert cluster.window(0.5, 0.4, waiting_s=90.0, num_waiting=120) == Decision(
        {PREFILL: 2, DECODE: 3}, "prefill_short"
    )


def test_answers_in_flight_ask_for_the_workers_that_they_fill() -> None:
    cluster = Cluster(1, 1)
    cluster.window(0.5, 0.4, num_full=1.4)
    assert cluster.window(0.5, 0.4, num_full=1.4) == Decision({PREFILL: 1, DECODE: 2}, "decode_short")


def test_bounds_hold_and_roles_without_them_stay() -> None:
    cluster = Cluster(2, 2, {DECODE: Bounds(2, 3)})
    cluster.windows(3, 9.0, 9.0)
    assert cluster.replicas == {PREFILL: 2, DECODE: 3}
    cluster.windows(40, 0.1, 0.2)
    assert cluster.replicas == {PREFILL: 2, DECODE: 2}


def test_on_hosts_that_hold_no_more_roles_move_to_where_the_load_is() -> None:
    cluster = Cluster(3, 1)
    cluster.most = 4
    cluster.windows(2, 1.2, 3.6)
    assert cluster.replicas == {PREFILL: 1, DECODE: 3}
    cluster.windows(24, 3.6, 1.2)
    assert cluster.replicas == {PREFILL: 3, DECODE: 1}
    assert cluster.windows(30, 3.6, 1.2) == [None] * 30


def test_nothing_changes_while_routers_do_not_answer() -> None:
    cluster = Cluster(1, 1)
    cluster.window(0.5, 5.0)
    cluster.now_s += WINDOW_S
    cluster.autoscaler.observe(cluster.now_s, None)
    assert cluster.autoscaler.decide(cluster.replicas) is None
    assert cluster.windows(2, 0.5, 4.8) == [None] * 2, "the first of them only begins a window"
    assert cluster.window(0.5, 4.8) == Decision({PREFILL: 1, DECODE: 5}, "decode_short")


def test_a_window_before_which_no_answer_ended_is_left_out() -> None:
    cluster = Cluster(1, 1)
    cluster.window(0.5, 4.8)
    assert cluster.window(0.5, 4.8, answer_s=0.0) is None
    assert cluster.window(0.5, 4.8) is None
    assert cluster.window(0.5, 4.8) == Decision({PREFILL: 1, DECODE: 5}, "decode_short")


def test_a_window_in_which_a_router_began_anew_is_left_out() -> None:
    cluster = Cluster(1, 1)
    cluster.window(0.5, 4.8)
    cluster.demand = Demand(answer_s=1.0)
    assert cluster.windows(2, 0.5, 1.0) == [None] * 2
    assert cluster.window(0.5, 4.8) == Decision({PREFILL: 1, DECODE: 3}, "decode_short")


def test_a_worker_that_is_spare_takes_the_role_that_is_short_at_once() -> None:
    cluster = Cluster(4, 1)
    cluster.window(1.4, 2.6)
    assert cluster.window(1.4, 2.6) == Decision({PREFILL: 2, DECODE: 3}, "decode_short")
    cluster = Cluster(4, 1)
    cluster.window(3.6, 2.6)
    assert cluster.window(3.6, 2.6) == Decision({PREFILL: 4, DECODE: 3}, "decode_short"), "none is spare"


def test_in_steady_load_there_is_less_than_a_change_in_two_minutes() -> None:
    random, cluster, num_changes = np.random.default_rng(0), Cluster(2, 3), 0
    for _ in range(720):  # an hour of 20 requests/s
        num_requests = random.poisson(20 * WINDOW_S) / (20 * WINDOW_S)
        num_changes += cluster.window(1.9 * num_requests, 2.9 * num_requests) is not None
    assert num_changes < 30


def test_where_both_roles_lack_workers_chance_moves_one_once_a_minute_at_most() -> None:
    rng = np.random.default_rng(0)
    cluster = Cluster(1, 2)
    cluster.most = 3
    decisions = [cluster.window(*rng.normal(2.4, 0.25, 2)) for _ in range(120)]
    changed = [index for index, decision in enumerate(decisions) if decision is not None]
    assert changed
    assert all(after - before >= 12 for before, after in pairwise(changed))


def test_a_role_below_its_least_gets_workers_before_demand_is_known() -> None:
    for num_windows in range(2):
        cluster = Cluster(2, 2, {PREFILL: Bounds(1, 4), DECODE: Bounds(2, 4)})
        cluster.windows(num_windows, 1.0, 1.0)
        cluster.replicas[DECODE] = 1
        cluster.autoscaler.observe(cluster.now_s + WINDOW_S, None)
        assert cluster.autoscaler.decide(cluster.replicas) == Decision({PREFILL: 2, DECODE: 2}, "decode_short")


def test_workers_that_somebody_else_adds_stay_for_two_minutes() -> None:
    cluster = Cluster(1, 2)
    assert cluster.windows(20, 0.5, 1.6) == [None] * 20
    cluster.replicas[DECODE] = 4
    assert cluster.windows(24, 0.5, 1.6) == [None] * 24
    assert cluster.window(0.5, 1.6) == Decision({PREFILL: 1, DECODE: 2}, "surplus")
