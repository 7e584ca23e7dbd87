"""The ``goodput`` policy, the default: of all choices, the one that lets the most requests meet both objectives.

A choice earns the chance that the request meets TTFT and TPOT there, and pays for the misses that it causes: to the
answers that decode there, whose steps get longer, and to the prompts that will arrive behind it, by a price per second
of prefill. A prompt that has no chance to meet TTFT, or less than its seconds cost others, is *late*: it runs
behind all that still have one. A request that would earn nothing anywhere is refused, if its tier says so.

Prompts are due in the order in which their objectives end, each share (a tenant's requests of one tier) behind its own
work, which counts the more the less it is worth: shares that send more than others get no more of the workers than by
weight. With one share, that is the order of arrival.

It keeps a ledger of its own requests: prompts that wait, in the order of workers, and answers that decode, as columns
of numpy arrays, so that a decision takes a fixed number of array operations.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import exp, inf, log
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pdserve.contracts.placement import WorkerRole
from pdserve.router.requests.placement import Arrival, Binding, Placement
from pdserve.router.requests.policy import (
    Costs,
    PrefillChoice,
    PromptBlocks,
    WorkerSnapshot,
    predict_ttft_s,
    prefill_candidates,
    shortfall,
)

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

TPOT_SPREAD = 0.05
"""Error of a predicted TPOT, as a share of the objective: the scale of a logistic distribution."""
LENIENT_TPOT_S = 1.0
"""Stands for no TPOT objective."""
TTFT_SPREAD, MIN_TTFT_SPREAD_S = 0.08, 3e-3
"""Error of a predicted TTFT, as a share of it, before any was seen, and its lower bound: scales of logistic
distributions."""
SLACK_VALUE = 0.02
"""Misses that a wait as long as the objective is worth: decides where nothing binds."""
MIN_CHANCE = 0.05
"""A prompt whose chance to meet TTFT, less what its seconds cost others, is below this everywhere is late."""
PRICE_MEMORY_S = 2.0
"""Time after which the harm of a placement counts 1 / e for the price."""
LATE_S = 20.0
"""Seconds after which a late prompt is due: it runs behind others for that long."""
MAX_BOOKED_S = 60.0
"""Refused requests are asked to come back within this."""
MAX_MEAN_STEP = 0.75
"""Mean step, prefills included, up to which a decode worker prefills, as a share of the TPOT objective."""
PRIOR_TOKENS, PRIOR_ANSWERS = 200, 20.0
"""Mean length and weight of the answers assumed before any has ended."""
LENGTH_MEMORY = 2000.0
"""Answers after which an ended one counts 1 / e."""
CHANGES_PER_COUNT = 32
"""Answers that begin or end between two counts of lengths."""
_SCALE = 1 / (2 * log(2))
"""Scale of a logistic distribution, as a share of its mean absolute deviation."""
MAX_LENGTH = 8192
"""Answers are counted as at most this long."""


class Goodput(Placement):
    """Marginal goodput."""

    def __init__(self, costs: Costs, *, tpot_slo_s: float = 0.0) -> None:
        super().__init__(costs, tpot_slo_s=tpot_slo_s)
        self._lengths = _Lengths()
        self._answers = _Answers()
        self._prompts = _Prompts()
        self._requests: dict[int, _Request] = {}
        self._booked_s = 0.0
        """Instant by which the backlog is gone, with all that was refused before."""
        self._harm, self._harm_s = 0.0, 0.0
        """Misses per second of delay, summed over recent placements, and the instant of the sum."""
        self._errors = {True: _Errors(), False: _Errors()}
        """Of prompts that are handed off, and of those computed where answers decode."""
        self._prefilled_s: dict[str, tuple[float, float]] = {}
        """Decaying seconds of prefill where answers decode, and the instant of the sum, by worker."""

    # Decisions

    def prefill(self, arrival: Arrival, workers: Sequence[WorkerSnapshot]) -> PrefillChoice | None:
        blocks, now_s, slack_s = arrival.blocks, arrival.now_s, arrival.wanted_s - arrival.now_s
        offered = prefill_candidates(workers)
        if not offered:
            return None
        can_hand_off = any(handoff for _, handoff in offered)
        if can_hand_off and self.tpot_slo_s and not arrival.is_probe:
            offered += [(worker, False) for worker in workers if worker.role is WorkerRole.DECODE]
        decoders = [worker for worker in workers if worker.role is not WorkerRole.PREFILL]
        candidates, cached, own_s = [], {}, {}
        for worker, handoff in offered:
            num = blocks.num_cached_tokens(worker.cached_blocks)
            seconds = self.costs[worker.role].prefill_s(blocks.num_tokens - num, num) * worker.prefill_correction
            is_local = can_hand_off and worker.role is WorkerRole.DECODE
            if is_local and not self._may_prefill(arrival, worker, num, seconds):
                continue
            candidates.append((worker, handoff))
            cached[worker.worker_id], own_s[worker.worker_id] = num, seconds
        stalls_s = {worker.worker_id: own_s[worker.worker_id] for worker, handoff in candidates if not handoff}
        gains = _Gains(self, arrival, decoders, stalls_s)
        handed_off = max(
            (gains.of(worker, arrival.weight) for worker in decoders if worker.role is WorkerRole.DECODE), default=0.0
        )
        price = self._price(now_s) / len(candidates)
        best, late, most = (inf, inf, True, _NO_CHOICE, 0.0), (inf, _NO_CHOICE), -inf
        for worker, handoff in candidates:
            cost = self.costs[worker.role]
            num_cached = cached[worker.worker_id]
            due_s = self._due_s(arrival, worker.worker_id)
            num_behind = self._prompts.num_tokens_after(worker.worker_id, due_s)
            ahead = worker._replace(num_waiting_tokens=max(0, worker.num_waiting_tokens - num_behind))
            ttft_s = predict_ttft_s(ahead, blocks.num_tokens, num_cached, cost)
            spread_s = max(MIN_TTFT_SPREAD_S, self._errors[handoff].spread * ttft_s)
            chance = _chance((slack_s - ttft_s) / spread_s)
            choice = PrefillChoice(
                worker.worker_id, handoff, ttft_s, num_cached, own_s=own_s[worker.worker_id], due_s=due_s
            )
            # The harm of decoding remains if TTFT is missed.
            kept = handed_off - (1 - chance) * max(0.0, handed_off)
            gain = kept if handoff else gains.of(worker, arrival.weight * chance, is_local=True)
            toll = price * own_s[worker.worker_id] * ttft_s
            most = max(most, arrival.weight * chance - toll)
            scale_s = max(slack_s, ttft_s) if slack_s < inf else 1.0
            gain -= toll + gains.slack_value * ttft_s / scale_s
            harm = arrival.weight * chance * (1 - chance) / spread_s
            best = min(best, (-gain, ttft_s, worker.role is WorkerRole.DECODE, choice, harm))
            if handoff or not can_hand_off:
                late = min(late, (predict_ttft_s(worker, blocks.num_tokens, num_cached, cost), choice))
        loss, *_, choice, harm = best
        least = MIN_CHANCE * arrival.weight
        if arrival.may_refuse and -loss < least:
            spacing_s = min(own_s.values()) / len(candidates)
            return choice._replace(retry_after_s=self._book(now_s, late[0], max(spacing_s, gains.spacing_s())))
        if most < least and not arrival.is_probe:
            return late[1]._replace(is_late=True, due_s=now_s + LATE_S)
        self._harm += harm
        if not choice.handoff:
            self._prefilled_s[choice.worker_id] = (
                self._recent_s(choice.worker_id, now_s) + own_s[choice.worker_id],
                now_s,
            )
        return choice

    def decode(
        self, arrival: Arrival, workers: Sequence[WorkerSnapshot], cut_off: AbstractSet[str], source_host: str
    ) -> Binding | None:
        workers = [worker for worker in workers if worker.role is WorkerRole.DECODE]
        if not workers:
            return None
        blocks, cost = arrival.blocks, self.costs[WorkerRole.DECODE]
        gains = _Gains(self, arrival, workers)
        is_in_time = self._wanted_s(arrival.request_id) >= arrival.now_s
        weight = arrival.weight * is_in_time
        options = []
        for worker in workers:
            num_cached = blocks.num_cached_tokens(worker.cached_blocks)
            stall_s = cost.transfer_s(blocks.num_tokens - num_cached, same_host=worker.host == source_host)
            gain = gains.of(worker, weight, own_stall_s=stall_s)
            is_last_resort = worker.worker_id in cut_off
            lacking = shortfall(blocks, worker, num_cached_tokens=num_cached)
            options.append((is_last_resort, lacking, -gain, worker.worker_id))
        worker_id = min(options)[-1]
        return Binding(worker_id, gains.stall_slo_s(worker_id) if weight else 0.0)

    # What became of them

    def placed(self, arrival: Arrival, choice: PrefillChoice) -> None:
        wanted_s = -inf if choice.is_late else arrival.wanted_s
        tpot_slo_s = arrival.tpot_slo_s or LENIENT_TPOT_S
        self._requests[arrival.request_id] = _Request(
            wanted_s, tpot_slo_s, arrival.weight, arrival.now_s, choice.ttft_s, choice.handoff
        )
        num_new = arrival.blocks.num_tokens - choice.num_cached_tokens
        share = None if choice.is_late else arrival.share
        self._prompts.add(arrival.request_id, choice.worker_id, choice.due_s, num_new, share, choice.own_s)

    def prefilled(self, request_id: int, worker_id: str) -> None:
        self._prompts.remove(request_id)

    def decoding(self, request_id: int, began_s: float, num_tokens: int, worker: WorkerSnapshot) -> None:
        request = self._requests.get(request_id, _Request(inf, self.tpot_slo_s or LENIENT_TPOT_S, 1.0))
        if request.ttft_s and request.wanted_s > -inf and began_s > request.placed_s:
            self._errors[request.handoff].add(log((began_s - request.placed_s) / request.ttft_s))
            self._requests[request_id] = request._replace(ttft_s=0.0)
        if began_s <= request.wanted_s:  # another miss costs a late one nothing
            self._answers.add(request_id, worker.worker_id, began_s, num_tokens - worker.num_steps, request)
            self._lengths.changed(self._answers)

    def left(self, request_id: int, num_tokens: int) -> None:
        self._answers.remove(request_id)
        self._requests.pop(request_id, None)
        self._prompts.remove(request_id)
        if num_tokens:
            self._lengths.add(num_tokens)
            self._lengths.changed(self._answers)

    # Parts

    def _wanted_s(self, request_id: int) -> float:
        request = self._requests.get(request_id)
        return inf if request is None else request.wanted_s

    def _due_s(self, arrival: Arrival, worker_id: str) -> float:
        """When the prompt is due: it gives way to other shares for the seconds of its own share's prompts that wait on
        the worker, the more the less it is worth, and to those prompts."""
        share_s = self._prompts.seconds(worker_id, arrival.share)
        turn_s = min(share_s / arrival.weight, LATE_S) if arrival.weight else LATE_S
        return max(arrival.wanted_s + turn_s, self._prompts.last_due_s(worker_id, arrival.share))

    def _book(self, now_s: float, backlog_s: float, spacing_s: float) -> float:
        """Seconds after which a refused request would find the backlog gone: refused ones are asked back one by one,
        ``spacing_s`` apart."""
        self._booked_s = min(max(self._booked_s, now_s + backlog_s) + spacing_s, now_s + MAX_BOOKED_S)
        return self._booked_s - now_s

    def _may_prefill(self, arrival: Arrival, worker: WorkerSnapshot, num_cached_tokens: int, own_s: float) -> bool:
        """Whether a decode worker has the blocks, and a mean step within TPOT in spite of its prefills, this one of
        ``own_s`` included, during a median answer. Over a longer time bursts of prefills would even out, but half of
        the answers do not last longer."""
        cost, num_answers = self.costs[worker.role], worker.num_decoding + 1
        step_s = cost.decode_s(num_answers, worker.num_context_tokens + arrival.blocks.num_tokens)
        share = (self._recent_s(worker.worker_id, arrival.now_s) + own_s) / self._answer_s()
        is_fast = step_s * worker.decode_correction <= MAX_MEAN_STEP * self.tpot_slo_s * (1 - share)
        return is_fast and self._may_grow(arrival.blocks, worker, num_cached_tokens)

    def _answer_s(self) -> float:
        """Seconds of a median answer that just meets TPOT."""
        return self._lengths.median * (self.tpot_slo_s or LENIENT_TPOT_S)

    def _recent_s(self, worker_id: str, now_s: float) -> float:
        seconds, at_s = self._prefilled_s.get(worker_id, (0.0, now_s))
        return seconds * exp((at_s - now_s) / self._answer_s())

    def _may_grow(self, blocks: PromptBlocks, worker: WorkerSnapshot, num_cached_tokens: int) -> bool:
        """Whether ``worker`` has room for the prompt and the rest of all answers: a prompt that is prefilled where it
        decodes takes its blocks early."""
        num_blocks = self._lengths.remaining(0) * (worker.num_decoding + 1) / blocks.block_size
        left = worker._replace(num_free_blocks=worker.num_free_blocks - int(num_blocks))
        return not shortfall(blocks, left, num_cached_tokens=num_cached_tokens)

    def _price(self, now_s: float) -> float:
        """Misses among all workers that a second of delay to each arrival would cause, per second of arrivals."""
        self._harm *= exp((self._harm_s - now_s) / PRICE_MEMORY_S)
        self._harm_s = now_s
        return self._harm / PRICE_MEMORY_S


_NO_CHOICE = PrefillChoice("", False, 0.0, 0)


class _Request(NamedTuple):
    wanted_s: float
    """Instant at which token 0 is due; in the past, infinitely, for late ones."""
    tpot_slo_s: float
    weight: float
    placed_s: float = 0.0
    ttft_s: float = 0.0
    """Predicted seconds from ``placed_s`` to token 0; 0 once that was held against what came."""
    handoff: bool = False


class _Errors:
    """How far predictions of TTFT are off, learned from log-ratios of what came to what was predicted."""

    def __init__(self) -> None:
        self.spread = TTFT_SPREAD
        """Scale of a logistic distribution."""
        self._weight, self._sum = PRIOR_ANSWERS, PRIOR_ANSWERS * TTFT_SPREAD / _SCALE

    def add(self, log_ratio: float) -> None:
        kept = 1 - 1 / LENGTH_MEMORY
        self._weight = self._weight * kept + 1
        self._sum = self._sum * kept + abs(log_ratio)
        self.spread = _SCALE * self._sum / self._weight


class _Prompt(NamedTuple):
    """A prompt that waits on a worker, or is computed there; in the order of workers."""

    due_s: float
    request_id: int
    num_tokens: int
    worker_id: str
    share: str | None
    """None for a late one."""
    own_us: int


class _Prompts:
    """Prompts that the last chunk has not been planned of, in the order of each worker."""

    def __init__(self) -> None:
        self._prompts: dict[int, _Prompt] = {}
        self._in_time: dict[str, list[_Prompt]] = {}
        """By worker, in order."""
        self._num_late_tokens: Counter[str] = Counter()
        self._shares_us: Counter[tuple[str, str]] = Counter()
        """Predicted microseconds by worker and share: whole numbers, whose sum returns to 0."""
        self._last_due_s: dict[tuple[str, str], float] = {}
        """Latest due time, by worker and share, of the prompts that wait and are due at all."""

    def add(
        self, request_id: int, worker_id: str, due_s: float, num_tokens: int, share: str | None, own_s: float
    ) -> None:
        self.remove(request_id)
        prompt = _Prompt(due_s, request_id, num_tokens, worker_id, share, int(own_s * 1e6))
        self._prompts[request_id] = prompt
        if share is None:
            self._num_late_tokens[worker_id] += num_tokens
        else:
            insort(self._in_time.setdefault(worker_id, []), prompt)
            self._shares_us[worker_id, share] += prompt.own_us
            if due_s < inf:
                self._last_due_s[worker_id, share] = max(due_s, self.last_due_s(worker_id, share))

    def remove(self, request_id: int) -> None:
        prompt = self._prompts.pop(request_id, None)
        if prompt is None:
            return
        worker_id, share = prompt.worker_id, prompt.share
        if share is None:
            self._num_late_tokens[worker_id] -= prompt.num_tokens
        else:
            in_time = self._in_time[worker_id]
            del in_time[bisect_left(in_time, prompt)]
            self._shares_us[worker_id, share] -= prompt.own_us
            if not self._shares_us[worker_id, share]:
                del self._shares_us[worker_id, share]
                self._last_due_s.pop((worker_id, share), None)

    def seconds(self, worker_id: str, share: str) -> float:
        """Predicted seconds of the prompts of a share that wait on a worker."""
        return self._shares_us[worker_id, share] / 1e6

    def last_due_s(self, worker_id: str, share: str) -> float:
        """When the last of the prompts of a share that wait on a worker is due."""
        return self._last_due_s.get((worker_id, share), -inf)

    def num_tokens_after(self, worker_id: str, due_s: float) -> int:
        """Tokens of the prompts on a worker that run after one due at ``due_s``."""
        num_tokens = self._num_late_tokens[worker_id]
        for prompt in reversed(self._in_time.get(worker_id, ())):
            if prompt.due_s <= due_s:
                break
            num_tokens += prompt.num_tokens
        return num_tokens


class _Gains:
    """Gains of one prompt on decode and mixed workers: its own chance, less the misses of answers there."""

    def __init__(
        self,
        policy: Goodput,
        arrival: Arrival,
        workers: Sequence[WorkerSnapshot],
        stalls_s: Mapping[str, float] | None = None,
    ) -> None:
        """``stalls_s``: seconds that a prefill of the prompt would delay the answers on each worker that may do it."""
        blocks = arrival.blocks
        self.slack_value = SLACK_VALUE * (arrival.weight or 1.0)
        self._tpot_slo_s = arrival.tpot_slo_s or LENIENT_TPOT_S
        self._length = policy._lengths.remaining(0)
        answers = policy._answers
        rows = [answers.row(worker.worker_id) for worker in workers]
        num_rows = answers.num_rows
        num_steps, before_s, after_s = answers.steps().copy(), np.zeros(num_rows), np.zeros(num_rows)
        for worker, row in zip(workers, rows, strict=True):
            cost, correction = policy.costs[worker.role], worker.decode_correction
            num, num_context = worker.num_decoding, worker.num_context_tokens
            num_steps[row] = worker.num_steps
            before_s[row] = cost.decode_s(num, num_context) * correction if num else 0.0
            after_s[row] = cost.decode_s(num + 1, num_context + blocks.num_tokens) * correction
        self._after_s = {worker.worker_id: float(after_s[row]) for worker, row in zip(workers, rows, strict=True)}
        self._waits_s = {}
        for worker in workers:
            if worker.num_free_blocks < blocks.num_blocks():
                num_cached = blocks.num_cached_tokens(worker.cached_blocks)
                if lacking := shortfall(blocks, worker, num_cached_tokens=num_cached):
                    self._waits_s[worker.worker_id] = self._block_wait_s(lacking, blocks, worker)
        self._rows = dict(zip([worker.worker_id for worker in workers], rows, strict=True))
        answers.num_steps = num_steps
        self._row, self._weight, self._slack, self._steps, self._per_s = answers.slack(arrival.now_s, policy._lengths)
        kept = self._met(before_s)
        self._harm = kept - self._met(after_s)
        self._ends_per_s = sum(
            worker.num_decoding / (self._length * before)
            for worker, row in zip(workers, rows, strict=True)
            if (before := before_s[row])
        )
        if stalls_s:
            stall_s = np.zeros(num_rows)
            for worker_id, seconds in stalls_s.items():
                stall_s[self._rows[worker_id]] = seconds
            self._slack -= self._per_s * stall_s[self._row]
            self._local_harm = kept - self._met(after_s)

    def _block_wait_s(self, num_lacking: int, blocks: PromptBlocks, worker: WorkerSnapshot) -> float:
        """Seconds until ends of answers have freed ``num_lacking`` blocks: all that is held goes in the time of an
        answer."""
        lifetime_s = self._length * self._after_s[worker.worker_id]
        return lifetime_s * num_lacking * blocks.block_size / max(worker.num_context_tokens, blocks.num_tokens)

    def stall_slo_s(self, worker_id: str) -> float:
        """Seconds that an answer of expected length may lose on the worker and still meet TPOT."""
        return max(0.0, self._length * (self._tpot_slo_s - self._after_s[worker_id]))

    def spacing_s(self) -> float:
        """Seconds between two ends of answers on all workers; 0 if none decodes."""
        return 1 / self._ends_per_s if self._ends_per_s else 0.0

    def _met(self, step_s: FloatArray) -> FloatArray:
        """Expected worth of the answers that meet TPOT, by row, if steps take ``step_s``."""
        row = self._row
        worth = self._weight / (1 + np.exp(np.minimum(self._steps * step_s[row] - self._slack, 50.0)))
        return np.bincount(row, worth, len(step_s)).astype(np.float64, copy=False)

    def of(self, worker: WorkerSnapshot, weight: float, *, is_local: bool = False, own_stall_s: float = 0.0) -> float:
        """Gain on ``worker``.

        Args:
            is_local: it prefills there, too.
            weight: value of the request if it meets TPOT.
            own_stall_s: its own wait before token 1.
        """
        row, step_s = self._rows[worker.worker_id], self._after_s[worker.worker_id]
        harm = float((self._local_harm if is_local else self._harm)[row])
        tpot_s = step_s + (own_stall_s + self._waits_s.get(worker.worker_id, 0.0)) / self._length
        own = weight * _chance((1 - tpot_s / self._tpot_slo_s) / TPOT_SPREAD)
        return own - harm - self.slack_value * tpot_s / self._tpot_slo_s


class _Answers:
    """Answers that decode, in compact columns."""

    def __init__(self) -> None:
        self._index: dict[int, int] = {}
        self._ids: list[int] = []
        self._rows: dict[str, int] = {}
        self._row = np.zeros(256, np.int64)
        self._began_s = np.zeros(256)
        self._base = np.zeros(256)
        """Tokens so far less the worker's steps so far."""
        self._tpot_slo_s = np.zeros(256)
        self._weight = np.zeros(256)
        self.num_steps = np.zeros(0)
        """Steps so far by row, as last seen; rows may have been added since."""

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def row(self, worker_id: str) -> int:
        """Number of the worker."""
        return self._rows.setdefault(worker_id, len(self._rows))

    def add(self, request_id: int, worker_id: str, began_s: float, base: float, request: _Request) -> None:
        self.remove(request_id)
        index = self._index[request_id] = len(self._ids)
        self._ids.append(request_id)
        if index == len(self._row):
            self._row, self._began_s, self._base, self._tpot_slo_s, self._weight = (
                np.concatenate([column, np.zeros_like(column)]) for column in self._columns()
            )
        self._row[index], self._began_s[index], self._base[index] = self.row(worker_id), began_s, base
        self._tpot_slo_s[index], self._weight[index] = request.tpot_slo_s, request.weight

    def _columns(self) -> tuple[npt.NDArray[np.int64 | np.float64], ...]:
        return self._row, self._began_s, self._base, self._tpot_slo_s, self._weight

    def remove(self, request_id: int) -> None:
        """Remove the answer, if it is there; the last one takes its place."""
        index = self._index.pop(request_id, None)
        if index is None:
            return
        last = self._ids.pop()
        if last != request_id:
            self._ids[index], self._index[last] = last, index
            for column in self._columns():
                column[index] = column[len(self._ids)]

    def num_tokens(self) -> IntArray:
        """Tokens so far of each answer."""
        num = len(self._ids)
        num_tokens = self._base[:num] + self.steps()[self._row[:num]]
        np.maximum(num_tokens, 1.0, out=num_tokens)
        np.minimum(num_tokens, MAX_LENGTH, out=num_tokens)
        return num_tokens.astype(np.int64)

    def steps(self) -> FloatArray:
        """Steps so far by row, as last seen, or 0."""
        num_new = self.num_rows - len(self.num_steps)
        return np.append(self.num_steps, np.zeros(num_new)) if num_new else self.num_steps

    def slack(self, now_s: float, lengths: _Lengths) -> tuple[IntArray, FloatArray, FloatArray, FloatArray, FloatArray]:
        """Per answer: row, weight, slack in units of the error, the same per second of mean step, and of stall."""
        num = len(self._ids)
        row, num_tokens, tpot_slo_s = self._row[:num], self.num_tokens(), self._tpot_slo_s[:num]
        remaining = lengths.table[num_tokens]
        total = num_tokens + remaining
        per_s = 1 / (total * (tpot_slo_s * TPOT_SPREAD))
        slack = (tpot_slo_s * total - (now_s - self._began_s[:num])) * per_s
        return row, self._weight[:num], slack, remaining * per_s, per_s


