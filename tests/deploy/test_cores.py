"""The split of cores: disjoint, complete, by load."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.contracts.placement import WorkerRole
from pdserve.deploy.cores import split_cores

P, D, M = WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.MIXED


@pytest.mark.parametrize(
    ("num_cores", "roles", "worker_cores", "spare"),
    [
        (2, [P, D], ((0,), (1,)), ()),
        (3, [P, D], ((0,), (1,)), (2,)),
        (4, [P, D], ((0, 1), (2,)), (3,)),
        (4, [M], ((0, 1, 2),), (3,)),
        (1, [M], ((0,),), ()),
    ],
)
def test_small_machines(
    num_cores: int, roles: list[WorkerRole], worker_cores: tuple[tuple[int, ...], ...], spare: tuple[int, ...]
) -> None:
    split = split_cores(range(num_cores), roles)
    assert split.worker_cores == worker_cores
    assert split.spare_cores == spare


def test_with_more_workers_than_cores_nobody_is_pinned() -> None:
    split = split_cores([4, 6], [P, D, M])
    assert split.worker_cores == ((), (), ())
    assert split.spare_cores == ()


@given(st.integers(1, 96), st.lists(st.sampled_from(WorkerRole), min_size=1, max_size=12))
def test_every_core_has_one_owner(num_cores: int, roles: list[WorkerRole]) -> None:
    split = split_cores(range(num_cores), roles)
    assert len(split.worker_cores) == len(roles)
    assert all(split.worker_cores) == (num_cores >= len(roles))
    if num_cores >= len(roles):
        owned = [core for cores in split.worker_cores for core in cores] + list(split.spare_cores)
        assert owned == list(range(num_cores))


def test_prefill_gets_about_twice_what_decode_gets() -> None:
    split = split_cores(range(32), [P, D])
    prefill, decode = (len(cores) for cores in split.worker_cores)
    assert 1.8 < prefill / decode < 2.2
    assert len(split.spare_cores) == 4
