"""Restarts after failures: at once at first, later with growing delays, and at once again after a stable time."""

from __future__ import annotations

from pdserve.deploy.cluster.supervised_process import STABLE_S, ProcessState, SupervisedProcess, restart_delay_s


class FakeProcess(SupervisedProcess):
    """Up at the second check; fails while ``error`` is set."""

    error: Exception | None = None
    num_starts = num_ends = 0

    @property
    def address(self) -> str:
        return ""

    def end(self) -> None:
        self.num_ends += 1

    def _start(self) -> None:
        self.num_starts += 1
        if isinstance(self.error, OSError):
            raise self.error

    def _check_starting(self, now_s: float) -> bool:
        self._check_up(now_s)
        return True

    def _check_up(self, now_s: float) -> None:
        if self.error is not None:
            raise self.error


def started(process: FakeProcess, now_s: float) -> FakeProcess:
    process.error = None
    while process.state is not ProcessState.UP:
        process.check(now_s)
    return process


def fail(process: FakeProcess, now_s: float) -> None:
    process.error = RuntimeError("it ended")
    process.check(now_s)
    assert process.state is ProcessState.STOPPED


def test_a_failure_ends_the_process_and_is_reported() -> None:
    process = started(FakeProcess("p"), 0.0)
    fail(process, 1.0)
    assert (process.failure, process.num_failures, process.num_ends) == ("it ended", 1, 1)
    started(process, 1.0)
    assert process.num_starts == 2


def test_a_start_without_room_for_a_log_is_a_failure() -> None:
    process = FakeProcess("p")
    process.error = OSError(28, "No space left on device")
    for now_s in (0.0, 1.0):
        process.check(now_s)
        assert process.state is ProcessState.STOPPED
    assert (process.failure, process.num_failures) == ("[Errno 28] No space left on device", 2)
    started(process, 60.0)


def test_failures_in_a_row_delay_the_next_start() -> None:
    process = started(FakeProcess("p"), 0.0)
    fail(process, 1.0)
    started(process, 1.0)
    fail(process, 1.0 + STABLE_S)
    process.check(1.3 + STABLE_S)
    assert process.state is ProcessState.STOPPED
    process.check(1.7 + STABLE_S)
    assert process.num_starts == 3


def test_rare_failures_are_never_delayed() -> None:
    process = FakeProcess("p")
    for hour in range(1, 9):
        started(process, 3600.0 * hour)
        fail(process, 3600.0 * hour + STABLE_S + 1)
        assert process.num_failures == 1


def test_delays_grow_to_a_limit_and_are_spread() -> None:
    delays = [restart_delay_s(count, 0.5) for count in range(1, 10)]
    assert delays[:4] == [0.0, 0.5, 1.0, 2.0]
    assert max(delays) == 15.0
    assert restart_delay_s(3, 0.0) < restart_delay_s(3, 0.99)