class _Lengths:
    """Expected remaining length of an answer: the survival curve of Kaplan and Meier over the answers that ended and,
    as far as they have come, those that run. Without the latter a router that has just started would know short ones
    only."""

    def __init__(self) -> None:
        lengths = np.arange(MAX_LENGTH + 1)
        self._ended = PRIOR_ANSWERS / PRIOR_TOKENS * np.exp(-lengths / PRIOR_TOKENS)
        """Weight of the answers that ended, by length."""
        self._num_new, self._num_changes = 0, 0
        self._rebuild(np.zeros(MAX_LENGTH + 1, np.int64))

    def add(self, num_tokens: int) -> None:
        self._ended[min(num_tokens, MAX_LENGTH)] += 1
        self._num_new += 1

    def changed(self, answers: _Answers) -> None:
        """An answer began or ended: count anew now and then."""
        self._num_changes += 1
        if self._num_changes >= CHANGES_PER_COUNT:
            self._ended *= exp(-self._num_new / LENGTH_MEMORY)
            self._num_new = self._num_changes = 0
            self._rebuild(np.bincount(answers.num_tokens(), minlength=MAX_LENGTH + 1))

    def remaining(self, num_tokens: int) -> float:
        """Expected tokens after ``num_tokens``, at least 1."""
        return float(self.table[min(num_tokens, MAX_LENGTH)])

    def _rebuild(self, running: IntArray) -> None:
        """``running``: number of running answers by tokens so far."""
        as_long = np.cumsum((self._ended + running)[::-1])[::-1]
        """Weight of answers of at least each length."""
        goes_on = 1 - self._ended / np.maximum(as_long, 1e-300)
        survival = np.cumprod(np.maximum(goes_on, 0.0))
        """Chance of an answer to be longer than each length."""
        self.median = int(np.argmax(survival < 0.5)) or MAX_LENGTH
        after = np.cumsum(survival[::-1])[::-1]
        self.table = np.maximum(1.0, after / np.maximum(survival, 1e-300))


def _chance(margin: float) -> float:
    """Logistic distribution."""
    return 1 / (1 + exp(-margin)) if margin > -50 else 0.0
