"""What the ``goodput`` policy knows of one worker: its snapshot, the prompts that wait there in the order in which they
are due, and the answers that decode there and may meet their objectives.

Pure; `pdserve.router.requests.goodput` owns one view for each worker that it has placed anything on or evaluated.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from math import exp, inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.cost.cost_model import OnlineCorrection
from pdserve.router.requests.goodput_rules import TPOT_SPREAD
from pdserve.router.requests.least_time import predict_ttft_s
from pdserve.router.requests.lengths import MAX_LENGTH, Lengths
from pdserve.router.requests.placement import Costs, WorkerSnapshot

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class _Prompt(NamedTuple):
    due_s: float
    request_id: int
    num_tokens: int
    prefill_s: float
    share: str | None


class _Share:
    """Prompts of one share that wait on a worker."""

    def __init__(self) -> None:
        self.num_prompts = 0
        self.prefill_s = 0.0
        self.last_due_s = -inf


class Prompts:
    """Prompts of which the last chunk has not been planned, in the order of the worker."""

    def __init__(self) -> None:
        self._prompts: dict[int, _Prompt] = {}
        self._in_order: list[_Prompt] = []
        self._shares: dict[str, _Share] = {}
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, request_id: int, due_s: float, num_tokens: int, prefill_s: float, share: str | None) -> None:
        """``share``: None for a prompt that gives way to all shares."""
        prompt = self._prompts[request_id] = _Prompt(due_s, request_id, num_tokens, prefill_s, share)
        insort(self._in_order, prompt)
        self._num_tokens += num_tokens
        if share is not None:
            held = self._shares.setdefault(share, _Share())
            held.num_prompts += 1
            held.prefill_s += prefill_s
            if due_s < inf:
                held.last_due_s = max(held.last_due_s, due_s)

    def remove(self, request_id: int) -> None:
        prompt = self._prompts.pop(request_id, None)
        if prompt is None:
            return
        del self._in_order[bisect_left(self._in_order, prompt)]
        self._num_tokens -= prompt.num_tokens
        if prompt.share is not None:
            held = self._shares[prompt.share]
            held.num_prompts -= 1
            held.prefill_s -= prompt.prefill_s
            if not held.num_prompts:
                del self._shares[prompt.share]

    def num_tokens_after(self, due_s: float) -> int:
        """Tokens of the prompts that run after one due at ``due_s``."""
        index, prompts = bisect_right(self._in_order, due_s, key=lambda prompt: prompt.due_s), self._in_order
        if 2 * index > len(prompts):
            return sum(prompt.num_tokens for prompt in prompts[index:])
        return self._num_tokens - sum(prompt.num_tokens for prompt in prompts[:index])

    def share_s(self, share: str) -> tuple[float, float]:
        """Predicted seconds of the prompts of a share, and the instant at which the last of them is due that are due
        at all."""
        held = self._shares.get(share)
        return (held.prefill_s, held.last_due_s) if held else (0.0, -inf)


class _Forecast(NamedTuple):
    """Answers of one worker as of a step, in units of the error of what they take: an element each."""

    excess: FloatArray
    """Beyond the objective, if steps stay as they are; below 0 for those that are likely to meet it."""
    per_step_s: FloatArray
    """Excess for each second that is added to every step."""
    per_s: FloatArray
    """Excess for each second of one delay."""
    meeting: FloatArray
    """Probability of meeting the objective with the excess as it is."""


class Answers:
    """Answers that decode on a worker and may meet their objectives.

    One meets TPOT if what its remaining tokens take, at the mean step of the worker, fits what is left of its
    objective, with an error of `TPOT_SPREAD`. All is as of the worker's last step that was seen, so that what is not
    known yet does not count as a delay.
    """

    def __init__(self) -> None:
        self._ids: list[int] = []
        """Request ids by column."""
        self._columns: dict[int, int] = {}
        """Columns by request id."""
        self._values = np.zeros((4, 32))
        """Instant of token 0, tokens less the worker's steps at that time, TPOT objective and weight, by column."""
        self._forecast: _Forecast | None = None

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, request_id: int, began_s: float, tokens_ahead: float, tpot_slo_s: float, weight: float) -> None:
        """``tokens_ahead``: its tokens less the worker's steps."""
        column = len(self._ids)
        if column == self._values.shape[1]:
            self._values = np.pad(self._values, ((0, 0), (0, column)))
        self._values[:, column] = began_s, tokens_ahead, tpot_slo_s, weight
        self._ids.append(request_id)
        self._columns[request_id] = column
        self._forecast = None

    def remove(self, request_id: int) -> None:
        """Remove an answer that is there; the last one takes its column."""
        column, last = self._columns.pop(request_id), self._ids.pop()
        if last != request_id:
            self._ids[column] = last
            self._columns[last] = column
            self._values[:, column] = self._values[:, len(self._ids)]
        self._forecast = None

    def num_tokens(self, num_steps: int) -> IntArray:
        """Tokens so far of each answer, as `Lengths` counts them, once the worker has taken so many steps."""
        num_tokens = self._values[1, : len(self._ids)] + num_steps
        counted: IntArray = np.minimum(np.maximum(num_tokens, 1), MAX_LENGTH).astype(np.int64)
        return counted

    def stepped(self) -> None:
        """The worker has taken a step, or its steps are predicted anew."""
        self._forecast = None

    def forecast(self, num_steps: int, stepped_s: float, step_s: float, lengths: Lengths) -> _Forecast:
        """``step_s``: predicted seconds of a step."""
        if self._forecast is None:
            began_s, _, tpot_slo_s, _ = self._values[:, : len(self._ids)]
            num_tokens = self.num_tokens(num_steps)
            remaining = lengths.table[num_tokens]
            slo_s = tpot_slo_s * (num_tokens + remaining)
            per_s = 1 / np.maximum(slo_s * TPOT_SPREAD, 1e-9)
            per_step_s = remaining * per_s
            elapsed_s = np.maximum(stepped_s - began_s, 0.0)
            excess = per_step_s * step_s - (slo_s - elapsed_s) * per_s
            self._forecast = _Forecast(excess, per_step_s, per_s, _meeting(excess))
        return self._forecast

    def misses(self, before: FloatArray, excess: FloatArray) -> float:
        """Expected misses, times weight, that it causes if the excess becomes ``excess``; ``before`` are probabilities
        of meeting the objective."""
        return float(self._values[3, : len(self._ids)] @ (before - _meeting(excess)))


