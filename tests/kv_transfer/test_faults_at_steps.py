"""Faults at every step of a handoff: killed, stopped and woken transfer processes.

The process that a test breaks has one handoff at each step, so that one signal hits every step.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest

from pdserve.contracts.kv_layout import KvLayout
from pdserve.kv_transfer import transfer_client
from pdserve.proto.v1 import transfer_pb2
from tests.kv_transfer.peer import EVENT_GRACE_S, Peer, running_peer
from tests.patience import HANG_S

LAYOUT = KvLayout(
    num_blocks=64, num_kv_heads=2, num_layers=4, block_size=64, head_dim=256, dtype="float32", model_hash="model"
)
STEPS = ("offered", "opened", "granted", "copied", "copying", "done")
"""Last thing that happened; a handoff that is "copied" has been verified and is not yet reported."""
NUM_BLOCKS = {step: 40 if step == "copying" else 2 for step in STEPS}
"""1 MiB each."""
VERIFIED_S = 1.0
"""Time for which a pull stays "copied"."""


class Handoff:
    """A prompt on its way from ``source`` to ``target``, into blocks of the same ids."""

    def __init__(self, source: Peer, target: Peer, step: str) -> None:
        self.source = source
        self.target = target
        self.step = step
        self.handle = source.offer()
        first_id = sum(NUM_BLOCKS[earlier] for earlier in STEPS[: STEPS.index(step)])
        self.block_ids = range(first_id, first_id + NUM_BLOCKS[step])
        self.content = [source.block(block_id) for block_id in self.block_ids]
        self._num_granted = 0

    @property
    def pull_id(self) -> int:
        return STEPS.index(self.step)

    def grant(self, num_blocks: int) -> None:
        """Grant blocks; with the last one, token 0."""
        first_index, self._num_granted = self._num_granted, self._num_granted + num_blocks
        self.source.grant(
            self.handle,
            self.block_ids[first_index : self._num_granted],
            first_index=first_index,
            final=self._num_granted == len(self.block_ids),
        )

    def grant_rest(self) -> None:
        if self._num_granted < len(self.block_ids):
            self.grant(len(self.block_ids) - self._num_granted)

    def pull(self, target: Peer) -> None:
        duration_s = VERIFIED_S if self.step == "copied" and target is self.target else 0.0
        address = self.source.process.address
        target.pull(address, self.handle, self.block_ids, pull_id=self.pull_id, min_duration_s=duration_s)

    def begin(self) -> None:
        """Bring it to its step, except that what the processes do by themselves takes its time."""
        if self.step == "granted":
            self.grant(1)
        elif self.step != "opened":
            self.grant_rest()
        if self.step != "offered":
            self.pull(self.target)

    def has_arrived(self, target: Peer) -> bool:
        return [target.block(block_id) for block_id in self.block_ids] == self.content


@contextmanager
def _running(*transports: str) -> Iterator[list[Peer]]:
    """A source, and a target for each transport."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(running_peer(layout=LAYOUT, transport=transport, seed=seed))
            for seed, transport in enumerate(("auto", *transports))
        ]


def _at_every_step(source: Peer, target: Peer, dones: dict[int, transfer_pb2.PullDone]) -> list[Handoff]:
    """Return a handoff at each step. One has just been done, probably while the one of many blocks was copied.

    Args:
        dones: receives the ends of pulls.
    """
    handoffs = {step: Handoff(source, target, step) for step in STEPS}
    for step in ("offered", "opened", "granted", "copied"):
        handoffs[step].begin()
    for step, num_blocks in (("granted", 1), ("copied", 2)):
        for block_id, content in list(zip(handoffs[step].block_ids, handoffs[step].content, strict=True))[:num_blocks]:
            target.wait_for_block(block_id, content)
    handoffs["copying"].begin()
    handoffs["done"].begin()
    _wait_for_dones(target, dones, handoffs["done"].pull_id)
    target.wait_for_block(handoffs["copying"].block_ids[0], handoffs["copying"].content[0])
    return list(handoffs.values())


def _wait_for_dones(target: Peer, dones: dict[int, transfer_pb2.PullDone], *pull_ids: int) -> None:
    """Wait for the ends of pulls, each of which comes once."""
    while not dones.keys() >= set(pull_ids):
        done = target.expect("pull_done").pull_done
        assert done.pull_id not in dones
        dones[done.pull_id] = done


def _lease_ends(source: Peer, handoffs: Sequence[Handoff]) -> dict[bytes, str]:
    """Wait until the leases of ``handoffs`` have ended; returns the message that said so, by handle."""
    ends: dict[bytes, str] = {}
    opened: set[bytes] = set()
    while len(ends) < len(handoffs):
        message = source.messages.get(timeout=HANG_S)
        assert message is not None, "the transfer process died"
        body = message.WhichOneof("body")
        assert body is not None
        handle: bytes = getattr(message, body).handle
        if body == "lease_opened":
            assert handle not in opened
            opened.add(handle)
        else:
            assert handle in opened - ends.keys()
            ends[handle] = body
    assert ends.keys() == {handoff.handle for handoff in handoffs}
    return ends


def _wait_for_death(peer: Peer) -> None:
    while peer.messages.get(timeout=HANG_S) is not None:
        pass


