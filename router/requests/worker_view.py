"""What the ``goodput`` policy knows of one worker: its snapshot, the prompts that wait there in the order in which they
are due, and the answers that decode there and may meet their objectives.

Pure; `pdserve.router.requests.goodput` owns one view for each worker that it has placed anything on or evaluated.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from math import exp, inf
from typing import NamedTuple

import numpy as np

from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.cost.cost_model import OnlineCorrection
from pdserve.router.requests.goodput_rules import TPOT_SPREAD
from pdserve.router.requests.least_time import predict_ttft_s
from pdserve.router.requests.lengths import MAX_LENGTH, FloatArray, IntArray, Lengths
from pdserve.router.requests.placement import Costs, WorkerSnapshot


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
    """Answers of one worker as of a step: an element each, in units of twice the error of what they take. The error has
    a logistic distribution, so the probability of a miss is ``(1 + tanh(excess)) / 2``."""

    excess: FloatArray
    """Beyond the objective, if steps stay as they are; below 0 for those that are likely to meet it."""
    per_step_s: FloatArray
    """Excess for each second that is added to every step."""
    weights: FloatArray

    def missing(self, added_s: float) -> float:
        """Expected misses, times weight, less half of all weights, if every step gets longer by ``added_s``."""
        excess = self.excess + added_s * self.per_step_s if added_s else self.excess
        return 0.5 * float(self.weights.dot(np.tanh(excess)))


class Answers:
    """Answers that decode on a worker and may meet their objectives.

    One meets TPOT if what its remaining tokens take, at the mean step of the worker, fits what is left of its
    objective, with an error of `TPOT_SPREAD`. After a delay it does not if it has too few of them left to make up for
    it. All is as of the worker's last step that was seen, so that what is not known yet does not count as a delay.
    """

    def __init__(self) -> None:
        self._ids: list[int] = []
        """Request ids by column."""
        self._columns: dict[int, int] = {}
        """Columns by request id."""
        self._values = np.zeros((4, 32))
        """By column: instant of token 0, tokens less the worker's steps, weight, and TPOT objective."""

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, request_id: int, began_s: float, tokens_ahead: float, tpot_slo_s: float, weight: float) -> None:
        """``tokens_ahead``: its tokens less the worker's steps."""
        column = len(self._ids)
        if column == self._values.shape[1]:
            self._values = np.pad(self._values, ((0, 0), (0, column)))
        self._values[:, column] = began_s, tokens_ahead, weight, tpot_slo_s
        self._ids.append(request_id)
        self._columns[request_id] = column

    def remove(self, request_id: int) -> None:
        """Remove an answer that is there; the last one takes its column."""
        column, last = self._columns.pop(request_id), self._ids.pop()
        if last != request_id:
            self._ids[column] = last
            self._columns[last] = column
            self._values[:, column] = self._values[:, len(self._ids)]

    def num_tokens(self, num_steps: float) -> IntArray:
        """Tokens so far of each answer, as `Lengths` counts them, once the worker has taken so many steps."""
        return (self._values[1, : len(self._ids)] + num_steps).clip(1, MAX_LENGTH).astype(np.int64)

    def forecast(self, num_steps: float, stepped_s: float, step_s: float, lengths: Lengths) -> _Forecast:
        """``step_s``: predicted seconds of a step."""
        began_s, tokens_ahead, weights, slo_s = self._values[:, : len(self._ids)]
        num_tokens = (tokens_ahead + num_steps).astype(np.int64)
        per_s, per_step_s = lengths.of_running.take(num_tokens, axis=1, mode="clip")
        elapsed_s = np.maximum(stepped_s - began_s, 0.0)
        excess = per_step_s * step_s + elapsed_s
        per_s *= 0.5 / TPOT_SPREAD / slo_s
        per_step_s *= per_s
        excess *= per_s
        excess -= 0.5 / TPOT_SPREAD
        return _Forecast(excess, per_step_s, weights)

    def misses_of_delay(
        self, delay_s: float, num_steps: float, stepped_s: float, step_s: float, lengths: Lengths
    ) -> float:
        """Expected misses caused, times weight, if all are delayed once."""
        began_s, _, weights, slo_s = self._values[:, : len(self._ids)]
        num_tokens = self.num_tokens(num_steps)
        late_s = np.maximum(stepped_s - began_s, 0.0) - slo_s * num_tokens
        most = np.add.outer((0.0, delay_s), late_s) / np.maximum(slo_s - step_s, 1e-9)
        before, after = lengths.chances_to_end(num_tokens, most)
        return float(weights.dot(after - before))


