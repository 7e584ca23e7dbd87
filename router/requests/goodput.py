"""The ``goodput`` policy, the default: of all choices, the one that lets the most requests meet both objectives.

A choice earns the chance that the request meets TTFT and TPOT there, and pays for the misses that it causes: to the
answers that decode there or are about to, whose steps get longer, and to the prompts that will arrive behind it, by a
price per second of prefill. A prompt that has no chance to meet TTFT, or less than its seconds cost others, is *late*:
it runs behind all that still have one. A request that would earn nothing anywhere is refused, if its tier says so;
otherwise it *waits* while its answer would harm others, or, unless it is of no worth, until it has its turn.

Prompts are due in the order in which their objectives end, each share (a tenant's requests of one tier) behind its own
work, which counts the more the less it is worth: shares that send more than others get no more of the workers than by
weight. With one share, that is the order of arrival.

It keeps ledgers of its own requests (`pdserve.router.requests.ledger`), and all workers as columns of one array
(`pdserve.router.requests.worker_table`): what follows from a worker's report is computed once, and a decision takes a
fixed number of array operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from math import exp, inf, log
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pdserve.contracts.placement import WorkerRole
from pdserve.router.requests.ledger import TPOT_SPREAD, Answers, Joining, Prompts
from pdserve.router.requests.lengths import Errors, Lengths
from pdserve.router.requests.placement import Arrival, Binding, Placement
from pdserve.router.requests.policy import Costs, PrefillChoice, PromptBlocks, WorkerSnapshot, queue_s, tie_order
from pdserve.router.requests.worker_table import ROLES, FloatArray, IntArray, WorkerColumns, WorkerTable

LENIENT_TPOT_S = 1.0
"""Stands for no TPOT objective."""
MIN_TTFT_SPREAD_S = 3e-3
"""Lower bound for the error of a predicted TTFT: the scale of a logistic distribution."""
SLACK_VALUE = 0.02
"""Misses that a wait as long as the objective is worth: decides where nothing binds."""
MIN_CHANCE = 0.05
"""A prompt whose chance to meet TTFT, less what its seconds cost others, is below this everywhere is late."""
PRICE_MEMORY_S = 2.0
"""Time after which the harm of a placement counts 1 / e for the price."""
LATE_S = 20.0
"""Seconds after which a late prompt is due: it runs behind others for that long. One that waits has a turn then ..."""
TURN = 8
"""... as one of so many prompts."""
MAX_BOOKED_S = 60.0
"""Refused requests are asked to come back within this."""
MAX_PREFILL_SHARE = 0.9
"""Upper limit of the time that prefill takes from answers on a mixed worker, as a share of theirs."""
MAX_MEAN_STEP = 0.75
"""Mean step, prefills included, up to which a decode worker prefills, as a share of the TPOT objective."""
PREFILL, DECODE, MIXED = range(len(ROLES))


class Goodput(Placement):
    """Marginal goodput."""

    def __init__(self, costs: Costs, *, tpot_slo_s: float = 0.0) -> None:
        super().__init__(costs, tpot_slo_s=tpot_slo_s)
        self._workers = WorkerTable(costs)
        self._lengths = Lengths()
        self._answers = Answers()
        self._prompts = Prompts()
        self._requests: dict[int, _Request] = {}
        self._joining, self._late_joining = Joining(), Joining()
        self._num_since_turn, self._turn_s = 0, -inf
        """Prompts placed since the last one that had its turn, and its instant."""
        self._booked_s = 0.0
        """Instant by which the backlog is gone, with all that was refused before."""
        self._own_s = 0.0
        """Mean seconds of recent prompts."""
        self._harm, self._harm_s = 0.0, 0.0
        """Misses per second of delay, summed over recent placements, and the instant of the sum."""
        decode = costs.get(WorkerRole.DECODE)
        self._join_steps = 0.5 if decode is None else float(decode.pipeline_depth)
        """Steps of a decode worker that are planned already when an answer joins."""
        self._errors = {True: Errors(), False: Errors()}
        """Of prompts that are handed off, and of those computed where answers decode."""
        self._prefilled_s = np.zeros((2, 8))
        """Decaying seconds of prefill where answers decode, and the instant of the sum, by worker."""

    # Decisions

    def prefill(self, arrival: Arrival, workers: Sequence[WorkerSnapshot]) -> PrefillChoice | None:
        view = self._with_joining(arrival, self._view(arrival, workers))
        offers = self._offers(arrival, view)
        if offers is None:
            return None
        now_s, weight, slack_s = arrival.now_s, arrival.weight, arrival.wanted_s - arrival.now_s
        ttft_s, own_s, handoff = offers.ttft_s, offers.own_s, offers.handoff
        spread = np.where(handoff, self._errors[True].spread, self._errors[False].spread)
        spread_s = np.maximum(MIN_TTFT_SPREAD_S, spread * ttft_s)
        chance = _chance((slack_s - ttft_s) / spread_s)
        num_workers = len(set(offers.workers.tolist()))
        toll = self._price(now_s) / num_workers * own_s * ttft_s
        scale_s = np.maximum(slack_s, ttft_s) if slack_s < inf else 1.0
        gain = self._gains(weight, chance, offers, view) - toll - _slack_value(weight) * ttft_s / scale_s
        least_gain = MIN_CHANCE * weight
        is_hopeless = float(gain.max()) < least_gain
        is_refused = is_hopeless and arrival.may_refuse
        waits = is_hopeless and not arrival.may_refuse and self._has_to_wait(arrival, view)
        # Late, it would delay nothing that arrives while it waits, and what arrives later by half a chunk at most.
        chunk = np.minimum(1.0, offers.state.max_batch_tokens / (arrival.blocks.num_tokens - offers.num_cached))
        saved = toll * (ttft_s - own_s * (1 + chunk) / 2) / ttft_s
        is_late = float((weight * chance - saved).max()) < least_gain and not (arrival.is_probe or arrival.is_resumed)
        offered = [workers[index] for index in offers.workers]
        best = _least(arrival.blocks, offered, -gain, ttft_s, ~handoff & (offers.state.role == DECODE))
        if is_refused or is_late or waits:
            backlog_s = np.where(handoff | (not handoff.any()), self._ttft_s(arrival, offers), inf)
            last = _least(arrival.blocks, offered, backlog_s)
            if not is_refused:
                return offers.choice(last, offered)._replace(is_late=True, due_s=now_s + LATE_S, waits=waits)
            spacing_s = max(max(float(own_s.min()), self._own_s) / num_workers, self._end_spacing_s(view))
            retry_after_s = self._book(now_s, float(backlog_s[last]), spacing_s)
            return offers.choice(best, offered)._replace(retry_after_s=retry_after_s)
        harm_per_s = float(weight * chance[best] * (1 - chance[best]) / spread_s[best])
        return offers.choice(best, offered)._replace(harm_per_s=harm_per_s)

    def decode(
        self, arrival: Arrival, workers: Sequence[WorkerSnapshot], cut_off: AbstractSet[str], source_host: str
    ) -> Binding | None:
        workers = [worker for worker in workers if worker.role is WorkerRole.DECODE]
        if not workers:
            return None
        cost = self.costs[WorkerRole.DECODE]
        token_s = {is_same: cost.transfer_s(1, same_host=is_same) for is_same in (False, True)}
        view = self._view(arrival, workers, np.array([token_s[worker.host == source_host] for worker in workers]))
        weight = arrival.weight * (self._wanted_s(arrival.request_id) >= arrival.now_s)
        is_last_resort = np.array([worker.worker_id in cut_off for worker in workers])
        # One that would earn nothing waits for room rather than harm others.
        is_harmful = np.full(len(workers), not weight and self.tpot_slo_s > 0)
        if is_harmful.any():
            is_harmful &= ~self._spares(view.harm, view.step_s)
        best = _least(
            arrival.blocks, workers, is_last_resort, is_harmful, view.lacking, view.harm - weight * view.chance
        )
        self._bound(arrival.request_id)
        stall_slo_s = self._lengths.remaining(0) * ((arrival.tpot_slo_s or LENIENT_TPOT_S) - float(view.step_s[best]))
        return Binding(workers[best].worker_id, max(0.0, stall_slo_s) if weight else 0.0)

    # What became of them

    def placed(self, arrival: Arrival, choice: PrefillChoice) -> None:
        wanted_s = -inf if choice.is_late else arrival.wanted_s
        tpot_slo_s = arrival.tpot_slo_s or LENIENT_TPOT_S
        self._requests[arrival.request_id] = _Request(
            wanted_s, tpot_slo_s, arrival.weight, arrival.now_s, choice.ttft_s, choice.handoff
        )
        if choice.handoff:
            joining = self._late_joining if choice.is_late else self._joining
            joining.add(arrival.request_id, arrival.blocks.num_tokens)
        self._num_since_turn += 1
        if choice.is_late and _is_due(arrival):
            self._num_since_turn, self._turn_s = 0, arrival.now_s
        self._harm += choice.harm_per_s
        self._own_s += 0.1 * (choice.own_s - self._own_s)
        row = self._row(choice.worker_id)
        if self._workers.columns(slice(row, row + 1)).role[0] != PREFILL and not choice.is_late:
            self._workers.prefills(row, choice.own_s)
            self._prefilled_s[:, row] = self._recent_s(np.int64(row), arrival.now_s) + choice.own_s, arrival.now_s
        num_new = arrival.blocks.num_tokens - choice.num_cached_tokens
        share = None if choice.is_late else arrival.share
        self._prompts.add(arrival.request_id, row, choice.due_s, num_new, share, choice.own_s)

    def prefilled(self, request_id: int, worker_id: str) -> None:
        self._prompts.remove(request_id)

    def decoding(self, request_id: int, began_s: float, num_tokens: int, worker: WorkerSnapshot) -> None:
        request = self._requests.get(request_id, _Request(inf, self.tpot_slo_s or LENIENT_TPOT_S, 1.0))
        if request.ttft_s and request.wanted_s > -inf and began_s > request.placed_s:
            self._errors[request.handoff].add(log((began_s - request.placed_s) / request.ttft_s))
            self._requests[request_id] = request._replace(ttft_s=0.0)
        if began_s <= request.wanted_s:  # another miss costs a late one nothing
            row, base = self._row(worker.worker_id), float(num_tokens - worker.num_steps)
            if request.handoff and num_tokens == 1:
                base -= self._join_steps
            self._remove_answer(request_id)
            self._answers.add(request_id, row, began_s, base, request.tpot_slo_s, request.weight)
            self._workers.answer_began(row, worker.num_steps)
            self._count_lengths()

    def left(self, request_id: int, num_tokens: int) -> None:
        self._remove_answer(request_id)
        self._requests.pop(request_id, None)
        self._prompts.remove(request_id)
        self._bound(request_id)
        if num_tokens:
            self._lengths.add(num_tokens)
            self._count_lengths()

    # Ledgers

    def _row(self, worker_id: str) -> int:
        """Row of the worker, for which there is space in all ledgers."""
        row = self._workers.row(worker_id)
        num_new = self._workers.num_rows - self._prefilled_s.shape[1]
        if num_new > 0:
            self._prefilled_s = np.pad(self._prefilled_s, ((0, 0), (0, num_new)))
        self._prompts.reserve(self._workers.num_rows)
        self._answers.reserve(self._workers.num_rows)
        return row

    def _bound(self, request_id: int) -> None:
        self._joining.remove(request_id)
        self._late_joining.remove(request_id)

    def _remove_answer(self, request_id: int) -> None:
        row = self._answers.remove(request_id)
        if row is not None:
            self._workers.answer_left(row, was_last=not self._answers.is_any_on(row))

    def _count_lengths(self) -> None:
        """An answer began or ended."""
        if self._lengths.is_due():
            self._lengths.count(self._answers.num_tokens(self._workers.columns(slice(None)).num_steps))

    def _wanted_s(self, request_id: int) -> float:
        request = self._requests.get(request_id)
        return inf if request is None else request.wanted_s

    # Parts of a decision

    def _view(
        self, arrival: Arrival, workers: Sequence[WorkerSnapshot], pulled_token_s: FloatArray | float = 0.0
    ) -> _View:
        """``pulled_token_s``: seconds to pull each token that a worker does not cache."""
        table, blocks = self._workers, arrival.blocks
        rows = table.rows(workers)
        if table.num_rows > self._prefilled_s.shape[1]:
            self._row(workers[0].worker_id)
        state = table.columns(rows)
        is_stale = table.is_stale[rows] & (state.role != PREFILL)
        if is_stale.any():
            stale = rows[is_stale]
            self._answers.update(stale, table.columns(stale), self._lengths)
            table.is_stale[stale] = False
        num_cached = np.array(blocks.num_cached_tokens_on(workers))
        length, tpot_slo_s = self._lengths.remaining(0), arrival.tpot_slo_s or LENIENT_TPOT_S
        step_s = state.next_step_s + blocks.num_tokens * state.token_s
        lacking = _lacking(blocks, state, num_cached)
        # Token 1 ends the first step that is planned once the prompt is there, on average in the midst of another.
        join_s = (self._join_steps - 0.5) * step_s * (state.role == DECODE)
        stall_s = join_s + pulled_token_s * (blocks.num_tokens - num_cached)
        if (is_waiting := state.num_free_blocks < blocks.num_blocks()).any():
            # All that is held goes in the time of an answer.
            num_held = np.maximum(state.num_context_tokens, blocks.num_tokens)
            stall_s = stall_s + length * step_s * (lacking * is_waiting) * blocks.block_size / num_held
        tpot = (step_s + stall_s / length) / tpot_slo_s
        if (is_mixed := state.role == MIXED).any() and (state.role == DECODE).any():
            # Elsewhere an answer decodes beside no prefill.
            busy = np.minimum(self._recent_s(rows, arrival.now_s) / self._answer_s(), MAX_PREFILL_SHARE)
            tpot = tpot + step_s * busy / (1 - busy) * is_mixed / tpot_slo_s
        harm = self._answers.harm(rows, blocks.num_tokens) + _slack_value(arrival.weight) * tpot
        return _View(rows, state, num_cached, lacking, step_s, tpot, _tpot_chance(tpot), harm)

    def _offers(self, arrival: Arrival, view: _View) -> _Offers | None:
        """Candidates for prefill, as in `pdserve.router.requests.policy.prefill_candidates`, decode workers that may
        prefill beside prefill workers, and mixed workers once more, to hand off; ``None`` without any."""
        num_tokens, state = arrival.blocks.num_tokens, view.state
        role = state.role.astype(np.int64)
        is_prefill, is_decode = role == PREFILL, role == DECODE
        prefill_s = np.array([self.costs[each].prefill_s(num_tokens) if each in self.costs else 0.0 for each in ROLES])
        raw_s = prefill_s[role]
        for index in view.num_cached.nonzero()[0]:
            num_cached = int(view.num_cached[index])
            raw_s[index] = self.costs[ROLES[role[index]]].prefill_s(num_tokens - num_cached, num_cached)
        own_s = raw_s * state.prefill_correction
        if not is_prefill.any():
            is_offered = ~is_prefill
        elif not is_decode.any():
            is_offered = role == MIXED
        else:
            is_offered = ~is_decode
            if self.tpot_slo_s and not arrival.is_probe:
                is_offered |= is_decode & self._may_prefill(arrival, view, own_s)
        index = is_offered.nonzero()[0]
        if not len(index):
            return None
        handoff = is_prefill[index]
        if is_decode.any() and len(mixed := (role == MIXED).nonzero()[0]):
            index, handoff = np.append(index, mixed), np.append(handoff, np.ones(len(mixed), np.bool_))
        rows = view.rows[index]
        due_s = self._due_s(arrival, rows)
        offers = _Offers(
            workers=index,
            state=self._workers.columns(rows),
            handoff=handoff,
            num_cached=view.num_cached[index],
            raw_s=raw_s[index],
            own_s=own_s[index],
            due_s=due_s,
            ttft_s=own_s[index],
        )
        return offers._replace(ttft_s=self._ttft_s(arrival, offers, self._prompts.num_tokens_after(rows, due_s)))

    def _due_s(self, arrival: Arrival, rows: IntArray) -> FloatArray:
        """When the prompt is due on each worker: it gives way to other shares for the seconds of its own share's
        prompts that wait there, the more the less it is worth, and to those prompts. A resumed one goes first."""
        if arrival.is_resumed:
            return np.full(len(rows), -inf)
        share_s = self._prompts.seconds(arrival.share, rows)
        turn_s = np.minimum(share_s / arrival.weight, LATE_S) if arrival.weight else LATE_S
        due_s: FloatArray = np.maximum(arrival.wanted_s + turn_s, self._prompts.last_due_s(arrival.share, rows))
        return due_s

    def _ttft_s(self, arrival: Arrival, offers: _Offers, num_behind: IntArray | None = None) -> FloatArray:
        """Seconds to token 0 on each worker, as `pdserve.router.requests.policy.predict_ttft_s` has it, if
        ``num_behind`` of the tokens that wait there run after the prompt."""
        state, num_cached = offers.state, offers.num_cached
        num_ahead, ahead_s = state.num_waiting_tokens, state.queue_s
        if num_behind is not None and num_behind.any():
            num_ahead, ahead_s = np.maximum(state.num_tokens_in_flight, num_ahead - num_behind), ahead_s.copy()
            for index in num_behind.nonzero()[0]:
                cost = self.costs[ROLES[int(state.role[index])]]
                ahead_s[index] = queue_s(int(num_ahead[index]), int(state.max_batch_tokens[index]), cost)
        seconds = ahead_s + offers.raw_s
        beside = (state.num_decoding * (state.role != PREFILL)).nonzero()[0]
        if len(beside):
            num_left = num_ahead[beside] + arrival.blocks.num_tokens - num_cached[beside]
            budget = state.max_batch_tokens[beside]
            added_s = [
                self.costs[ROLES[int(role)]].decode_beside_s(int(chunk), int(num), int(num_context))
                for role, chunk, num, num_context in zip(
                    state.role[beside].tolist(),
                    np.minimum(num_left, budget).tolist(),
                    state.num_decoding[beside].tolist(),
                    state.num_context_tokens[beside].tolist(),
                    strict=True,
                )
            ]
            seconds[beside] += np.ceil(num_left / budget) * added_s
        seconds *= state.mixed_correction
        return seconds

    def _gains(self, weight: float, chance: FloatArray, offers: _Offers, view: _View) -> FloatArray:
        """Chance of each candidate to meet both objectives, less the misses of answers; ``chance`` is that of TTFT."""
        gain = np.zeros(len(chance))
        if offers.handoff.any():
            is_decode = view.state.role == DECODE
            best = float(np.max(weight * view.chance[is_decode] - view.harm[is_decode]))
            # The harm of decoding remains if TTFT is missed.
            gain = best - (1 - chance) * max(0.0, best)
        local = (~offers.handoff).nonzero()[0]
        if len(local):
            index = offers.workers[local]
            gain[local] = weight * chance[local] * view.chance[index] - view.harm[index]
        beside = (offers.state.role != PREFILL).nonzero()[0]
        if len(beside):
            gain[beside] -= self._answers.delay_harm(view.rows[offers.workers[beside]], offers.own_s[beside])
        return gain

    def _with_joining(self, arrival: Arrival, view: _View) -> _View:
        """The view once those have joined that are about to be handed off; each decode worker gets its part."""
        decode = (view.state.role == DECODE).nonzero()[0]
        if not self._joining.num or not len(decode):
            return view
        rows, chance, harm = view.rows[decode], view.chance.copy(), view.harm.copy()
        state = self._workers.columns(rows)
        slo_s, num_tokens = arrival.tpot_slo_s or LENIENT_TPOT_S, arrival.blocks.num_tokens
        num_ahead = self._joining.num / len(decode)
        ahead_s = self._joining.step_s(state)
        own_s = state.answer_s + num_tokens * state.token_s
        tpot, ahead = view.tpot[decode] + ahead_s / slo_s, ahead_s / state.token_s
        chance[decode] = _tpot_chance(tpot)
        harm[decode] += (
            self._answers.harm(rows, ahead + num_tokens)
            - self._answers.harm(rows, ahead - state.answer_s / state.token_s)
            - self._answers.harm(rows, num_tokens)
            + num_ahead * arrival.weight * (_tpot_chance(tpot - own_s / slo_s) - chance[decode])
        )
        return view._replace(chance=chance, harm=harm)

    def _has_to_wait(self, arrival: Arrival, view: _View) -> bool:
        """Whether a request that would earn nothing finds no worker with room that it spares, nor an idle one. It gives
        way to answers that may still meet their objectives; one of no worth, to those that may come, too. To wait is of
        no use if not even a lone answer is likely to meet the tightest TPOT objective."""
        if arrival.is_probe or arrival.wanted_s == inf:
            return False
        if arrival.weight and not len(self._answers) and not self._joining.num:
            return False
        if _is_due(arrival) and (self._num_since_turn >= TURN or arrival.now_s - self._turn_s >= LATE_S):
            return False
        joining = self._joining, self._late_joining
        num_joining = sum(each.num for each in joining)
        blocks, decodes = arrival.blocks, view.state.role != PREFILL
        is_idle = decodes & (view.state.num_decoding == 0) & (view.state.num_waiting_tokens == 0)
        if np.count_nonzero(is_idle) > num_joining:
            return False
        cost = self.costs.get(WorkerRole.DECODE) or self.costs[WorkerRole.MIXED]
        correction = float(view.state.token_s[decodes].min(initial=inf)) / cost.decode_token_s
        lone_tpot = cost.decode_s(1, blocks.num_tokens) * correction / self.tpot_slo_s if self.tpot_slo_s else inf
        if _tpot_chance(np.float64(lone_tpot)) < 1 - MIN_CHANCE:
            return False
        index = (decodes & (view.lacking == 0) & self._spares(view.harm, view.step_s)).nonzero()[0]
        if not len(index):
            return True
        # Those that are about to be handed off take their part of the room.
        state = self._workers.columns(view.rows[index])
        num_blocks = sum(each.num_tokens for each in joining) / blocks.block_size
        left = state._replace(
            num_decoding=state.num_decoding + num_joining / len(index),
            num_free_blocks=state.num_free_blocks - num_blocks / len(index),
        )
        step_s = view.step_s[index] + sum(each.step_s(state) for each in joining)
        spares = self._spares(view.harm[index], step_s)
        return not (spares & (_lacking(blocks, left, view.num_cached[index]) == 0)).any()

    def _spares(self, harm: FloatArray, step_s: FloatArray) -> npt.NDArray[np.bool_]:
        """Whether one more answer on each worker, for steps of ``step_s``, costs others little, and leaves those a
        chance that may come with the tightest TPOT objective."""
        least_chance = 1 - MIN_CHANCE
        spares: npt.NDArray[np.bool_] = (harm <= MIN_CHANCE) & (_tpot_chance(step_s / self.tpot_slo_s) >= least_chance)
        return spares

    def _book(self, now_s: float, backlog_s: float, spacing_s: float) -> float:
        """Seconds after which a refused request would find the backlog gone: refused ones are asked back one by one,
        ``spacing_s`` apart."""
        self._booked_s = min(max(self._booked_s, now_s + backlog_s) + spacing_s, now_s + MAX_BOOKED_S)
        return self._booked_s - now_s

    def _end_spacing_s(self, view: _View) -> float:
        """Seconds between two ends of answers on all workers; 0 if none decodes."""
        num, step_s = view.state.num_decoding, view.state.step_s
        ends_per_s = float(np.sum(np.divide(num, step_s, out=np.zeros(len(num)), where=step_s > 0)))
        return self._lengths.remaining(0) / ends_per_s if ends_per_s else 0.0

    def _may_prefill(self, arrival: Arrival, view: _View, own_s: FloatArray) -> npt.NDArray[np.bool_]:
        """Whether each decode worker has the blocks, and a mean step within TPOT in spite of its prefills, this one of
        ``own_s`` included, during a median answer. Over a longer time bursts of prefills would even out, but half of
        the answers do not last longer."""
        share = (self._recent_s(view.rows, arrival.now_s) + own_s) / self._answer_s()
        is_fast = view.step_s <= MAX_MEAN_STEP * self.tpot_slo_s * (1 - share)
        # A prompt that is prefilled where it decodes takes its blocks early: all answers must have room for their rest.
        state = view.state
        num_growing = self._lengths.remaining(0) * (state.num_decoding + 1) // arrival.blocks.block_size
        left = state._replace(num_free_blocks=state.num_free_blocks - num_growing)
        may_prefill: npt.NDArray[np.bool_] = is_fast & (_lacking(arrival.blocks, left, view.num_cached) == 0)
        return may_prefill

    def _answer_s(self) -> float:
        """Seconds of a median answer that just meets TPOT."""
        return self._lengths.median * (self.tpot_slo_s or LENIENT_TPOT_S)

    def _recent_s(self, rows: IntArray | np.int64, now_s: float) -> FloatArray:
        """Decaying seconds of prefill on decode workers."""
        seconds, at_s = self._prefilled_s[:, rows]
        recent_s: FloatArray = seconds * np.exp((at_s - now_s) / self._answer_s())
        return recent_s

    def _price(self, now_s: float) -> float:
        """Misses among all workers that a second of delay to each arrival would cause, per second of arrivals."""
        self._harm *= exp((self._harm_s - now_s) / PRICE_MEMORY_S)
        self._harm_s = now_s
        return self._harm / PRICE_MEMORY_S


class _Request(NamedTuple):
    wanted_s: float
    """Instant at which token 0 is due; in the past, infinitely, for late ones."""
    tpot_slo_s: float
    weight: float
    placed_s: float = 0.0
    ttft_s: float = 0.0
    """Predicted seconds from ``placed_s`` to token 0; 0 once that was held against what came."""
    handoff: bool = False


class _View(NamedTuple):
    """Workers of a decision, and what decoding the answer on each of them means."""

    rows: IntArray
    state: WorkerColumns
    num_cached: IntArray
    """Tokens of the prompt that it caches."""
    lacking: FloatArray
    """Blocks and batch slots, as in `pdserve.router.requests.policy.shortfall`."""
    step_s: FloatArray
    """Seconds of a step with the answer."""
    tpot: FloatArray
    """Predicted TPOT, as a share of the objective."""
    chance: FloatArray
    """Chance to meet TPOT."""
    harm: FloatArray
    """Expected misses of other answers, and what its own time is worth."""


class _Offers(NamedTuple):
    """Workers that may compute a prompt."""

    workers: IntArray
    """Index among all workers of the decision."""
    state: WorkerColumns
    handoff: npt.NDArray[np.bool_]
    num_cached: IntArray
    raw_s: FloatArray
    """Seconds of the prompt's own tokens, not corrected ..."""
    own_s: FloatArray
    """... and corrected."""
    due_s: FloatArray
    ttft_s: FloatArray

    def choice(self, index: int, offered: Sequence[WorkerSnapshot]) -> PrefillChoice:
        return PrefillChoice(
            offered[index].worker_id,
            bool(self.handoff[index]),
            float(self.ttft_s[index]),
            int(self.num_cached[index]),
            own_s=float(self.own_s[index]),
            due_s=float(self.due_s[index]),
        )


