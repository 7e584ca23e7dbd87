"""What links carry, by hand: near pulls take 1 s, far ones 4 s."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.contracts.placement import WorkerRole
from pdserve.planner.layout import Layout
from pdserve.planner.search.estimates import even_pulls_per_s
from tests.planner.stand_ins import a_pool, disaggregated

NEAR_S, FAR_S = 1.0, 4.0


def on_hosts(prefill: tuple[int, ...], decode: tuple[int, ...]) -> Layout:
    hosts = tuple(tuple((host,) for host in pool) for pool in (prefill, decode))
    return replace(disaggregated(len(prefill), len(decode)), hosts=hosts)


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        ((0, 0), (0, 0), 2.0),
        ((0, 0, 0), (0,), 1.0),
        ((0, 0), (1, 2), 0.5),
        # Each pair may stay within its host; of all four pairs of workers, two do.
        ((0, 1), (1, 0), 2 / 2.5),
        # One of the two has to go far.
        ((0, 1), (0, 0), 2 / 2.5),
        ((0, 1, 1), (0, 0, 2), 3 / (2 / 9 + 4 * 7 / 9)),
        # The one decode worker need not take from the others.
        ((0, 1, 2), (0,), 1 / 3),
    ],
)
def test_wires_carry_what_is_near_and_what_is_far(
    prefill: tuple[int, ...], decode: tuple[int, ...], expected: float
) -> None:
    layout = on_hosts(prefill, decode)
    assert even_pulls_per_s(layout, NEAR_S, FAR_S) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("one", "other", "expected"), [((0, 1), (0, 1), 4.0), ((0, 1), (1, 0), 1.0), ((0,), (1,), 1.0)]
)
def test_lanes_have_wires_and_pipelines_over_the_same_hosts_meet_stage_by_stage(
    one: tuple[int, ...], other: tuple[int, ...], expected: float
) -> None:
    prefill, decode = (a_pool(role, 1, 1, 4) for role in (WorkerRole.PREFILL, WorkerRole.DECODE))
    layout = Layout(prefill=prefill, decode=decode, hosts=((one,), (other,)))
    assert even_pulls_per_s(layout, NEAR_S, FAR_S) == expected
