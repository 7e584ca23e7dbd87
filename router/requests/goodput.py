"""The ``goodput`` policy, the default: of all choices, the one that lets the most requests meet both objectives.

The *score* of a choice is the probability that the request meets TTFT and TPOT there, times its weight, less the misses
that it is expected to cause: to answers that decode there or are about to, whose steps get longer, and to prompts that
will arrive behind it, by what a second of prefill has cost others of late. A prompt that is unlikely to meet TTFT, or
whose seconds cost others more, is *late*: it runs behind all that still may. A request with no score anywhere is
refused, if its tier says so; otherwise it is *held* while its answer would take room from answers that may meet their
objectives, and has a turn every 20 s.

Prompts are due in the order in which their objectives end, each share (a tenant's requests of one tier) behind its own
work, which counts the more the less it weighs: shares that send more than others get no more of the workers than by
weight. With one share, that is the order of arrival.

A decision has two stages. `pdserve.router.requests.shortlist` orders all workers by a number that follows from their
snapshots alone; the first few are scored, of which a `WorkerView` each knows prompts and answers, and the misses there
are computed of those that may be the best.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import inf, log
from typing import Any, TypeVar

from pdserve.contracts.worker_config import WorkerRole
from pdserve.router.requests.goodput_rules import (
    LATE_S,
    HeldTurns,
    Joining,
    PrefillCost,
    Pulls,
    RetryTimes,
    chance,
    handoff_score,
    slack_misses,
    tpot_chance,
)
from pdserve.router.requests.lengths import Lengths, TtftErrors
from pdserve.router.requests.options import DecodeOption, Handoff, PrefillOption
from pdserve.router.requests.placement import (
    Arrival,
    Binding,
    Costs,
    Placement,
    PrefillChoice,
    PrefixPull,
    PromptBlocks,
    WorkerSnapshot,
    shortfall,
    tie_order,
)
from pdserve.router.requests.prefix_sources import PrefixSources
from pdserve.router.requests.shortlist import by_backlog, by_room
from pdserve.router.requests.worker_view import WorkerView

PREFILL, DECODE, MIXED = WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.MIXED
LENIENT_TPOT_S = 1.0
"""Stands for no TPOT objective."""
MIN_TTFT_SPREAD_S = 3e-3
"""Lower bound for the error of a predicted TTFT: the scale of a logistic distribution."""
MIN_SCORE = 0.05
"""A request whose best score is below this share of its weight meets its objectives nowhere; a prompt whose chance to
meet TTFT, less what its seconds cost others, is below it everywhere is late."""
MAX_PREFILL_SHARE = 0.9
"""Upper limit of the time that prefill takes from answers on a mixed worker, as a share of theirs."""
MAX_MEAN_STEP = 0.75
"""Mean step, prefills included, up to which a decode worker prefills, as a share of the TPOT objective."""


class Goodput(Placement):
    """Marginal goodput."""

    def __init__(self, costs: Costs, *, tpot_slo_s: float = 0.0) -> None:
        super().__init__(costs, tpot_slo_s=tpot_slo_s)
        self._views: dict[str, WorkerView] = {}
        self._requests: dict[int, _Request] = {}
        self._num_answers = 0
        """Answers that decode and may meet their objectives."""
        self._joining, self._late_joining = Joining(), Joining()
        self._late_tokens: Counter[str] = Counter()
        """Tokens of late prompts by id of the worker on which they wait."""
        self._pulls = Pulls()
        self._prefix_sources = PrefixSources(costs, self.pull_corrections)
        self._prefill_cost = PrefillCost()
        self._turns = HeldTurns()
        self._retry_times = RetryTimes()
        self._lengths = Lengths()
        self._errors = {True: TtftErrors(), False: TtftErrors()}
        """Of prompts that are handed off, and of those computed where answers decode."""
        decode = costs.get(DECODE)
        self._join_steps = 0.5 if decode is None else float(decode.pipeline_depth)
        """Steps of a decode worker that are planned already when an answer joins; 0.5 without one, so that token 1 is
        not waited for."""

    # Decisions

    def prefill(self, arrival: Arrival, workers: Sequence[WorkerSnapshot]) -> PrefillChoice | None:
        blocks, weight = arrival.blocks, arrival.weight
        fleet = {role: [worker for worker in workers if worker.role is role] for role in WorkerRole}
        cached = blocks.cached_on(workers)
        views = [self._updated(worker) for worker in self._shortlist(blocks, fleet, cached)]
        sources = self._prefix_sources.of(arrival, workers, cached)
        joining = self._joining.part_of(len(fleet[DECODE]))
        decodes = {
            view.worker_id: self._decode_option(arrival, view, cached, joining, has_decode=bool(fleet[DECODE]))
            for view in views
            if view.role is not PREFILL
        }
        handoffs = [option for option in decodes.values() if option.view.role is DECODE]
        handoff = self._handoff(arrival, handoffs, len(fleet[DECODE])) if handoffs else None
        computing = [view for view in views if self._may_prefill(arrival, view, decodes, fleet)]
        if not computing:
            return None
        # Of all workers as large a share computes as of those on the short list.
        num_workers = len(computing) * len(workers) / len(views)
        cost_per_s = self._prefill_cost.misses_per_s(arrival.now_s) / num_workers
        options = [
            self._prefill_option(arrival, view, decode, handoff, num_cached, cost_per_s, pull)
            for view in computing
            for num_cached in [cached.get(view.worker_id, 0)]
            for pull in [sources and self._prefix_sources.pull(arrival, view, num_cached, sources)]
            for decode in [decodes.get(view.worker_id)] + [None] * (view.role is MIXED and bool(handoffs))
        ]
        key, best = self._least(options, lambda option, harm: option.order(blocks, harm))
        meets_nothing = -key[0] < MIN_SCORE * weight
        if meets_nothing and arrival.may_refuse:
            backlog_s, prefill_s = self._last_in_line(blocks, options)[0], min(each.prefill_s for each in options)
            ends_per_s = self._ends_per_s(workers)
            wait_s = self._retry_times.retry_after_s(arrival.now_s, backlog_s, prefill_s, num_workers, ends_per_s)
            return best.choice()._replace(retry_after_s=wait_s)
        is_held = meets_nothing and self._is_held(arrival, fleet, decodes.values())
        if is_held or _is_late(arrival, options):
            backlog_s, last = self._last_in_line(blocks, options)
            return last.choice()._replace(is_late=True, is_held=is_held, ttft_s=backlog_s, due_s=arrival.now_s + LATE_S)
        return best.choice()._replace(misses_per_s=weight * best.chance * (1 - best.chance) / best.spread_s)

    def decode(
        self, arrival: Arrival, workers: Sequence[WorkerSnapshot], cut_off: AbstractSet[str], source_host: str
    ) -> Binding | None:
        if not workers:
            return None
        blocks, request = arrival.blocks, self._requests.get(arrival.request_id)
        token_s = arrival.now_s if arrival.token_s is None else arrival.token_s
        weight = arrival.weight if request is None or request.wanted_s >= token_s else 0.0
        near = [worker for worker in workers if worker.worker_id not in cut_off] or workers if cut_off else workers
        cached = blocks.cached_on(near)
        options = [
            self._decode_option(
                arrival,
                self._updated(each),
                cached,
                pull_token_s=self._pull_token_s(same_host=each.host == source_host),
            )
            for each in by_room(blocks, near, cached)
        ]
        # One that meets nothing waits for room rather than cause misses.
        yields = not weight and self.tpot_slo_s > 0
        _, best = self._least(
            options,
            lambda option, harm: (
                yields and not self._fits_beside(option, option.step_s),
                option.lacking,
                harm - option.gain(weight),
                tie_order(blocks, option.view.snapshot),
            ),
        )
        self._bound(arrival.request_id)
        stall_slo_s = self._lengths.mean * ((arrival.tpot_slo_s or LENIENT_TPOT_S) - best.step_s)
        return Binding(best.view.worker_id, max(0.0, stall_slo_s) if weight else 0.0)

    # What became of them

    def placed(self, arrival: Arrival, choice: PrefillChoice) -> None:
        request_id, view, is_late = arrival.request_id, self._views[choice.worker_id], choice.is_late
        num_tokens = arrival.blocks.num_tokens
        num_new = num_tokens - choice.num_cached_tokens
        self._forget(request_id)
        self._requests[request_id] = _Request(
            wanted_s=-inf if is_late else arrival.wanted_s,
            tpot_slo_s=arrival.tpot_slo_s or LENIENT_TPOT_S,
            weight=arrival.weight,
            placed_s=arrival.now_s,
            ttft_s=choice.ttft_s,
            handoff=choice.handoff,
            prefill=view,
            num_late_tokens=num_new * is_late,
        )
        view.prompts.add(request_id, choice.due_s, num_new, choice.prefill_s, None if is_late else arrival.share)
        if is_late:
            self._late_tokens[choice.worker_id] += num_new
        elif view.may_decode:
            view.prefill_beside(choice.prefill_s, arrival.now_s, self._answer_s())
        if choice.prefix is not None:
            self._prefix_sources.leave(choice.prefix.worker_id, arrival.now_s + choice.prefix.pull_s)
        if choice.handoff:
            (self._late_joining if is_late else self._joining).add(request_id, num_tokens)
            self._pulls.add(request_id, choice.worker_id, choice.num_pulled_tokens)
        self._turns.placed(arrival, is_late=is_late)
        self._prefill_cost.add(choice.misses_per_s)
        self._retry_times.placed(choice.prefill_s)

    def prefilled(self, request_id: int) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            self._prompt_left(request_id, request)

    def decoding(self, request_id: int, began_s: float, num_tokens: int, worker: WorkerSnapshot) -> None:
        request = self._requests.get(request_id)
        if request is None:
            request = self._requests[request_id] = _Request(inf, self.tpot_slo_s or LENIENT_TPOT_S, 1.0)
        if request.ttft_s and request.wanted_s > -inf and began_s > request.placed_s:
            self._errors[request.handoff].add(log((began_s - request.placed_s) / request.ttft_s))
            request.ttft_s = 0.0
        self._pulls.remove(request_id)
        if began_s <= request.wanted_s:  # another miss costs a late one nothing
            self._answer_left(request_id, request)
            request.decode = view = self._view(worker)
            tokens_ahead = num_tokens - worker.num_steps - self._join_steps * (request.handoff and num_tokens == 1)
            slo_s, weight = request.tpot_slo_s, request.weight
            view.answer_began(request_id, began_s, tokens_ahead, slo_s, weight, worker.num_steps)
            self._num_answers += 1
            self._count_lengths()

    def pulled(self, role: WorkerRole, num_tokens: int, seconds: float, source_id: str, *, same_host: bool) -> None:
        if not self._pulls.are_shared(source_id):  # the wait for others is no error of the prediction
            super().pulled(role, num_tokens, seconds, source_id, same_host=same_host)

    def prefix_failed(self, worker_id: str, until_s: float) -> None:
        self._prefix_sources.leave(worker_id, until_s)

    def left(self, request_id: int, num_tokens: int) -> None:
        self._forget(request_id)
        if num_tokens:
            self._lengths.add(num_tokens)
            self._count_lengths()

    # Records

    def _view(self, worker: WorkerSnapshot) -> WorkerView:
        view = self._views.get(worker.worker_id)
        if view is None:
            view = self._views[worker.worker_id] = WorkerView(worker, self.costs)
        return view

    def _updated(self, worker: WorkerSnapshot) -> WorkerView:
        view = self._view(worker)
        view.update(worker)
        return view

    def _bound(self, request_id: int) -> None:
        self._joining.remove(request_id)
        self._late_joining.remove(request_id)

    def _prompt_left(self, request_id: int, request: _Request) -> None:
        if request.prefill is not None:
            request.prefill.prompts.remove(request_id)
            worker_id, request.prefill = request.prefill.worker_id, None
            self._late_tokens[worker_id] -= request.num_late_tokens
            if not self._late_tokens[worker_id]:
                del self._late_tokens[worker_id]

    def _answer_left(self, request_id: int, request: _Request) -> None:
        if request.decode is not None:
            request.decode.answer_left(request_id)
            request.decode = None
            self._num_answers -= 1

    def _forget(self, request_id: int) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._prompt_left(request_id, request)
            self._pulls.remove(request_id)
            self._answer_left(request_id, request)
            self._bound(request_id)

    def _count_lengths(self) -> None:
        """An answer began or ended."""
        if self._lengths.is_due(self._num_answers):
            self._lengths.count(view.answers.num_tokens(view.snapshot.num_steps) for view in self._views.values())

    def _answer_s(self) -> float:
        """Seconds of a median answer that just meets TPOT."""
        return self._lengths.median * (self.tpot_slo_s or LENIENT_TPOT_S)

    # Options

    def _shortlist(self, blocks: PromptBlocks, fleet: _Fleet, cached: Mapping[str, int]) -> Iterable[WorkerSnapshot]:
        """Workers to score: those that may compute the prompt by what is before it, those that may decode by room."""
        computing = (fleet[PREFILL] or fleet[DECODE], fleet[MIXED])
        chosen = [each for workers in computing for each in by_backlog(blocks, workers, cached, self._late_tokens)]
        chosen += [each for workers in (fleet[DECODE], fleet[MIXED]) for each in by_room(blocks, workers, cached)]
        return {each.worker_id: each for each in chosen}.values()

    def _decode_option(
        self,
        arrival: Arrival,
        view: WorkerView,
        cached: Mapping[str, int],
        joining: tuple[float, float] = (0.0, 0.0),
        *,
        pull_token_s: float = 0.0,
        has_decode: bool = True,
    ) -> DecodeOption:
        """What the answer may expect on a worker, and others there from it.

        Args:
            joining: answers and tokens of context that a decode worker will get of those about to be handed off.
            pull_token_s: seconds to pull each token that the worker does not cache.
            has_decode: answers may decode elsewhere, beside no prefill.
        """
        num_tokens, slo_s, length = arrival.blocks.num_tokens, arrival.tpot_slo_s or LENIENT_TPOT_S, self._lengths.mean
        num_cached, step_s = cached.get(view.worker_id, 0), view.step_with_s(num_tokens)
        lacking = shortfall(arrival.blocks, view.snapshot, num_cached_tokens=num_cached)
        if not arrival.decodes:
            return DecodeOption(view, num_cached, lacking, step_s, 1.0, 0.0, 0.0, known_harm=0.0)
        stall_s = pull_token_s * (num_tokens - num_cached) + self._wait_for_blocks_s(arrival.blocks, view, lacking)
        tpot_s, joining_s, joining_misses = step_s, 0.0, 0.0
        if view.role is DECODE:
            # Token 1 ends the first step that is planned once the prompt is there, on average in the midst of another.
            stall_s += (self._join_steps - 0.5) * step_s
        elif has_decode:
            busy = min(view.recent_prefill_s(arrival.now_s, self._answer_s()) / self._answer_s(), MAX_PREFILL_SHARE)
            tpot_s += step_s * busy / (1 - busy)
        tpot = tpot_alone = (tpot_s + stall_s / length) / slo_s
        if view.role is DECODE and joining[0]:
            joining_s = view.added_s(*joining)
            tpot += joining_s / slo_s
            without = tpot_chance(tpot - view.added_s(1, num_tokens) / slo_s)
            joining_misses = joining[0] * arrival.weight * (without - tpot_chance(tpot))
        misses = joining_misses + slack_misses(arrival.weight, tpot_alone)
        return DecodeOption(view, num_cached, lacking, step_s, tpot_chance(tpot), joining_s, misses)

    def _handoff(self, arrival: Arrival, options: Sequence[DecodeOption], num_decode: int) -> Handoff:
        """To the best of so many decode workers."""
        (negative_score,), best = self._least(options, lambda option, harm: (harm - option.gain(arrival.weight),))
        num_pulled = arrival.blocks.num_tokens - best.num_cached
        if arrival.is_sibling:
            num_pulled = min(num_pulled, arrival.blocks.block_size)
        hosts = {option.view.snapshot.host for option in options}
        return Handoff(best, -negative_score, num_pulled, num_decode, hosts)

    def _misses_of_pull(
        self, arrival: Arrival, view: WorkerView, handoff: Handoff, ttft_s: float, num_after: int
    ) -> float:
        """Expected misses of TPOT by the pull of a prompt: its answer may be too short to make up for it. Until the
        prompt is computed, the links of both workers carry those before it, and its own chunks but the last.
        ``num_after``: tokens of prompts that run after it."""
        slo_s, source = arrival.tpot_slo_s or LENIENT_TPOT_S, view.snapshot
        token_s = self._pull_token_s(same_host=source.host in handoff.hosts)
        behind_s = token_s * self._pulls.num_tokens(view.worker_id, handoff.num_decode, num_after) - ttft_s
        pull_s = max(0.0, behind_s) + token_s * min(handoff.num_pulled, source.max_batch_tokens)
        too_short = self._lengths.chance_of_steps(pull_s / max(1e-9, slo_s - handoff.best.step_s))
        return arrival.weight * handoff.best.chance * too_short

    def _pull_token_s(self, *, same_host: bool) -> float:
        """Seconds to pull one token."""
        return self.costs[DECODE].transfer_s(1, same_host=same_host) * self.pull_corrections[same_host].factor

    def _wait_for_blocks_s(self, blocks: PromptBlocks, view: WorkerView, num_lacking: float) -> float:
        """Seconds until the blocks that are lacking are free: all that answers hold goes in the time of an answer."""
        if view.snapshot.num_free_blocks >= blocks.num_blocks():
            return 0.0
        num_held = max(view.snapshot.num_context_tokens, blocks.num_tokens)
        return self._lengths.mean * view.step_with_s(blocks.num_tokens) * num_lacking * blocks.block_size / num_held

    def _may_prefill(
        self, arrival: Arrival, view: WorkerView, decodes: Mapping[str, DecodeOption], fleet: _Fleet
    ) -> bool:
        """Whether the worker may compute the prompt: as `prefill_candidates` has it, or as a decode worker that has
        time and blocks beside its answers."""
        if view.role is DECODE and fleet[PREFILL]:
            joining = self._joining.part_of(len(fleet[DECODE]))
            return not arrival.is_probe and self._may_prefill_beside(arrival, decodes[view.worker_id], *joining)
        return view.role is not PREFILL or bool(fleet[DECODE])

    def _may_prefill_beside(
        self, arrival: Arrival, option: DecodeOption, num_joining: float, num_joining_tokens: float
    ) -> bool:
        """Whether a decode worker has the blocks, and a mean step within TPOT in spite of its prefills, this one
        included, during a median answer. Over a longer time bursts of prefills would even out, but half of the answers
        do not last longer."""
        blocks, view, snapshot, answer_s = arrival.blocks, option.view, option.view.snapshot, self._answer_s()
        prefill_s = view.prefill_s(blocks.num_tokens, option.num_cached)
        busy = (view.recent_prefill_s(arrival.now_s, answer_s) + prefill_s) / answer_s
        if option.step_s > MAX_MEAN_STEP * self.tpot_slo_s * (1 - busy):
            return False
        # It takes its blocks early, and has answers keep theirs for longer: all must have room, those that join, too.
        num_kept = snapshot.num_context_tokens * busy / (1 - busy)
        num_growing = self._lengths.mean * (snapshot.num_decoding + num_joining + 1)
        num_taken = (num_kept + num_growing + num_joining_tokens) // blocks.block_size
        return not shortfall(blocks, snapshot, option.num_cached, num_joining, num_taken)

    def _prefill_option(
        self,
        arrival: Arrival,
        view: WorkerView,
        decode: DecodeOption | None,
        handoff: Handoff | None,
        num_cached: int,
        cost_per_s: float,
        pull: PrefixPull | None = None,
    ) -> PrefillOption:
        """What the prompt may expect on a worker, and others from it.

        Args:
            decode: its answer there; None if it is handed off.
            cost_per_s: misses that a second of delay to what arrives at the worker would cause, per second of arrivals.
            pull: adds to the ``num_cached`` tokens there.
        """
        num_tokens, weight, slack_s = arrival.blocks.num_tokens, arrival.weight, arrival.wanted_s - arrival.now_s
        num_cached, pull_s = (pull.num_tokens, pull.pull_s) if pull else (num_cached, 0.0)
        prefill_s, due_s = view.prefill_s(num_tokens, num_cached), _due_s(arrival, view)
        num_after = view.prompts.num_tokens_after(due_s)
        ttft_s = pull_s + view.ttft_s(num_tokens, num_cached, num_behind=num_after)
        spread_s = max(MIN_TTFT_SPREAD_S, self._errors[decode is None].spread * ttft_s)
        ttft_chance = chance((slack_s - ttft_s) / spread_s)
        if decode:
            gain, num_pulled = decode.gain(weight * ttft_chance), 0
        else:
            assert handoff is not None
            misses, num_pulled = self._misses_of_pull(arrival, view, handoff, ttft_s, num_after), handoff.num_pulled
            gain = handoff_score(ttft_chance, handoff.score - misses)
        # What arrives in the seconds to its token 0 waits longer by those of its prefill.
        cost = cost_per_s * prefill_s * ttft_s
        gain -= cost + slack_misses(weight, ttft_s / (max(slack_s, ttft_s) if slack_s < inf else 1.0))
        return PrefillOption(
            view, decode, num_cached, num_pulled, prefill_s, due_s, ttft_s, ttft_chance, spread_s, cost, gain, pull
        )

    def _least(self, options: Sequence[_Option], key: Callable[[_Option, float], _Key]) -> tuple[_Key, _Option]:
        """The option with the least key, which grows with the harm to answers that decode there. That takes most of the
        time of a decision, so it is computed only of options that would have the least key without."""
        keys = [(key(option, 0.0), index, False) for index, option in enumerate(options)]
        while True:
            least, index, is_exact = min(keys)
            if is_exact:
                return least, options[index]
            keys[index] = key(options[index], options[index].harm(self._lengths)), index, True

    # Refused and held ones

    def _last_in_line(self, blocks: PromptBlocks, options: Sequence[PrefillOption]) -> tuple[float, PrefillOption]:
        """Where the prompt would end first behind all that waits, and after how many seconds; it is handed off if it
        can be."""
        options = [option for option in options if option.decode is None] or options
        backlog_s, _, last = min(
            (each.view.ttft_s(blocks.num_tokens, each.num_cached), tie_order(blocks, each.view.snapshot), each)
            for each in options
        )
        return backlog_s, last

    def _ends_per_s(self, workers: Iterable[WorkerSnapshot]) -> float:
        """Answers that end per second, on all workers."""
        tokens_per_s = 0.0
        for worker in workers:
            if worker.num_decoding:
                step_s = self.costs[worker.role].decode_s(worker.num_decoding, worker.num_context_tokens)
                tokens_per_s += worker.num_decoding / (step_s * worker.decode_correction)
        return tokens_per_s / self._lengths.mean

    def _is_held(self, arrival: Arrival, fleet: _Fleet, decodes: Collection[DecodeOption]) -> bool:
        """Whether a request that meets nothing finds no worker where it fits beside others, nor an idle one. It gives
        way to answers that may still meet their objectives; one of weight 0, to those that may come, too. One that does
        not decode takes no room."""
        if arrival.is_probe or not arrival.decodes or arrival.wanted_s == inf or self._turns.is_due(arrival):
            return False
        if arrival.weight and not self._num_answers and not len(self._joining):
            return False
        decoders = [*fleet[DECODE], *fleet[MIXED]]
        num_idle = sum(not worker.num_decoding and not worker.num_waiting_tokens for worker in decoders)
        if num_idle > len(self._joining) + len(self._late_joining) or not self._may_meet_tpot(arrival, decodes):
            return False
        fitting = [each for each in decodes if not each.lacking and self._fits_beside(each, each.step_s)]
        num_fitting = len(fitting) * len(decoders) / max(1, len(decodes))
        return not any(self._fits_after_joining(arrival, each, num_fitting) for each in fitting)

    def _may_meet_tpot(self, arrival: Arrival, decodes: Iterable[DecodeOption]) -> bool:
        """Whether a lone answer is likely to meet the tightest TPOT objective; if not, to wait is of no use."""
        cost = self.costs.get(DECODE) or self.costs[MIXED]
        correction = min((each.view.step_correction for each in decodes), default=inf)
        lone_s = cost.decode_s(1, arrival.blocks.num_tokens) * correction
        return self.tpot_slo_s > 0 and tpot_chance(lone_s / self.tpot_slo_s) >= 1 - MIN_SCORE

    def _fits_beside(self, option: DecodeOption, step_s: float) -> bool:
        """Whether one more answer causes few misses and, with steps of ``step_s``, leaves those a chance that may come
        with the tightest TPOT objective."""
        misses = option.own_misses + option.harm(self._lengths)
        return misses <= MIN_SCORE and tpot_chance(step_s / self.tpot_slo_s) >= 1 - MIN_SCORE

    def _fits_after_joining(self, arrival: Arrival, option: DecodeOption, num_workers: float) -> bool:
        """Whether the answer still fits on a worker, one of ``num_workers``, when those have joined that are about to
        be handed off, late ones included."""
        parts = [joining.part_of(num_workers) for joining in (self._joining, self._late_joining)]
        num_answers, num_tokens = (sum(each) for each in zip(*parts, strict=True))
        blocks, num_blocks = arrival.blocks, num_tokens / arrival.blocks.block_size
        num_lacking = shortfall(blocks, option.view.snapshot, option.num_cached, num_answers, num_blocks)
        step_s = option.step_s + option.view.added_s(num_answers, num_tokens)
        return not num_lacking and self._fits_beside(option, step_s)


_Key = tuple[Any, ...]
_Option = TypeVar("_Option", DecodeOption, PrefillOption)
_Fleet = Mapping[WorkerRole, Sequence[WorkerSnapshot]]


@dataclass(slots=True)
class _Request:
    wanted_s: float
    """Instant at which token 0 is due; in the past, infinitely, for late ones."""
    tpot_slo_s: float
    weight: float
    placed_s: float = 0.0
    ttft_s: float = 0.0
    """Predicted seconds from ``placed_s`` to token 0; 0 once that was held against what came."""
    handoff: bool = False
    prefill: WorkerView | None = None
    """Worker on which its prompt waits."""
    decode: WorkerView | None = None
    """Worker on which its answer decodes, if that may meet its objectives."""
    num_late_tokens: int = 0
    """Tokens of its prompt, if that is late."""


def _due_s(arrival: Arrival, view: WorkerView) -> float:
    """When the prompt is due on a worker: it gives way to other shares for the seconds of its own share's prompts that
    wait there, the more the less it weighs, and to those prompts. A resumed one goes first."""
    if arrival.is_resumed:
        return -inf
    share_s, last_due_s = view.prompts.share_s(arrival.share)
    behind_s = min(share_s / arrival.weight, LATE_S) if arrival.weight else LATE_S
    return max(arrival.wanted_s + behind_s, last_due_s)


def _is_late(arrival: Arrival, options: Iterable[PrefillOption]) -> bool:
    """Whether the prompt is unlikely to meet TTFT everywhere, or would cost others more than if it were late."""
    if arrival.is_probe or arrival.is_resumed:
        return False
    num_tokens, weight = arrival.blocks.num_tokens, arrival.weight
    return all(weight * each.chance - each.spared_if_late(num_tokens) < MIN_SCORE * weight for each in options)
