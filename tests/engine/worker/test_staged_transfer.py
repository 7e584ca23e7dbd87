"""Order of copies, orders and messages, with a transfer process and a staging area that record their calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

import pytest

from pdserve.engine.worker.staged_transfer import StagedTransfer
from pdserve.kv_transfer.transfer_client import TransferProcess
from pdserve.proto.v1 import kv_pb2, transfer_pb2
from tests.patience import HANG_S
from tests.workers import wait_until

if TYPE_CHECKING:
    from pdserve.kv_transfer.group_copies import GroupCopies
    from pdserve.kv_transfer.host_staging import HostStaging

HANDLE = bytes(16)


class Rig:
    """A staged transfer with its collaborators. Doubles as the staging area and the process's end of the pipe."""

    address = "127.0.0.1:1"

    def __init__(self) -> None:
        self.log: list[object] = []
        """Copies, sent orders and received messages, in order."""
        self.may_copy = threading.Event()
        self.may_copy.set()
        self.error: Exception | None = None
        self.failures: list[str] = []
        self.say: Callable[[transfer_pb2.TransferToEngine], None]
        self.transfer = StagedTransfer(
            cast("HostStaging", self), self._start, self._tell, lambda: self.failures.append("copy")
        )

    def _start(self, on_message: Callable[[transfer_pb2.TransferToEngine], None]) -> TransferProcess:
        self.say = on_message
        return cast(TransferProcess, self)

    def _tell(self, message: transfer_pb2.TransferToEngine) -> None:
        self.log.append(message.WhichOneof("body"))

    def send(self, message: transfer_pb2.EngineToTransfer) -> None:
        self.log.append(message.WhichOneof("body"))

    def close(self) -> None:
        self.log.append("closed")

    def copy_d2h(self, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        self._copy("D2H", [*zip(block_ids, generations, strict=True)])

    def copy_h2d(self, block_ids: Sequence[int]) -> None:
        self._copy("H2D", [*block_ids])

    def release(self, block_ids: Sequence[int]) -> None:
        self.log.append(("released", [*block_ids]))

    def _copy(self, direction: str, blocks: list[object]) -> None:
        self.log.append((f"{direction} begins", blocks))
        assert self.may_copy.wait(HANG_S)
        if self.error is not None:
            raise self.error
        self.log.append(f"{direction} ends")

    def wait_for(self, *log: object) -> None:
        wait_until(lambda: self.log == [*log], f"{log}, only {self.log}")


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.may_copy.set()
    rig.transfer.close()


def order(**body: object) -> transfer_pb2.EngineToTransfer:
    return transfer_pb2.EngineToTransfer(**body)  # type: ignore[arg-type]


def a_grant() -> transfer_pb2.EngineToTransfer:
    grant = kv_pb2.Grant(block_ids=[3, 5], generations=[7, 9])
    return order(grant=transfer_pb2.OfferedGrant(handle=HANDLE, grant=grant))


def a_pull(pull_id: int = 1) -> transfer_pb2.EngineToTransfer:
    return order(start_pull=transfer_pb2.StartPull(pull_id=pull_id, block_ids=[2, 4]))


def done(pull_id: int = 1, **fields: object) -> transfer_pb2.TransferToEngine:
    return transfer_pb2.TransferToEngine(pull_done=transfer_pb2.PullDone(pull_id=pull_id, **fields))  # type: ignore[arg-type]


def test_a_grant_leaves_after_its_blocks_are_copied_and_nothing_overtakes_it(rig: Rig) -> None:
    rig.may_copy.clear()
    rig.transfer.send(order(offer=transfer_pb2.Offer(handle=HANDLE)))
    rig.transfer.send(a_grant())
    rig.transfer.send(order(withdraw=transfer_pb2.Withdraw(handle=HANDLE)))
    rig.transfer.send(a_pull())
    begun = "offer", ("D2H begins", [(3, 7), (5, 9)])
    rig.wait_for(*begun)
    rig.may_copy.set()
    rig.wait_for(*begun, "D2H ends", "grant", "withdraw", "start_pull")


def test_an_offer_waits_for_nothing(rig: Rig) -> None:
    """Its puller may already be on its way."""
    rig.may_copy.clear()
    rig.transfer.send(a_grant())
    begun = ("D2H begins", [(3, 7), (5, 9)])
    rig.wait_for(begun)
    rig.transfer.send(order(offer=transfer_pb2.Offer(handle=HANDLE)))
    rig.wait_for(begun, "offer")


class Links:
    """Doubles as the copies between devices: generations of a pool, and orders for links."""

    generations = (7,) * 8

    def __init__(self) -> None:
        self.orders: list[transfer_pb2.LinkOrder] = []

    def start(self, send: object) -> None:
        pass

    def handle(self, order: transfer_pb2.LinkOrder) -> None:
        self.orders.append(order)

    def close(self) -> None:
        pass


def test_with_links_blocks_are_staged_on_demand_unless_they_have_new_owners() -> None:
    rig = Rig()
    links = Links()
    rig.transfer = StagedTransfer(
        cast("HostStaging", rig), rig._start, rig._tell, lambda: None, cast("GroupCopies", links)
    )
    rig.transfer.send(a_grant())
    rig.wait_for("grant")
    rig.say(transfer_pb2.TransferToEngine(stage=transfer_pb2.Stage(stage_id=1, block_ids=[3, 5], generations=[7, 9])))
    staged = "grant", ("D2H begins", [(3, 7)]), "D2H ends", "staged"
    rig.wait_for(*staged)
    order = transfer_pb2.LinkOrder(link_id=2, open=transfer_pb2.OpenLink())
    rig.say(transfer_pb2.TransferToEngine(link_order=order))
    rig.transfer.send(a_pull())
    rig.wait_for(*staged, "start_pull")
    rig.say(done(transport="nccl"))
    rig.wait_for(*staged, "start_pull", "pull_done")
    assert links.orders == [order]
    rig.transfer.close()


def test_a_pull_is_told_after_its_blocks_are_copied(rig: Rig) -> None:
    rig.may_copy.clear()
    rig.transfer.send(a_pull())
    rig.wait_for("start_pull")
    rig.say(done(seconds=0.5))
    rig.say(transfer_pb2.TransferToEngine(lease_lost=transfer_pb2.LeaseLost(handle=HANDLE)))
    begun = "start_pull", ("H2D begins", [2, 4])
    rig.wait_for(*begun)
    rig.may_copy.set()
    rig.wait_for(*begun, "H2D ends", ("released", [2, 4]), "pull_done", "lease_lost")


def test_the_seconds_of_a_pull_include_its_copy() -> None:
    told: list[transfer_pb2.TransferToEngine] = []
    rig = Rig()
    rig.transfer = StagedTransfer(cast("HostStaging", rig), rig._start, told.append, lambda: None)
    rig.may_copy.clear()
    rig.transfer.send(a_pull())
    rig.say(done(seconds=100.0))
    wait_until(lambda: ("H2D begins", [2, 4]) in rig.log, "the copy")
    rig.may_copy.set()
    wait_until(lambda: bool(told), "the message")
    assert told[0].pull_done.seconds > 100
    rig.transfer.close()


def test_of_a_failed_pull_nothing_is_copied(rig: Rig) -> None:
    rig.transfer.send(a_pull())
    rig.wait_for("start_pull")
    rig.say(done(failure_stage="aborted"))
    rig.wait_for("start_pull", ("released", [2, 4]), "pull_done")


def test_pulls_side_by_side_have_blocks_of_their_own(rig: Rig) -> None:
    rig.transfer.send(a_pull(1))
    rig.transfer.send(order(start_pull=transfer_pb2.StartPull(pull_id=2, block_ids=[6])))
    rig.wait_for("start_pull", "start_pull")
    rig.say(done(2))
    rig.say(done(1))
    first = ("H2D begins", [6]), "H2D ends", ("released", [6]), "pull_done"
    second = ("H2D begins", [2, 4]), "H2D ends", ("released", [2, 4]), "pull_done"
    rig.wait_for("start_pull", "start_pull", *first, *second)


@pytest.mark.parametrize("direction", ["copy_d2h", "copy_h2d"])
def test_a_copy_that_fails_is_told(rig: Rig, direction: str) -> None:
    rig.error = RuntimeError("no such device")
    rig.transfer.send(a_grant() if direction == "copy_d2h" else a_pull())
    if direction == "copy_h2d":
        rig.say(done())
    wait_until(lambda: rig.failures == ["copy"], "the failure")
    assert "grant" not in rig.log
    assert "pull_done" not in rig.log


def test_what_waits_at_the_end_is_dropped(rig: Rig) -> None:
    rig.may_copy.clear()
    rig.transfer.send(a_grant())
    rig.transfer.send(a_grant())
    rig.wait_for(("D2H begins", [(3, 7), (5, 9)]))
    closing = threading.Thread(target=rig.transfer.close)
    closing.start()
    wait_until(lambda: rig.transfer._orders._work_queue.qsize() <= 1, "an empty queue")
    rig.may_copy.set()
    closing.join(HANG_S)
    assert rig.log[1:] == ["D2H ends", "grant", "closed"]
    assert rig.failures == []
