"""Changes to workers, one after another, and how they end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

import pytest

from pdserve.contracts.errors import DeployError
from pdserve.contracts.worker_config import WorkerRole
from pdserve.deploy.cluster.changes import Changes
from pdserve.deploy.cluster.supervised_process import ProcessState


@dataclass(eq=False)
class Worker:
    number: int
    state: ProcessState
    role: WorkerRole = WorkerRole.DECODE
    num_failures: int = 0
    failure: str = ""
    address: str = "a:1"
    drained: Future[bool] | None = None
    is_leaving: bool = False
    has_ended: bool = False

    @property
    def name(self) -> str:
        return f"decode-{self.number}"

    def drain(self, timeout_s: float) -> Future[bool]:
        self.drained = Future()
        return self.drained

    def end(self) -> None:
        self.has_ended = True


def worker(number: int, state: ProcessState) -> Any:
    return Worker(number, state)


class OneHost:
    """Has a worker, and no room for another."""

    def __init__(self) -> None:
        self.workers = [worker(0, ProcessState.UP)]

    def find_room(self, roles: Sequence[WorkerRole], leaving: Sequence[Any] = ()) -> None:
        pass

    def add_worker(self, role: WorkerRole) -> Any:
        self.workers.append(worker(1, ProcessState.STOPPED))
        return self.workers[1]


def scaling(fleet: OneHost, changed: Callable[[], None] = lambda: None) -> Any:
    return Changes(cast(Any, fleet), 1.0, changed).scale({WorkerRole.DECODE: 2})


def test_a_worker_that_finds_no_host_ends_the_change_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    fleet, told = OneHost(), list[list[str]]()
    change = scaling(fleet, lambda: told.append([each.name for each in fleet.workers]))
    assert next(change) == "decode-1 starts"
    assert next(change) == ""
    now_s[0] = 61.0
    with pytest.raises(DeployError, match="no host has had room for decode-1 for 60 s; add a host"):
        next(change)
    assert told == [["decode-0"]], "or its status goes on as that of one that is being restarted"


def test_no_more_workers_than_a_deployment_may_have_are_started() -> None:
    fleet = OneHost()
    with pytest.raises(DeployError, match="decode=65 is too many; have at most 64 workers of a role"):
        next(Changes(cast(Any, fleet), 1.0, lambda: None).scale({WorkerRole.DECODE: 65}))
    assert len(fleet.workers) == 1


def test_a_worker_that_comes_up_ends_the_change() -> None:
    fleet = OneHost()
    change = scaling(fleet)
    assert next(change) == "decode-1 starts"
    fleet.workers[1].state = ProcessState.STARTING
    assert next(change) == ""
    fleet.workers[1].state = ProcessState.UP
    assert list(change) == ["decode-1 is up at a:1"]


def test_a_worker_that_starts_when_the_cluster_ends_is_left_for_it_to_end() -> None:
    fleet = OneHost()
    change = scaling(fleet)
    assert next(change) == "decode-1 starts"
    fleet.workers[1].state = ProcessState.STARTING
    assert next(change) == ""
    change.close()
    assert [each.name for each in fleet.workers] == ["decode-0", "decode-1"]


def test_workers_that_leave_finish_their_requests_at_the_same_time() -> None:
    fleet = OneHost()
    fleet.workers = [worker(number, ProcessState.UP) for number in range(4)]
    _, first, second, third = workers = list(fleet.workers)
    change = Changes(cast(Any, fleet), 1.0, lambda: None).scale({WorkerRole.DECODE: 1})
    assert [next(change) for _ in range(4)] == [*(f"decode-{number} finishes its requests" for number in (1, 2, 3)), ""]
    second.drained.set_result(True)
    third.state = ProcessState.STOPPED  # it is lost
    assert next(change) == ""
    first.drained.set_result(True)
    assert list(change) == ["decode-1 has left", "decode-2 has left", "decode-3 has left"]
    assert [each.has_ended for each in workers] == [False, True, True, True]


def test_a_change_does_not_wait_for_what_another_takes_away() -> None:
    fleet = OneHost()
    changes = Changes(cast(Any, fleet), 1.0, lambda: None)
    growth = changes.scale({WorkerRole.DECODE: 2})
    assert [next(growth) for _ in range(2)] == ["decode-1 starts", ""]
    assert list(changes.scale({WorkerRole.DECODE: 1})) == ["decode-1 has left"]
    assert next(growth, "over") == "over"
    assert [each.name for each in fleet.workers] == ["decode-0"]


def test_a_worker_that_leaves_is_none_of_those_that_another_change_counts() -> None:
    fleet = OneHost()
    fleet.workers.append(worker(2, ProcessState.UP))
    changes = Changes(cast(Any, fleet), 1.0, lambda: None)
    decline = changes.scale({WorkerRole.DECODE: 1})
    assert [next(decline) for _ in range(2)] == ["decode-2 finishes its requests", ""]
    fleet.add_worker = lambda role: fleet.workers.append(worker(3, ProcessState.UP)) or fleet.workers[-1]  # type: ignore
    assert list(changes.scale({WorkerRole.DECODE: 2})) == ["decode-3 starts", "decode-3 is up at a:1"]
    fleet.workers[1].drained.set_result(True)
    assert list(decline) == ["decode-2 has left"]
    assert [each.name for each in fleet.workers] == ["decode-0", "decode-3"]