def _is_due(arrival: Arrival) -> bool:
    """Whether a request that would earn nothing has waited for so long that it has a turn."""
    return arrival.weight > 0 and arrival.now_s - arrival.queued_s >= LATE_S


def _slack_value(weight: float) -> float:
    return SLACK_VALUE * (weight or 1.0)


def _lacking(blocks: PromptBlocks, state: WorkerColumns, num_cached_tokens: IntArray) -> FloatArray:
    """`pdserve.router.requests.policy.shortfall` of each worker."""
    if (state.num_free_blocks >= blocks.num_blocks()).all() and (state.num_decoding < state.max_batch_size).all():
        return np.zeros(len(num_cached_tokens))
    num_new_blocks = blocks.num_blocks() - num_cached_tokens // blocks.block_size
    missing_blocks = np.maximum(0.0, num_new_blocks - state.num_free_blocks)
    lacking: FloatArray = missing_blocks + np.maximum(0.0, state.num_decoding + 1 - state.max_batch_size)
    return lacking


def _least(blocks: PromptBlocks, workers: Sequence[WorkerSnapshot], *keys: npt.NDArray[Any]) -> int:
    """Index of the least by keys in turn, then by `tie_order`."""
    index = (keys[0] == keys[0].min()).nonzero()[0]
    for key in keys[1:]:
        if len(index) == 1:
            break
        index = index[key[index] == key[index].min()]
    return int(min(index.tolist(), key=lambda each: tie_order(blocks, workers[each])))


def _tpot_chance(tpot: FloatArray | np.float64) -> FloatArray:
    """``tpot``: predicted, as a share of the objective."""
    return _chance((1 - tpot) / TPOT_SPREAD)


def _chance(margin: FloatArray | np.float64) -> FloatArray:
    """Logistic distribution."""
    chance: FloatArray = 1 / (1 + np.exp(np.minimum(-margin, 50.0)))
    return chance