class _Seen(NamedTuple):
    """A worker when it was last seen to have taken a step."""

    num_steps: float
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
        self.snapshot, self.worker_id, self.role = snapshot, snapshot.worker_id, snapshot.role
        self.prompts = Prompts()
        self.answers = Answers()
        self.cost = costs[self.role]
        self._costs = costs
        self._steps = OnlineCorrection()
        """Observed over predicted time of steps."""
        self._known_forecast: _Forecast | None = None
        self._seen: _Seen | None = None
        """None if no answer is known to decode there."""
        self._prefill_s, self._prefill_at_s = 0.0, 0.0
        """Decaying seconds of prefill beside answers, and the instant of the sum."""
        self._learn_and_predict()

    def update(self, snapshot: WorkerSnapshot) -> None:
        """Learn from the steps that ended since the last snapshot, and predict the next ones."""
        if snapshot is not self.snapshot:
            self.snapshot, self.role, self.cost = snapshot, snapshot.role, self._costs[snapshot.role]
            if self.may_decode:
                self._learn_and_predict()

    @property
    def may_decode(self) -> bool:
        """Whether answers may decode there: on a prefill worker only those of before it became one."""
        return self.role is not WorkerRole.PREFILL or len(self.answers) > 0

    def _learn_and_predict(self) -> None:
        cost, num_decoding, num_context = self.cost, self.snapshot.num_decoding, self.snapshot.num_context_tokens
        step_s = cost.decode_s(max(1, num_decoding), num_context) * self.snapshot.decode_correction
        self._observe(step_s)
        self.step_correction = correction = self.snapshot.decode_correction * self._steps.factor
        self.step_s = step_s * self._steps.factor if num_decoding else 0.0
        """Seconds of a decode step; 0 on a worker that decodes nothing."""
        self._next_step_s = cost.decode_s(num_decoding + 1, num_context) * correction
        self._answer_s = cost.decode_s(num_decoding + 2, num_context) * correction - self._next_step_s
        self._token_s = cost.decode_token_s * correction
        self._known_forecast = None

    def _observe(self, step_s: float) -> None:
        """``step_s``: seconds of the next step, as the worker's own correction has it."""
        snapshot, last = self.snapshot, self._seen
        if last is None or snapshot.num_steps == last.num_steps:
            return
        self._seen = _Seen(snapshot.num_steps, snapshot.stepped_s, step_s)
        if last.step_s and snapshot.num_steps > last.num_steps:
            predicted_s = (snapshot.num_steps - last.num_steps) * (last.step_s + step_s) / 2 + last.prefill_s
            self._steps.observe(predicted_s, snapshot.stepped_s - last.stepped_s)

    # Predictions

    def ttft_s(self, num_tokens: int, num_cached: int, *, num_behind: int = 0) -> float:
        """Seconds to token 0 of a prompt before which all run that wait, but for ``num_behind`` tokens."""
        return predict_ttft_s(
            self.snapshot, num_tokens, num_cached, self.cost, num_behind=num_behind, num_answers=len(self.answers)
        )

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
        forecast = self._forecast(lengths)
        return forecast.missing(after_s) - forecast.missing(before_s)

    def misses_of_delay(self, delay_s: float, lengths: Lengths) -> float:
        """Expected misses caused if all answers are delayed once, by ``delay_s``."""
        if not len(self.answers):
            return 0.0
        snapshot = self.snapshot
        return self.answers.misses_of_delay(delay_s, snapshot.num_steps, snapshot.stepped_s, self.step_s, lengths)

    def _forecast(self, lengths: Lengths) -> _Forecast:
        if self._known_forecast is None:
            snapshot = self.snapshot
            self._known_forecast = self.answers.forecast(snapshot.num_steps, snapshot.stepped_s, self.step_s, lengths)
        return self._known_forecast

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
        self, request_id: int, began_s: float, tokens_ahead: float, tpot_slo_s: float, weight: float, num_steps: float
    ) -> None:
        """An answer decodes on the worker, which has taken ``num_steps``."""
        self.answers.add(request_id, began_s, tokens_ahead, tpot_slo_s, weight)
        self._known_forecast = None
        if self._seen is None:
            self._seen = _Seen(num_steps)

    def answer_left(self, request_id: int) -> None:
        self.answers.remove(request_id)
        self._known_forecast = None
        if not len(self.answers):
            self._seen = None