def _meeting(excess: FloatArray) -> FloatArray:
    """Probability of each answer to meet its objective: a logistic distribution."""
    meeting: FloatArray = 1 / (1 + np.exp(np.minimum(excess, 50.0)))
    return meeting


class _Seen(NamedTuple):
    """A worker when it was last seen to have taken a step."""

    num_steps: int
    stepped_s: float = 0.0
    step_s: float = 0.0
    """Predicted seconds of the next step; 0 before the first one that counts: the worker was idle before."""
    prefill_s: float = 0.0
    """Predicted seconds of prompts that were sent since then, to be computed beside the answers."""


class WorkerView:
    """One worker.

    Predicted steps are held against those that end between two snapshots of a worker that decodes all the while, and
    corrected: what the worker reports as its correction may be wrong, or miss what delays its tokens.
    """

    def __init__(self, snapshot: WorkerSnapshot, costs: Costs) -> None:
        self.prompts = Prompts()
        self.answers = Answers()
        self._costs = costs
        self._steps = OnlineCorrection()
        """Observed over predicted time of steps."""
        self._seen: _Seen | None = None
        """None if no answer is known to decode there."""
        self._prefill_s, self._prefill_at_s = 0.0, 0.0
        """Decaying seconds of prefill beside answers, and the instant of the sum."""
        self._predict(snapshot)

    @property
    def worker_id(self) -> str:
        return self.snapshot.worker_id

    @property
    def role(self) -> WorkerRole:
        return self.snapshot.role

    def update(self, snapshot: WorkerSnapshot) -> None:
        """Learn from the steps that ended since the last snapshot, and predict the next ones."""
        if snapshot is not self.snapshot:
            self._observe(snapshot)
            self._predict(snapshot)

    def _predict(self, snapshot: WorkerSnapshot) -> None:
        cost, num_decoding, num_context = self._costs[snapshot.role], snapshot.num_decoding, snapshot.num_context_tokens
        self.snapshot, self.cost = snapshot, cost
        self.step_correction = correction = snapshot.decode_correction * self._steps.factor
        self.step_s = cost.decode_s(num_decoding, num_context) * correction if num_decoding else 0.0
        """Seconds of a decode step; 0 on a worker that decodes nothing."""
        self._next_step_s = cost.decode_s(num_decoding + 1, num_context) * correction
        self._answer_s = cost.decode_s(num_decoding + 2, num_context) * correction - self._next_step_s
        self._token_s = cost.decode_token_s * correction
        self.answers.stepped()

    def _observe(self, snapshot: WorkerSnapshot) -> None:
        last = self._seen
        if last is None or snapshot.num_steps == last.num_steps:
            return
        num_decoding, num_context = max(1, snapshot.num_decoding), snapshot.num_context_tokens
        step_s = self._costs[snapshot.role].decode_s(num_decoding, num_context) * snapshot.decode_correction
        self._seen = _Seen(snapshot.num_steps, snapshot.stepped_s, step_s)
        if last.step_s and snapshot.num_steps > last.num_steps:
            predicted_s = (snapshot.num_steps - last.num_steps) * (last.step_s + step_s) / 2 + last.prefill_s
            self._steps.observe(predicted_s, snapshot.stepped_s - last.stepped_s)

    # Predictions

    def ttft_s(self, num_tokens: int, num_cached: int, *, num_behind: int = 0) -> float:
        """Seconds to token 0 of a prompt before which all run that wait, but for ``num_behind`` tokens."""
        snapshot = self.snapshot
        if num_behind:
            num_ahead = max(snapshot.num_tokens_in_flight, snapshot.num_waiting_tokens - num_behind)
            snapshot = snapshot._replace(num_waiting_tokens=num_ahead)
        return predict_ttft_s(snapshot, num_tokens, num_cached, self.cost)

    def prefill_s(self, num_tokens: int, num_cached: int) -> float:
        """Seconds of a prompt's own tokens."""
        prompt_s = self.cost.prompt_s(num_tokens - num_cached, num_cached, self.snapshot.max_batch_tokens)
        return prompt_s * self.snapshot.prefill_correction

    def step_with_s(self, num_tokens: int) -> float:
        """Seconds of a step once a prompt of ``num_tokens`` has joined."""
        return self._next_step_s + self._attended(1, num_tokens) * self._token_s

    def added_s(self, num_answers: float, num_tokens: float) -> float:
        """Seconds that further answers, of so many tokens of context in all, add to a step."""
        return num_answers * self._answer_s + self._attended(1 + num_answers, num_tokens) * self._token_s

    def _attended(self, num_answers: float, num_tokens: float) -> float:
        """Tokens that a step attends to in addition if so many further answers have ``num_tokens`` of context."""
        num_rows, attended = self.snapshot.num_decoding + num_answers, self.cost.attended
        num_known = self.snapshot.num_context_tokens + num_rows
        return attended(num_known + num_tokens, num_rows) - attended(num_known, num_rows)

    def misses_of_steps(self, before_s: float, after_s: float, lengths: Lengths) -> float:
        """Expected misses caused if steps get longer by ``after_s`` instead of ``before_s``."""
        if not len(self.answers):
            return 0.0
        excess, per_step_s, _, meeting = self._forecast(lengths)
        before = _meeting(excess + before_s * per_step_s) if before_s else meeting
        return self.answers.misses(before, excess + after_s * per_step_s)

    def misses_of_delay(self, delay_s: float, lengths: Lengths) -> float:
        """Expected misses caused if all answers are delayed once, by ``delay_s``."""
        if not len(self.answers):
            return 0.0
        excess, _, per_s, meeting = self._forecast(lengths)
        return self.answers.misses(meeting, excess + delay_s * per_s)

    def _forecast(self, lengths: Lengths) -> _Forecast:
        return self.answers.forecast(self.snapshot.num_steps, self.snapshot.stepped_s, self.step_s, lengths)

    # What becomes of requests

    def prefill_beside(self, seconds: float, now_s: float, memory_s: float) -> None:
        """A prompt of so many predicted seconds is computed beside the answers."""
        self._prefill_s, self._prefill_at_s = self.recent_prefill_s(now_s, memory_s) + seconds, now_s
        if self._seen is not None:
            self._seen = self._seen._replace(prefill_s=self._seen.prefill_s + seconds)

    def recent_prefill_s(self, now_s: float, memory_s: float) -> float:
        """Seconds of prefill beside answers, of which 1 / e counts after ``memory_s``."""
        return self._prefill_s * exp((self._prefill_at_s - now_s) / memory_s)

    def answer_began(
        self, request_id: int, began_s: float, tokens_ahead: float, tpot_slo_s: float, weight: float, num_steps: int
    ) -> None:
        """An answer decodes on the worker, which has taken ``num_steps``."""
        self.answers.add(request_id, began_s, tokens_ahead, tpot_slo_s, weight)
        if self._seen is None:
            self._seen = _Seen(num_steps)

    def answer_left(self, request_id: int) -> None:
        self.answers.remove(request_id)
        if not len(self.answers):
            self._seen = None
