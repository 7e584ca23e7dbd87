"""Commands through the control socket, against a supervisor that turns in a thread."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pdserve.contracts.errors import DeployError
from pdserve.deploy.cluster.control import ControlPort, send_command


def begin(command: dict[str, Any]) -> Iterator[str]:
    if "refused" in command:
        raise DeployError("not this")
    yield "begins"
    for _ in range(command.get("waits", 0)):
        yield ""
    if "breaks" in command:
        raise TypeError("a number")
    if "fails" in command:
        raise DeployError("it failed")
    yield "ends"


class TooManyFiles:
    def accept(self) -> None:
        raise OSError(errno.EMFILE, "Too many open files")


@contextmanager
def turning(folder: Path) -> Iterator[list[str]]:
    """What the supervisor's end said."""
    port, is_over, said = ControlPort(folder), threading.Event(), []

    def turn() -> None:
        try:
            while not is_over.wait(0.002):
                if text := port.turn(begin):
                    said.append(text)
        finally:
            port.close()

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        yield said
    finally:
        is_over.set()
        thread.join()


def test_what_a_change_says_comes_back(tmp_path: Path) -> None:
    with turning(tmp_path) as said:
        assert list(send_command(tmp_path, {"waits": 5})) == ["begins", "ends"]
        assert said == ["begins", "ends"]


@pytest.mark.parametrize(
    ("command", "shown", "error"),
    [
        ({"refused": 1}, [], "not this"),
        ({"fails": 1}, ["begins"], "it failed"),
        ({"breaks": 1}, ["begins"], "it failed: TypeError: a number"),
    ],
)
def test_errors_come_back(command: dict[str, Any], shown: list[str], error: str, tmp_path: Path) -> None:
    found: list[str] = []
    with turning(tmp_path) as said, pytest.raises(DeployError, match=error):
        found.extend(send_command(tmp_path, command))
    assert found == shown
    assert said == [*shown, error], "the cluster's log has it, too: the client may have left"


def test_commands_follow_each_other_and_outlive_their_client(tmp_path: Path) -> None:
    with turning(tmp_path) as said:
        first = send_command(tmp_path, {"waits": 50})
        assert next(first) == "begins"
        first.close()  # type: ignore[attr-defined]
        waits, *rest = send_command(tmp_path, {})
        assert waits == "another change is in progress; this one begins after it"
        assert rest == ["begins", "ends"]
        assert said == ["begins", "ends"] * 2


def test_a_command_that_makes_no_sense_ends_nothing(tmp_path: Path) -> None:
    with turning(tmp_path):
        with pytest.raises(DeployError, match="it failed: AttributeError: "):
            list(send_command(tmp_path, [1]))  # type: ignore[arg-type]
        assert list(send_command(tmp_path, {})) == ["begins", "ends"]


def test_a_client_that_cannot_be_accepted_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = ControlPort(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(port, "_listener", TooManyFiles())
        assert port.turn(begin) == ""
    port.close()


def test_an_ended_cluster_is_named(tmp_path: Path) -> None:
    with pytest.raises(DeployError, match="the cluster has ended"):
        list(send_command(tmp_path, {}))
    with turning(tmp_path):
        waiting = send_command(tmp_path, {"waits": 10**9})
        assert next(waiting) == "begins"
    with pytest.raises(DeployError, match="the cluster ends"):
        next(waiting)


def test_changes_that_nobody_sent_go_on_side_by_side_and_commands_wait_for_all(tmp_path: Path) -> None:
    port = ControlPort(tmp_path)
    were_busy = []

    def turns(number: int) -> list[str]:
        said = [port.turn(begin) for _ in range(number)]
        were_busy.append(port.is_busy)
        return said

    try:
        port.begin(begin({"waits": 2}))
        port.begin(begin({"fails": 1}))
        assert turns(4) == ["begins", "begins", "", "it failed"]
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(tmp_path / "control"))
            client.sendall(b"{}\n")
            assert turns(3) == ["", "ends", ""]
            assert turns(3) == ["begins", "ends", ""]
        assert were_busy == [False, True, False]
    finally:
        port.close()