def _check_nothing_is_written(target: Peer) -> None:
    target.memory.blocks[:] = nothing = bytes(LAYOUT.pool_bytes)
    time.sleep(EVENT_GRACE_S)
    assert target.memory.blocks.tobytes() == nothing, "a block was written"
    assert target.messages.empty()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_the_source_dies(number: signal.Signals) -> None:
    """One that stops is killed by its engine."""
    with _running("memfd", "tcp") as (source, *targets):
        ended: list[dict[int, transfer_pb2.PullDone]] = [{}, {}]
        handoffs = [_at_every_step(source, target, dones) for target, dones in zip(targets, ended, strict=True)]
        os.kill(source.process.pid, number)
        _wait_for_death(source)
        for target, dones, of_target in zip(targets, ended, handoffs, strict=True):
            of_target[0].pull(target)
            _wait_for_dones(target, dones, *range(len(STEPS)))
            stages = {handoff.step: dones[handoff.pull_id].failure_stage for handoff in of_target}
            assert stages["offered"] == "connect"
            assert stages["opened"] in {"connect", "grant"}
            assert stages["granted"] == "grant"
            assert stages["copying"] in {"", "copy"}
            assert stages["copied"] == stages["done"] == ""
            assert all(handoff.has_arrived(target) for handoff in of_target if not stages[handoff.step])
            _check_nothing_is_written(target)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_the_puller_dies(number: signal.Signals) -> None:
    """Another one gets every prompt that was not released."""
    with _running("memfd", "tcp", "auto") as (source, *pullers, heir):
        handoffs: list[Handoff] = []
        for puller in pullers:
            handoffs += _at_every_step(source, puller, {})
            os.kill(puller.process.pid, number)
        ends = _lease_ends(source, [handoff for handoff in handoffs if handoff.step != "offered"])
        for puller in pullers:
            _wait_for_death(puller)
        for handoff in handoffs:
            assert handoff.step in {"copying", "copied", "done"} or ends.get(handoff.handle) != "released"
            handoff.grant_rest()
            handoff.pull(heir)
            done = heir.expect("pull_done").pull_done
            if ends.get(handoff.handle) == "released":
                assert done.failure_stage == "refused"
            else:
                assert done.failure_stage == ""
                assert handoff.has_arrived(heir)
                assert _lease_ends(source, [handoff]) == {handoff.handle: "released"}
        assert source.messages.empty()


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process is not taken for one that hangs."""
    monkeypatch.setattr(transfer_client, "SILENCE_S", 60.0)


@pytest.mark.usefixtures("patience")
def test_the_source_wakes() -> None:
    """Pulls that were aborted meanwhile have lost their leases, and may come again."""
    with _running("memfd", "tcp") as (source, *targets):
        ended: list[dict[int, transfer_pb2.PullDone]] = [{}, {}]
        handoffs = [_at_every_step(source, target, dones) for target, dones in zip(targets, ended, strict=True)]
        os.kill(source.process.pid, signal.SIGSTOP)
        for target, of_target in zip(targets, handoffs, strict=True):
            of_target[0].pull(target)
            for pull_id in range(len(STEPS)):
                target.abort(pull_id)
        for target, dones, of_target in zip(targets, ended, handoffs, strict=True):
            _wait_for_dones(target, dones, *range(len(STEPS)))
            assert {dones[handoff.pull_id].failure_stage for handoff in of_target} <= {"", "aborted"}
            _check_nothing_is_written(target)
        os.kill(source.process.pid, signal.SIGCONT)
        pulled = [handoff for of_target in handoffs for handoff in of_target]
        again = [handoff for handoff in pulled if ended[targets.index(handoff.target)][handoff.pull_id].failure_stage]
        for handoff in again:
            handoff.grant_rest()
            handoff.pull(handoff.target)
            done = handoff.target.expect("pull_done").pull_done
            assert done.failure_stage == ""
            assert handoff.has_arrived(handoff.target)
        assert {handoff.step for handoff in again} >= {"offered", "opened", "granted"}


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("transport", ["memfd", "tcp"])
def test_the_puller_wakes(transport: str) -> None:
    """Its prompts were withdrawn meanwhile, and their blocks have a new owner: what it reports as done was copied
    before."""
    with _running(transport) as (source, target):
        dones: dict[int, transfer_pb2.PullDone] = {}
        handoffs = _at_every_step(source, target, dones)
        os.kill(target.process.pid, signal.SIGSTOP)
        for handoff in handoffs:
            source.withdraw(handoff.handle)
        for block_id in range(LAYOUT.num_blocks):
            source.memory.generations[block_id] += 1
        source.memory.blocks[:] = bytes(LAYOUT.pool_bytes)
        os.kill(target.process.pid, signal.SIGCONT)
        handoffs[0].pull(target)
        _wait_for_dones(target, dones, *range(len(STEPS)))
        stages = {handoff.step: dones[handoff.pull_id].failure_stage for handoff in handoffs}
        assert stages["offered"] == "refused"
        assert stages["opened"] in {"aborted", "refused"}
        assert stages["granted"] == "aborted"
        assert stages["copying"] in {"", "copy", "verify", "aborted"}
        assert stages["copied"] == stages["done"] == ""
        assert all(handoff.has_arrived(target) for handoff in handoffs if not stages[handoff.step])
