"""A request that ends every worker which computes it, among others that do not, under a virtual clock: by the ids of
what lost workers computed, and through the dispatcher."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.contracts.events import RequestEvent, RequestEventKind, RequestKey, SchedulerLoad, TokenEvent
from pdserve.contracts.request import FinishReason, GenerationRequest, KvSource, Outcome, SamplingParams
from pdserve.contracts.worker_config import WorkerRole
from pdserve.router.requests.blame import (
    MAX_LOSSES,
    MAX_TRIAL_TOKENS,
    MAX_TRIALS,
    MIN_TRIAL_TOKENS,
    TRIAL_WAIT_S,
    Blame,
)
from pdserve.router.requests.failover import MAX_ATTEMPTS, MAX_EXCUSED, MAX_NAMED
from pdserve.router.requests.request import RequestSpec
from pdserve.router.requests.settings import DispatchSettings
from tests.router.requests.test_dispatch_core import HANDLE, Clock, DrainedDispatcher, ReadRequest, RecordingWorker
from tests.router.rig import COST

TURN_S = 0.05
NUM_TOKENS = 6
POISON = 13
"""First token of the prompt that ends workers."""


def suspected(num: int) -> Blame:
    """After suspects 1 to ``num`` lost two workers at 0 s."""
    blame = Blame()
    for process in range(MAX_LOSSES):
        assert blame.worker_lost(process, dict.fromkeys(range(1, num + 1), 0), 0.0) is None
    return blame


def may_run(blame: Blame, now_s: float, ids: Iterable[int]) -> list[int]:
    return [each for each in ids if not blame.has_to_wait(each, now_s)]


def most_losses(num: int) -> int:
    """Workers that a request ends at most until it fails, among ``num``."""
    return MAX_LOSSES + MAX_TRIALS + math.ceil(math.log2(num))


@given(
    seed=st.integers(0, 2**32),
    num_workers=st.integers(1, 4),
    num_innocents=st.integers(0, 40),
    poisoned_indices=st.lists(st.integers(0, 30), max_size=2),
    ends_in_trials=st.booleans(),
)
def test_every_poison_fails_and_nothing_else_does(
    seed: int, num_workers: int, num_innocents: int, poisoned_indices: list[int], *, ends_in_trials: bool
) -> None:
    """Requests begin at any time and run on any worker in each step; workers also end by themselves, in trials if
    ``ends_in_trials``. Only then do innocents fail, or if new poisons end both trials of one."""
    chance, blame, epochs = random.Random(seed), Blame(), itertools.count()
    poisons = dict(enumerate(poisoned_indices))
    waiting = list(range(len(poisons) + num_innocents))
    most = most_losses(max(1, len(waiting)))
    chance.shuffle(waiting)
    num_tokens, num_new_tokens, num_ended = Counter[int](), Counter[int](), Counter[int]()
    running, failed, has_others, now_s = set[int](), set[int](), len(poisons) > 1, 0.0
    while waiting or running:
        now_s += TRIAL_WAIT_S / 2
        while waiting and chance.random() < 0.3:
            running.add(waiting.pop())
        batches: list[list[int]] = [[] for _ in range(num_workers)]
        for request in may_run(blame, now_s, running):
            chance.choice(batches).append(request)
        for batch in batches:
            culprits = [request for request in batch if num_tokens[request] == poisons.get(request)]
            is_quiet = ends_in_trials or not any(map(blame.is_held, batch))
            if culprits or (is_quiet and chance.random() < 0.02):
                num_ended.update(culprits)
                has_others |= not culprits
                assert max(num_ended.values(), default=0) <= most + MAX_TRIALS * has_others
                lost = {request: num_new_tokens[request] for request in batch}
                num_new_tokens -= Counter(lost)
                culprit = blame.worker_lost(next(epochs), lost, now_s)
                if culprit is not None:
                    failed.add(culprit)
                    running.remove(culprit)
                    blame.forget(culprit)
                continue
            for request in batch:
                num_tokens[request] += 1
                num_new_tokens[request] += 1
                blame.token_received(request, num_new_tokens[request])
                if num_tokens[request] == 40:
                    running.remove(request)
                    blame.forget(request)
    assert poisons.keys() <= failed
    assert ends_in_trials or len(failed - poisons.keys()) <= (len(poisons) == 2)
    assert blame._groups == [{}]
    assert not blame._bystanders
    assert not blame._losses


def test_innocents_are_tried_at_once() -> None:
    blame, suspects = suspected(64), range(1, 65)
    assert not may_run(blame, TRIAL_WAIT_S / 2, suspects)
    assert may_run(blame, TRIAL_WAIT_S, suspects) == list(suspects)
    for suspect in suspects:
        blame.token_received(suspect, 4)
    assert not any(map(blame.is_held, suspects))


@pytest.mark.parametrize("poison", range(1, 14))
def test_a_suspect_is_found_by_halves(poison: int) -> None:
    """All are computed by one worker; innocents pass if it does not end before."""
    blame, now_s = suspected(13), 0.0
    for _ in range(1 + math.ceil(math.log2(13))):
        now_s += TRIAL_WAIT_S
        while poison not in (group := list(blame.on_trial)):
            for innocent in group:
                blame.token_received(innocent, MAX_TRIAL_TOKENS)
        if culprit := blame.worker_lost(f"at {now_s} s", dict.fromkeys(group, 3), now_s):
            break
        assert len(blame.on_trial) <= math.ceil(len(group) / 2)
    assert culprit == poison


def test_suspects_that_the_lost_worker_did_not_compute_go_on_and_the_halves_follow_them() -> None:
    blame, suspects = suspected(6), [1, 2, 3, 5, 6, 7, 8]
    assert blame.worker_lost("in the trial", {1: 0, 2: 0, 3: 0}, 1.0) is None
    assert blame.worker_lost("with it", {4: 0}, 1.0 + TRIAL_WAIT_S / 2) == 4, "it was alone"
    blame.forget(4)
    for process in range(MAX_LOSSES):
        assert blame.worker_lost(f"apart {process}", {7: 0, 8: 0}, 1.0) is None
    assert may_run(blame, 9.0, suspects) == [5, 6]
    assert blame.token_received(5, 4) == []
    assert blame.token_received(6, 4) == [1, 3]
    assert may_run(blame, 9.0, suspects) == [1, 3, 5, 6]
    assert blame.forget(1) == []
    assert blame.token_received(3, 16) == [2]
    assert blame.token_received(2, 16) == [7, 8]


def test_the_only_suspect_fails_at_once_if_it_was_alone() -> None:
    assert suspected(2).worker_lost("in a trial", {1: 0}, 1.0) == 1


@pytest.mark.parametrize("is_part", [True, False])
def test_the_only_suspect_is_tried_again_if_it_was_not_alone(is_part: bool) -> None:
    blame = suspected(2)
    blame.worker_lost("in the trial of both", {1: 0, 2: 0}, 0.0)
    others = {} if is_part else {3: 0}
    assert not blame.has_to_wait(3, 0.0)
    assert blame.worker_lost("in a trial", {1: 0, **others}, 1.0, is_part=is_part) is None
    assert blame.has_to_wait(1, 1.0 + TRIAL_WAIT_S / 2)
    assert not blame.has_to_wait(1, 1.0 + TRIAL_WAIT_S)
    assert blame.worker_lost("in the second trial", {4: 0, 1: 0}, 3.0) == 1


def test_a_suspect_beside_others_in_micro_batches_was_not_the_only_one() -> None:
    blame = suspected(4)
    for process in ("of four", "of two"):
        for suspect in list(blame.on_trial):
            assert blame.worker_lost(process, {suspect: 0}, 0.0, is_part=True) is None
    assert blame.worker_lost("of one", {1: 0}, 1.0, is_part=True) is None
    assert blame.worker_lost("of it again", {1: 0}, 2.0, is_part=True) == 1


def siblings(num: int) -> Blame:
    """After choices 1 to ``num`` of a request lost two workers, and choice 0 one that computed them, too."""
    blame, owners = Blame(), dict.fromkeys(range(num + 1), "a request")
    for process, first in enumerate((0, 1)):
        assert blame.worker_lost(process, dict.fromkeys(range(first, num + 1), 0), 0.0, owners=owners) is None
    return blame


def test_the_first_suspect_of_a_request_is_tried_before_the_other_choices() -> None:
    blame = siblings(64)
    assert may_run(blame, TRIAL_WAIT_S, range(65)) == [0, 1]
    assert all(map(blame.is_held, range(1, 65)))
    assert blame.token_received(1, 3) == []
    assert blame.token_received(1, 4) == list(range(2, 65))
    assert may_run(blame, TRIAL_WAIT_S, range(2, 65)) == list(range(2, 65))
    assert siblings(3).forget(1) == [2, 3]


@pytest.mark.parametrize("others", [{}, {5: 0}])
@pytest.mark.parametrize("choices", [[0, 1], [2, 3]])
def test_choices_of_one_request_are_one_suspect_and_no_excuse(choices: list[int], others: dict[int, int]) -> None:
    blame = siblings(3)
    assert blame.worker_lost("of choice 0", {0: 16}, 1.0) is None, "as if it had been apart"
    if 1 not in choices:
        blame.token_received(1, 4)
    if others:
        assert blame.worker_lost("in a trial", dict.fromkeys([*choices, 5], 0), 1.0) is None
    assert blame.worker_lost("in the last trial", dict.fromkeys([*choices, 6][: 2 + len(others)], 0), 2.0) in choices


@pytest.mark.parametrize("num_ended", [1, MAX_TRIALS + 1])
@pytest.mark.parametrize("others", [{}, {3: 0}])
def test_the_end_of_workers_that_computed_no_suspect_is_an_excuse(others: dict[int, int], num_ended: int) -> None:
    blame = suspected(1)
    for number in range(num_ended):
        blame.worker_lost(f"apart {number}", {}, 0.5)
    blame.worker_lost("part", {}, 0.5, is_part=True)
    for number in range(MAX_TRIALS - (not others) + min(MAX_TRIALS, num_ended) - 1):
        assert blame.worker_lost(f"in a trial {number}", {1: 0, **others}, 1.0) is None
    assert blame.worker_lost("in the last trial", {1: 0, **others}, 1.0) == 1


@pytest.mark.parametrize("is_poison", [True, False])
def test_what_lost_its_first_worker_in_a_trial_waits_until_its_suspects_are_tried(is_poison: bool) -> None:
    blame, bystanders = suspected(2), range(3, 259)
    assert blame.worker_lost("in a trial", dict.fromkeys([1, 2, *bystanders], 0), 1.0) is None
    assert may_run(blame, 10.0, [1, 2, *bystanders]) == [1]
    assert blame.token_received(1, 16) == [2]
    assert may_run(blame, 10.0, [2, *bystanders]) == [2]
    if is_poison:
        assert blame.worker_lost("in the trial of a half", {2: 0}, 10.0) == 2
    released = blame.forget(2) if is_poison else blame.token_received(2, 16)
    assert sorted(released) == may_run(blame, 10.0, bystanders) == list(bystanders)
    assert not any(map(blame.is_held, bystanders))


def test_what_got_on_beside_a_trial_does_not_wait_for_its_end() -> None:
    blame = suspected(2)
    computed = {1: 0, 2: 0, 3: MIN_TRIAL_TOKENS, 4: MIN_TRIAL_TOKENS - 1}
    assert blame.worker_lost("in a trial", computed, 1.0) is None
    assert may_run(blame, 1.0, [3, 4]) == [3]


def test_what_another_micro_batch_computed_beside_a_trial_waits_for_its_end() -> None:
    blame = suspected(2)
    for request in (1, 3):
        assert blame.worker_lost("a worker", {request: 0}, 1.0, is_part=True) is None
    assert blame.has_to_wait(3, 10.0)
    assert blame.token_received(2, 4) == [1]
    assert blame.token_received(1, 16) == [3]
    blame.worker_lost("a worker", {4: 0}, 20.0, is_part=True)
    assert not blame.has_to_wait(4, 20.0), "the trial is over: only the session was lost again"


def test_a_trial_after_the_second_loss_is_longer() -> None:
    blame = suspected(1)
    for process, num_tokens in enumerate((MIN_TRIAL_TOKENS, MAX_TRIAL_TOKENS, MAX_TRIAL_TOKENS)):
        blame.token_received(1, num_tokens - 1)
        assert blame.is_held(1)
        blame.token_received(1, num_tokens)
        assert not blame.is_held(1)
        blame.worker_lost(f"apart {process}", {1: 0}, 0.0)


def test_tokens_since_the_loss_before_pass_as_those_of_a_trial() -> None:
    blame = Blame()
    blame.worker_lost(1, {1: 0, 2: 0}, 0.0)
    blame.worker_lost(2, {1: 4, 2: 3}, 10.0)
    assert [blame.is_held(each) for each in (1, 2)] == [False, True]
    blame.token_received(2, 4)
    assert not blame.is_held(2)
    blame.worker_lost(3, {1: 16, 2: 15}, 20.0)
    assert [blame.is_held(each) for each in (1, 2)] == [False, True]


def test_a_suspect_that_ends_another_worker_stays_one_until_it_passes() -> None:
    blame = suspected(1)
    assert blame.worker_lost("in a trial", {1: MIN_TRIAL_TOKENS - 1, 2: 0}, 1.0) is None
    assert blame.is_held(1)
    blame.token_received(1, MAX_TRIAL_TOKENS)
    blame.worker_lost("apart", {1: 0}, 2.0)
    assert blame.worker_lost("in the next trial", {1: 0, 3: 0}, 3.0) is None


class World:
    """Workers that compute one token of everything they hold in each turn, until a poisoned step ends one of them."""

    def __init__(self, names: tuple[str, ...], *, poisoned_index: int, num_tokens: int = NUM_TOKENS) -> None:
        """``poisoned_index``: the token that cannot be computed."""
        self.clock = Clock()
        self.clock.now_s = 1.0
        settings = DispatchSettings(max_in_flight=1000)
        self.dispatcher = DrainedDispatcher(dict.fromkeys(WorkerRole, COST), settings, lambda: self.clock.now_s)
        self._poisoned_index = poisoned_index
        self._num_tokens = num_tokens
        self.num_unread = 0
        """Tokens of each answer that a worker has computed and the router has not read."""
        self._unread: dict[tuple[int, int], list[TokenEvent]] = {}
        self._epochs = itertools.count()
        self._done: Counter[tuple[int, int]] = Counter()
        self.losses: list[str] = []
        self.is_heard = True
        """Whether a worker that a step ends has said what it started."""
        for name in names:
            self._add(name)

    def _add(self, name: str) -> None:
        worker = RecordingWorker(name, WorkerRole(name.split("-")[0]))
        worker.epoch, worker.max_batch_size = next(self._epochs), 1000
        worker.load = SchedulerLoad(num_blocks_free=100_000)
        self.dispatcher.worker_up(worker)

    def start(self, first_token: int, num_choices: int = 1) -> ReadRequest:
        request = ReadRequest(
            RequestSpec(
                prompt_tokens=(first_token, 2, 3, 4, 5),
                sampling=SamplingParams(max_tokens=self._num_tokens),
                arrived_s=self.clock.now_s,
                num_choices=num_choices,
            )
        )
        self.dispatcher.start(request)
        return request

    def end(self, worker: RecordingWorker) -> None:
        """End a worker and start it again."""
        self.losses.append(worker.worker_id)
        self.dispatcher.worker_lost(worker)
        self._add(worker.worker_id)

    def turn(self) -> None:
        self.clock.now_s += TURN_S
        for worker in list(self.dispatcher.workers.values()):
            assert isinstance(worker, RecordingWorker)
            if not (self._prefill(worker) and self._decode(worker)):
                self.end(worker)
        self.dispatcher.sweep()

    def _prefill(self, worker: RecordingWorker) -> bool:
        """Compute all prompts of ``worker``; False if that ended it."""
        requests, worker.submitted = worker.submitted, []
        is_lost = any(self._is_poisoned(request, len(request.emitted_tokens)) for request in requests)
        for request in requests:
            if self.is_heard or not is_lost:
                self._send(worker, request, RequestEventKind.STARTED)
        if is_lost:
            return False
        for request in requests:
            index = len(request.emitted_tokens)
            if request.handoff:
                self._send(worker, request, RequestEventKind.LAST_CHUNK)
            else:
                self._done[self._key(request)] = index + 1
                worker.prepared.append((request, KvSource(address="", worker_epoch=0, handle=HANDLE)))
            self._token(worker, request, index)
        return True

    def _decode(self, worker: RecordingWorker) -> bool:
        """Compute the next token of all answers of ``worker``; False if that ended it."""
        for request, _ in worker.prepared:
            if not self._done[self._key(request)]:
                self._send(worker, request, RequestEventKind.STARTED)
                self._send(worker, request, RequestEventKind.JOINED)
                self._done[self._key(request)] = len(request.emitted_tokens) + 1
        indices = [self._done[self._key(request)] for request, _ in worker.prepared]
        if any(self._is_poisoned(request, index) for (request, _), index in zip(worker.prepared, indices, strict=True)):
            return False
        for (request, _), index in zip(worker.prepared, indices, strict=True):
            self._token(worker, request, index)
            self._done[self._key(request)] += 1
        worker.prepared = [each for each in worker.prepared if self._done[self._key(each[0])] < self._num_tokens]
        return True

    def _is_poisoned(self, request: GenerationRequest, index: int) -> bool:
        return request.prompt_tokens[0] == POISON and index == self._poisoned_index

    def _key(self, request: GenerationRequest) -> tuple[int, int]:
        return request.request_id, request.attempt

    def _send(self, worker: RecordingWorker, request: GenerationRequest, kind: RequestEventKind) -> None:
        key = RequestKey(0, *self._key(request))
        self.dispatcher.event_received(worker, RequestEvent(key, kind, handle=HANDLE))

    def _token(self, worker: RecordingWorker, request: GenerationRequest, index: int) -> None:
        finish = FinishReason.LENGTH if index == self._num_tokens - 1 else FinishReason.NONE
        key = RequestKey(0, *self._key(request))
        unread = self._unread.setdefault(self._key(request), [])
        unread.append(TokenEvent(key, 0, index, 7, None, finish))
        num_read = len(unread) if finish else max(0, len(unread) - self.num_unread)
        self.dispatcher.tokens_received(worker, unread[:num_read])
        del unread[:num_read]


@pytest.mark.parametrize("poisoned_index", [0, 1, 3])
@pytest.mark.parametrize("names", [("prefill-0", "decode-0"), ("prefill-0", "prefill-1", "decode-0", "decode-1")])
def test_a_poisoned_request_alone_fails(names: tuple[str, ...], poisoned_index: int) -> None:
    world = World(names, poisoned_index=poisoned_index)
    poison = world.start(POISON)
    innocents = [world.start(100 + number) for number in range(63)]
    for _ in range(400):
        world.turn()
    assert poison.outcome is Outcome.FAILED
    assert poison.error is not None
    assert (poison.error.status, poison.error.message.split()[0]) == (500, str(len(world.losses)))
    for innocent in innocents:
        assert innocent.outcome is Outcome.FINISHED
        assert innocent.tokens == [(0, index) for index in range(NUM_TOKENS)]
    assert MAX_LOSSES < len(world.losses) < most_losses(64)
    assert world.dispatcher.num_in_flight == 0


@pytest.mark.parametrize("poisoned_index", [0, 1, 3])
@pytest.mark.parametrize("names", [("mixed-0",), ("prefill-0", "decode-0")])
def test_many_choices_of_a_poisoned_request_end_hardly_more_workers_than_one(
    names: tuple[str, ...], poisoned_index: int
) -> None:
    world = World(names, poisoned_index=poisoned_index)
    poison = world.start(POISON, num_choices=64)
    for _ in range(200):
        world.turn()
    assert poison.outcome is Outcome.FAILED
    assert len(world.losses) <= most_losses(1)


@pytest.mark.parametrize("poisoned_index", [0, 1, 3])
def test_a_poisoned_request_that_its_client_sends_again_fails_no_other(poisoned_index: int) -> None:
    world = World(("prefill-0", "decode-0"), poisoned_index=poisoned_index)
    poisons = [world.start(POISON)]
    innocents = [world.start(100 + number) for number in range(20)]
    for _ in range(2000):
        world.turn()
        if poisons[-1].outcome and len(poisons) < 3:
            poisons.append(world.start(POISON))
    assert {poison.outcome for poison in poisons} == {Outcome.FAILED}
    assert {innocent.outcome for innocent in innocents} == {Outcome.FINISHED}
    assert len(world.losses) < most_losses(21) + (len(poisons) - 1) * most_losses(1)


def test_two_poisoned_requests_fail_and_nothing_else_does() -> None:
    world = World(("prefill-0", "decode-0", "decode-1"), poisoned_index=2)
    poisons = [world.start(POISON) for _ in range(2)]
    innocents = [world.start(100 + number) for number in range(20)]
    for _ in range(300):
        world.turn()
    assert {poison.outcome for poison in poisons} == {Outcome.FAILED}
    assert {innocent.outcome for innocent in innocents} == {Outcome.FINISHED}
    assert len(world.losses) <= 2 * most_losses(22)


@pytest.mark.parametrize("num_unread", [3, 10, 40])
def test_tokens_that_a_lost_worker_had_computed_prove_nothing(num_unread: int) -> None:
    world = World(("prefill-0", "decode-0", "decode-1"), poisoned_index=60, num_tokens=62)
    world.num_unread = num_unread
    poison = world.start(POISON)
    innocents = [world.start(100 + number) for number in range(20)]
    for _ in range(MAX_LOSSES):
        num_losses = len(world.losses)
        while len(world.losses) == num_losses:
            world.turn()
    world.num_unread = 0
    for _ in range(500):
        world.turn()
    assert poison.outcome is Outcome.FAILED
    assert {innocent.outcome for innocent in innocents} == {Outcome.FINISHED}
    num_passes = (num_unread >= MIN_TRIAL_TOKENS) + num_unread // MAX_TRIAL_TOKENS
    assert len(world.losses) < most_losses(21) + num_passes


@pytest.mark.parametrize("num_requests", [1, 64])
def test_innocents_that_lost_two_workers_at_once_are_tried_at_once(num_requests: int) -> None:
    world = World(("prefill-0", "decode-0", "decode-1"), poisoned_index=-1)
    requests = [world.start(number) for number in range(num_requests)]
    for _ in range(MAX_LOSSES):
        world.turn()
        for name in ("decode-0", "decode-1"):
            world.end(world.dispatcher.workers[name])  # type: ignore[arg-type]
    lost_s = world.clock.now_s
    while world.dispatcher.num_in_flight:
        world.turn()
    assert world.clock.now_s - lost_s <= TRIAL_WAIT_S + (NUM_TOKENS + 1) * TURN_S
    assert {request.outcome for request in requests} == {Outcome.FINISHED}


@pytest.mark.parametrize(
    ("num_ends", "outcome"),
    [(MAX_EXCUSED, Outcome.FINISHED), (MAX_EXCUSED + MAX_ATTEMPTS - 1, Outcome.FINISHED),
     (MAX_EXCUSED + MAX_ATTEMPTS, Outcome.FAILED)],
)  # fmt: skip
def test_losses_between_which_an_answer_gets_on_fail_it_late(num_ends: int, outcome: Outcome) -> None:
    num_tokens = (MAX_TRIAL_TOKENS + 1) * (MAX_EXCUSED + MAX_ATTEMPTS + 1)
    world = World(("prefill-0", "decode-0"), poisoned_index=-1, num_tokens=num_tokens)
    request = world.start(1)
    for num_losses in range(1, num_ends + 1):
        while len(request.tokens) <= num_losses * (MAX_TRIAL_TOKENS + 1) and not request.outcome:
            world.turn()
        world.end(world.dispatcher.workers["decode-0"])  # type: ignore[arg-type]
    while not request.outcome:
        world.turn()
    assert request.outcome is outcome


def test_losses_that_lie_apart_make_no_suspects() -> None:
    """Each loses all answers, and most of them lose a second worker before they end."""
    world = World(("prefill-0", "decode-0", "decode-1"), poisoned_index=-1, num_tokens=100)
    requests = [world.start(number) for number in range(100)]
    for number in range(3):
        for _ in range(20):
            world.turn()
        world.end(world.dispatcher.workers[f"decode-{number % 2}"])  # type: ignore[arg-type]
        assert world.dispatcher.num_queued == 0
    for _ in range(100):
        world.turn()
    assert {request.outcome for request in requests} == {Outcome.FINISHED}


def test_only_prompts_that_the_last_steps_may_have_held_are_blamed(caplog: pytest.LogCaptureFixture) -> None:
    world = World(("prefill-0", "decode-0"), poisoned_index=-1)
    requests = [world.start(number) for number in range(300)]
    for name in ("prefill-0", "decode-0"):  # `MAX_LOSSES`: what the first holds goes to the second
        world.end(world.dispatcher.workers[name])  # type: ignore[arg-type]
    for _ in range(NUM_TOKENS + 1):  # as many as one request alone takes
        world.turn()
    num_blamed = 2 * 256 // 5 + 1
    (told,) = caplog.messages
    assert told.endswith(f" and {num_blamed - MAX_NAMED} more")
    assert len(told) < 200
    assert {request.outcome for request in requests[num_blamed:]} == {Outcome.FINISHED}
    for _ in range(3 * num_blamed):
        world.turn()
    assert {request.outcome for request in requests} == {Outcome.FINISHED}


def test_losses_before_its_turn_came_do_not_fail_a_prompt() -> None:
    """Those before it are suspects after every second loss, and wait."""
    world = World(("prefill-0", "prefill-1", "decode-0"), poisoned_index=-1)
    last = [world.start(number) for number in range(600)][-1]
    for number in range(MAX_ATTEMPTS + 1):
        world.end(world.dispatcher.workers[f"prefill-{number % 2}"])  # type: ignore[arg-type]
    assert last.attempts[0].number == MAX_ATTEMPTS, "it was on the other worker at first"


def test_a_worker_that_ends_before_it_is_heard_is_blamed_on_what_it_got() -> None:
    world = World(("prefill-0", "decode-0"), poisoned_index=0)
    world.is_heard = False
    poison = world.start(POISON)
    innocents = [world.start(100 + number) for number in range(20)]
    for _ in range(200):
        world.turn()
    assert poison.outcome is Outcome.FAILED
    assert {innocent.outcome for innocent in innocents} == {Outcome.FINISHED}
    assert len(world.losses) < most_losses(21)


def test_micro_batches_of_one_worker_end_with_one_loss() -> None:
    world = World(("prefill-0.0", "prefill-0.1", "prefill-0.2", "prefill-0.3", "decode-0"), poisoned_index=-1)
    stages = [worker for worker in world.dispatcher.workers.values() if worker.role is WorkerRole.PREFILL]
    request = world.start(1)
    for worker in stages:
        worker.epoch = 7
        world.dispatcher.worker_lost(worker)
    assert request.outcome is None
    world.dispatcher.worker_up(RecordingWorker("prefill-0.0", WorkerRole.PREFILL))
    for _ in range(NUM_TOKENS + 1):
        world.turn()
    assert request.outcome is Outcome.FINISHED


def test_what_a_micro_batch_computed_was_not_alone() -> None:
    world = World(("mixed-0.0",), poisoned_index=-1)
    request = world.start(1)
    for _ in range(MAX_LOSSES + 1):
        world.end(_started(world, "mixed-0.0")[0])
        world.clock.now_s += TRIAL_WAIT_S
        world.dispatcher.sweep()
    assert request.outcome is None


def test_the_end_of_a_drained_worker_makes_no_suspects_and_is_no_attempt() -> None:
    world = World(("prefill-0", "decode-0", "decode-1"), poisoned_index=-1, num_tokens=100)
    requests = [world.start(number) for number in range(20)]
    for number in range(MAX_ATTEMPTS + 1):
        for _ in range(3):
            world.turn()
        drained = world.dispatcher.workers[f"decode-{number % 2}"]
        drained.is_draining = True
        world.end(drained)  # type: ignore[arg-type]
        assert world.dispatcher.num_queued == 0
    for _ in range(100):
        world.turn()
    assert {request.outcome for request in requests} == {Outcome.FINISHED}


@pytest.mark.parametrize("num_requests", [1, 20])
def test_workers_that_end_together_fail_nothing(num_requests: int) -> None:
    names = ("prefill-0", "prefill-1", "prefill-2", "decode-0", "decode-1", "decode-2", "decode-3")
    world = World(names, poisoned_index=-1, num_tokens=20)
    requests = [world.start(number) for number in range(num_requests)]
    for _ in range(3):
        world.turn()
    requests += [world.start(number) for number in range(num_requests)]
    workers = list(world.dispatcher.workers.values())
    for number, worker in enumerate(workers):
        world.clock.now_s += number / 100
        world.dispatcher.worker_lost(worker)
    for worker in workers:
        world._add(worker.worker_id)
    for _ in range(1500):
        world.turn()
    assert {request.outcome for request in requests} == {Outcome.FINISHED}


def _started(world: World, name: str) -> tuple[RecordingWorker, list[GenerationRequest]]:
    """Have a worker say that it started all that it got."""
    worker = world.dispatcher.workers[name]
    assert isinstance(worker, RecordingWorker)
    for sent in worker.submitted:
        world._send(worker, sent, RequestEventKind.STARTED)
    return worker, worker.submitted


def _suspects(world: World, num: int) -> list[ReadRequest]:
    """Requests that lost two workers."""
    requests = [world.start(number) for number in range(num)]
    for _ in range(MAX_LOSSES):
        worker, _ = _started(world, "mixed-0")
        world.end(worker)
    return requests


def test_a_suspect_is_not_bound_anew() -> None:
    """Another decode worker would compute it before its trial."""
    world = World(("mixed-0",), poisoned_index=-1)
    request = world.start(1)
    world.dispatcher.worker_lost(_started(world, "mixed-0")[0])
    decoders = [RecordingWorker(f"decode-{number}", WorkerRole.DECODE) for number in range(2)]
    for worker in (RecordingWorker("prefill-0", WorkerRole.PREFILL), *decoders):
        world.dispatcher.worker_up(worker)
    prefill, [sent] = _started(world, "prefill-0")
    world._send(prefill, sent, RequestEventKind.LAST_CHUNK)
    bound, other = sorted(decoders, key=lambda decoder: not decoder.prepared)
    world._send(bound, bound.prepared[0][0], RequestEventKind.STARTED)
    world.dispatcher.worker_lost(bound)
    assert not other.prepared
    assert prefill.cancelled == [(sent.request_id, sent.attempt)]
    world.clock.now_s += TRIAL_WAIT_S
    prefill.submitted.clear()
    while not request.outcome:
        world.turn()
    assert request.outcome is Outcome.FINISHED


def _halves(world: World) -> list[ReadRequest]:
    """Three suspects, of whom the first and the last are on trial again."""
    requests = _suspects(world, 3)
    world.clock.now_s += TRIAL_WAIT_S
    world.dispatcher.sweep()
    world.end(_started(world, "mixed-0")[0])
    world.clock.now_s += TRIAL_WAIT_S
    world.dispatcher.sweep()
    return requests


def test_the_next_trial_begins_when_the_suspects_on_trial_have_left() -> None:
    world = World(("mixed-0",), poisoned_index=-1)
    first, _, last = _halves(world)
    worker = world.dispatcher.workers["mixed-0"]
    assert isinstance(worker, RecordingWorker)
    for request in (first, last):
        assert [sent.prompt_tokens[0] for sent in worker.submitted] == [0, 2]
        world.dispatcher.cancel(request)
        world.dispatcher.place_some()
    assert [sent.prompt_tokens[0] for sent in worker.submitted] == [0, 2, 1]


def test_all_suspects_are_tried_at_once_though_workers_have_enough_to_do() -> None:
    world = World(("mixed-0",), poisoned_index=-1)
    _suspects(world, 100)
    for number in range(1000, 1300):
        world.start(number)
    world.clock.now_s += TRIAL_WAIT_S
    world.dispatcher.sweep()
    worker = world.dispatcher.workers["mixed-0"]
    assert isinstance(worker, RecordingWorker)
    assert {sent.prompt_tokens[0] for sent in worker.submitted} == {*range(100), *range(1000, 1300)}


def test_what_waits_for_a_trial_does_not_wait_for_a_worker_meanwhile() -> None:
    world = World(("mixed-0",), poisoned_index=-1)
    first, waiting, last = _halves(world)
    worker_wait_s = DispatchSettings().worker_wait_s
    for _ in range(math.ceil(worker_wait_s) + 1):
        world.clock.now_s += 1.0
        world.dispatcher.sweep()
    worker = world.dispatcher.workers["mixed-0"]
    worker.is_draining = True  # its end is nobody's fault
    world.dispatcher.worker_lost(worker)
    world.dispatcher.cancel(first)
    world.dispatcher.cancel(last)
    world.dispatcher.sweep()
    assert waiting.outcome is None
    world.clock.now_s += worker_wait_s
    world.dispatcher.sweep()
    assert waiting.outcome is Outcome.FAILED
