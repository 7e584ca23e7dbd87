"""Which host each worker is on: by hand for a few layouts, and never more than hosts have room for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.cost.hardware import hardware
from pdserve.planner.layout import Hosts, Layout
from pdserve.planner.search.hosts import host_words, placed
from pdserve.planner.search.plan import Supply
from tests.planner.stand_ins import H100, a_pool, colocated, disaggregated


def pair(prefill: tuple[int, ...], decode: tuple[int, ...]) -> Layout:
    """Pools of so many workers, with so many ranks and stages."""
    return Layout(prefill=a_pool(WorkerRole.PREFILL, *prefill), decode=a_pool(WorkerRole.DECODE, *decode))


def on_hosts(layout: Layout, num_nodes: int, devices_per_node: int = 8) -> Layout:
    return placed(layout, [Supply(hardware=H100, num_nodes=num_nodes, devices_per_node=devices_per_node)])


@pytest.mark.parametrize(
    ("prefill", "decode", "num_nodes", "devices_per_node", "expected"),
    [
        ((6, 4), (2, 4), 4, 8, "4 hosts, by devices: 2 with 8 prefill, 2 with 4 prefill and 4 decode"),
        ((2, 4), (6, 4), 4, 8, "4 hosts, by devices: 2 with 4 prefill and 4 decode, 2 with 8 decode"),
        ((4, 2), (2, 4), 2, 8, "2 hosts, by devices: 2 with 4 prefill and 4 decode"),
        ((8, 1), (1, 8), 3, 8, "2 hosts, by devices: 1 with 8 decode, 1 with 8 prefill"),
        ((3, 1), (2, 1), 4, 3, "2 hosts, by devices: 1 with 2 prefill and 1 decode, 1 with 1 prefill and 1 decode"),
        ((2, 8, 2), (1, 8), 5, 8, "5 hosts, by devices: 4 with 8 prefill, 1 with 8 decode"),
        # Mixed, a third decode worker would find no room.
        ((2, 3), (3, 2), 2, 6, "2 hosts, by devices: 1 with 6 prefill, 1 with 6 decode"),
    ],
)
def test_both_phases_are_spread_over_as_few_hosts_as_they_fit(
    prefill: tuple[int, ...], decode: tuple[int, ...], num_nodes: int, devices_per_node: int, expected: str
) -> None:
    assert host_words(on_hosts(pair(prefill, decode), num_nodes, devices_per_node)) == expected


def test_what_fits_one_host_is_on_one() -> None:
    layout = on_hosts(disaggregated(3, 5), 4)
    assert layout == disaggregated(3, 5)
    assert (layout.num_hosts, layout.spans_hosts, host_words(layout)) == (
        1,
        False,
        "1 host, by devices: 1 with 3 prefill and 5 decode",
    )
    wide = on_hosts(colocated(9), 4)
    assert (wide.num_hosts, wide.spans_hosts) == (2, False)


def test_each_worker_has_its_hosts() -> None:
    layout = on_hosts(pair((3, 4), (1, 4)), 2)
    assert layout.worker_hosts == {WorkerRole.PREFILL: ((0,), (1,), (0,)), WorkerRole.DECODE: ((1,),)}
    # The stages of a pipeline fill a host before the next one.
    layout = on_hosts(pair((1, 4, 4), (1, 4, 2)), 3)
    assert layout.worker_hosts == {WorkerRole.PREFILL: ((0, 0, 1, 1),), WorkerRole.DECODE: ((2,),)}


def test_each_kind_of_device_has_hosts_of_its_own() -> None:
    a100 = hardware("a100")
    fleet = [Supply(hardware=a100, num_nodes=1), Supply(hardware=H100, num_nodes=2)]
    decode = replace(a_pool(WorkerRole.DECODE, 2), hardware=a100)
    found = placed(Layout(prefill=a_pool(WorkerRole.PREFILL, 3, 4), decode=decode), fleet)
    assert found.worker_hosts == {WorkerRole.PREFILL: ((1,), (2,), (1,)), WorkerRole.DECODE: ((0,), (0,))}
    found = placed(Layout(prefill=a_pool(WorkerRole.PREFILL), decode=decode), fleet)
    assert found.worker_hosts == {WorkerRole.PREFILL: ((1,),), WorkerRole.DECODE: ((0,), (0,))}


def test_a_fleet_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1 x P\(TP8\) \+ 1 x D\(TP8\) does not fit hosts of 8 x h100-sxm"):
        on_hosts(pair((1, 8), (1, 8)), 1)
    with pytest.raises(ValueError, match=r"use more or larger ones, or smaller workers"):
        on_hosts(pair((1, 8), (1, 1)), 5, 4)


@settings(max_examples=200)
@given(
    prefill=st.tuples(st.integers(1, 6), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 3])),
    decode=st.tuples(st.integers(1, 6), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 3])),
    devices_per_node=st.sampled_from([4, 6, 8]),
)
def test_no_host_has_more_than_its_devices(
    prefill: tuple[int, ...], decode: tuple[int, ...], devices_per_node: int
) -> None:
    layout = on_hosts(pair(prefill, decode), 100, devices_per_node)
    taken: Counter[int] = Counter()
    for pool in layout.pools:
        workers = layout.worker_hosts[pool.role]
        assert len(workers) == pool.replicas
        for worker in workers:
            assert len(worker) == 1 or (len(worker) == pool.pipeline_parallel and len(set(worker)) > 1)
            taken.update(_devices(worker, pool.devices_per_worker))
    assert set(taken) == set(range(layout.num_hosts))
    assert max(taken.values()) <= devices_per_node
    assert taken.total() == layout.num_devices


def _devices(worker: Hosts, num_devices: int) -> Counter[int]:
    return Counter({host: count * num_devices // len(worker) for host, count in Counter(worker).items()})
