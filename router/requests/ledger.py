"""Ledgers of the ``goodput`` policy: prompts that wait on each worker, requests that are about to be handed off, and
answers that decode on each worker.

Pure; `pdserve.router.requests.goodput` owns them. Workers are rows of a `pdserve.router.requests.worker_table`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from math import inf
from typing import NamedTuple

import numpy as np

from pdserve.router.requests.lengths import MAX_LENGTH, Lengths
from pdserve.router.requests.worker_table import FloatArray, IntArray, WorkerColumns

TPOT_SPREAD = 0.05
"""Error of a predicted TPOT, as a share of the objective: the scale of a logistic distribution."""
GRID_TOKENS = np.append(0.0, 512.0 * 2.0 ** np.arange(9))
"""Contexts of one more answer, up to 131,072 tokens, for which its harm to others is computed ..."""
GRID_S = np.append(0.0, 2e-3 * 2.0 ** np.arange(11))
"""... and delays, up to 2 s."""
NUM_CONTEXTS, NUM_DELAYS = len(GRID_TOKENS), len(GRID_S)


class _Prompt(NamedTuple):
    """A prompt that waits on a worker, or is computed there; in the order of workers."""

    due_s: float
    request_id: int
    num_tokens: int
    row: int
    share: str | None
    """None for a late one."""
    own_us: int


class _Share:
    """Prompts of one share that wait, by row."""

    def __init__(self, num_rows: int) -> None:
        self.num_prompts = 0
        self.waiting_us = np.zeros(num_rows, np.int64)
        """Predicted microseconds: whole numbers, whose sum returns to 0."""
        self.last_due_s = np.full(num_rows, -inf)
        """When the last of the prompts is due that are due at all."""


class Prompts:
    """Prompts that the last chunk has not been planned of, in the order of each worker."""

    def __init__(self) -> None:
        self._prompts: dict[int, _Prompt] = {}
        self._in_time: dict[int, list[_Prompt]] = {}
        """By row, in order ..."""
        self._late: dict[int, list[_Prompt]] = {}
        """... and late ones, of which most are due after all others ..."""
        self._num_late_tokens = np.zeros(8, np.int64)
        """... with the sum of their tokens."""
        self._last_due_s = np.full(8, -inf)
        """When the last prompt is due that is not late, by row."""
        self._shares: dict[str, _Share] = {}

    def reserve(self, num_rows: int) -> None:
        """Have space for so many rows."""
        num_new = num_rows - len(self._last_due_s)
        if num_new > 0:
            self._num_late_tokens = np.append(self._num_late_tokens, np.zeros(num_new, np.int64))
            self._last_due_s = np.append(self._last_due_s, np.full(num_new, -inf))
            for share in self._shares.values():
                share.waiting_us = np.append(share.waiting_us, np.zeros(num_new, np.int64))
                share.last_due_s = np.append(share.last_due_s, np.full(num_new, -inf))

    def add(self, request_id: int, row: int, due_s: float, num_tokens: int, share: str | None, own_s: float) -> None:
        self.remove(request_id)
        prompt = _Prompt(due_s, request_id, num_tokens, row, share, int(own_s * 1e6))
        self._prompts[request_id] = prompt
        if share is None:
            insort(self._late.setdefault(row, []), prompt)
            self._num_late_tokens[row] += num_tokens
            return
        in_time = self._in_time.setdefault(row, [])
        insort(in_time, prompt)
        self._last_due_s[row] = in_time[-1].due_s
        held = self._shares.get(share)
        if held is None:
            held = self._shares[share] = _Share(len(self._last_due_s))
        held.num_prompts += 1
        held.waiting_us[row] += prompt.own_us
        if due_s < inf:
            held.last_due_s[row] = max(due_s, held.last_due_s[row])

    def remove(self, request_id: int) -> None:
        prompt = self._prompts.pop(request_id, None)
        if prompt is None:
            return
        row = prompt.row
        if prompt.share is None:
            late = self._late[row]
            del late[bisect_left(late, prompt)]
            self._num_late_tokens[row] -= prompt.num_tokens
            return
        in_time = self._in_time[row]
        del in_time[bisect_left(in_time, prompt)]
        self._last_due_s[row] = in_time[-1].due_s if in_time else -inf
        held = self._shares[prompt.share]
        held.num_prompts -= 1
        held.waiting_us[row] -= prompt.own_us
        if not held.waiting_us[row]:
            held.last_due_s[row] = -inf
        if not held.num_prompts:
            del self._shares[prompt.share]

    def seconds(self, share: str, rows: IntArray) -> FloatArray:
        """Predicted seconds of the prompts of a share that wait on each worker."""
        held = self._shares.get(share)
        return np.zeros(len(rows)) if held is None else held.waiting_us[rows] / 1e6

    def last_due_s(self, share: str, rows: IntArray) -> FloatArray:
        """When the last of the prompts of a share that wait on each worker is due."""
        held = self._shares.get(share)
        return np.full(len(rows), -inf) if held is None else held.last_due_s[rows]

    def num_tokens_after(self, rows: IntArray, due_s: FloatArray) -> IntArray:
        """Tokens of the prompts on each worker that run after one due at its ``due_s``."""
        num_tokens = self._num_late_tokens[rows]
        for index in np.flatnonzero(num_tokens):
            for prompt in self._late[int(rows[index])]:
                if prompt.due_s > due_s[index]:
                    break
                num_tokens[index] -= prompt.num_tokens
        for index in np.flatnonzero(self._last_due_s[rows] > due_s):
            for prompt in reversed(self._in_time[int(rows[index])]):
                if prompt.due_s <= due_s[index]:
                    break
                num_tokens[index] += prompt.num_tokens
        return num_tokens


class Joining:
    """Requests that will be handed off, to a worker not chosen yet."""

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}
        """Prompt tokens by request id ..."""
        self.num_tokens = 0
        """... and their sum."""

    @property
    def num(self) -> int:
        return len(self._tokens)

    def add(self, request_id: int, num_tokens: int) -> None:
        self.remove(request_id)
        self._tokens[request_id] = num_tokens
        self.num_tokens += num_tokens

    def remove(self, request_id: int) -> None:
        self.num_tokens -= self._tokens.pop(request_id, 0)

    def step_s(self, decoding: WorkerColumns) -> FloatArray:
        """Seconds that they add to a step of each worker that decodes, if each gets its part."""
        num_workers = len(decoding.answer_s)
        seconds: FloatArray = (self.num * decoding.answer_s + self.num_tokens * decoding.token_s) / num_workers
        return seconds


class Answers:
    """Answers that decode, a row of columns for each worker, and the harm that more work there would do to them.

    Misses are expected ones. An answer meets TPOT if what its remaining tokens take, at the mean step of its worker,
    fits what is left of its objective, with an error of `TPOT_SPREAD`. All is as of the worker's last step that was
    seen, so that what is not known yet does not count as a delay.
    """

    def __init__(self) -> None:
        self._places: dict[int, tuple[int, int]] = {}
        """Row and column by request id."""
        self._ids: list[list[int]] = []
        """Request ids by row and column."""
        self._num_answers = np.zeros(8, np.int64)
        """By row."""
        self._values = np.zeros((4, 8, 32))
        """Instant of token 0, tokens less the worker's steps at that time, TPOT objective and weight."""
        self._harm = np.zeros((8, NUM_CONTEXTS + NUM_DELAYS))
        """Misses if one more answer with each context of `GRID_TOKENS` joins, and if all are delayed by each of
        `GRID_S`, by row."""

    def __len__(self) -> int:
        return len(self._places)

    def is_any_on(self, row: int) -> bool:
        return bool(self._ids[row])

    def reserve(self, num_rows: int) -> None:
        """Have space for so many rows."""
        num_new = num_rows - len(self._harm)
        if num_new > 0:
            self._values = np.pad(self._values, ((0, 0), (0, num_new), (0, 0)))
            self._num_answers = np.pad(self._num_answers, (0, num_new))
            self._harm = np.pad(self._harm, ((0, num_new), (0, 0)))
        self._ids += [[] for _ in range(num_rows - len(self._ids))]

    def add(self, request_id: int, row: int, began_s: float, base: float, tpot_slo_s: float, weight: float) -> None:
        """``base``: its tokens less the worker's steps."""
        self.remove(request_id)
        ids = self._ids[row]
        column = len(ids)
        ids.append(request_id)
        if column == self._values.shape[2]:
            self._values = np.pad(self._values, ((0, 0), (0, 0), (0, column)))
        self._values[:, row, column] = began_s, base, tpot_slo_s, weight
        self._places[request_id] = row, column
        self._num_answers[row] += 1

    def remove(self, request_id: int) -> int | None:
        """Remove the answer; return its row, or ``None`` if it is not there. The row's last one takes its place."""
        place = self._places.pop(request_id, None)
        if place is None:
            return None
        row, column = place
        self._num_answers[row] -= 1
        ids = self._ids[row]
        last = ids.pop()
        if last != request_id:
            ids[column] = last
            self._places[last] = place
            self._values[:, row, column] = self._values[:, row, len(ids)]
        self._values[:, row, len(ids)] = 0.0
        return row

    def num_tokens(self, num_steps: FloatArray) -> IntArray:
        """Tokens so far of each answer; ``num_steps`` are those of the workers, by row."""
        is_taken = np.arange(self._values.shape[2]) < self._num_answers[:, None]
        return _counted((self._values[1] + num_steps[:, None])[is_taken])

    def update(self, rows: IntArray, workers: WorkerColumns, lengths: Lengths) -> None:
        """Compute the harm on some workers anew."""
        num_columns = int(self._num_answers[rows].max())
        began_s, base, tpot_slo_s, weight = self._values[:, rows, :num_columns]
        num_tokens = _counted(base + workers.num_steps[:, None])
        remaining = lengths.table[num_tokens]
        total = num_tokens + remaining
        slo_s = tpot_slo_s * total
        per_s = 1 / np.maximum(slo_s * TPOT_SPREAD, 1e-9)
        remaining *= per_s
        elapsed_s = np.maximum(workers.stepped_s[:, None] - began_s, 0.0)
        step_s, next_step_s, token_s = workers.step_s[:, None], workers.next_step_s[:, None], workers.token_s[:, None]
        margin = (slo_s - elapsed_s) * per_s - remaining * step_s
        lost = np.empty((NUM_CONTEXTS + NUM_DELAYS, *margin.shape))
        contexts, delays = lost[:NUM_CONTEXTS], lost[NUM_CONTEXTS:]
        np.multiply(GRID_TOKENS[:, None, None], remaining * token_s, out=contexts)
        contexts += remaining * (next_step_s - step_s)
        np.multiply(GRID_S[:, None, None], per_s, out=delays)
        lost -= margin
        np.minimum(lost, 50.0, out=lost)
        np.exp(lost, out=lost)
        lost += 1.0
        np.reciprocal(lost, out=lost)
        np.subtract(delays[0].copy(), lost, out=lost)  # without a delay
        self._harm[rows] = np.einsum("grc,rc->rg", lost, weight)

    def harm(self, rows: IntArray, num_tokens: FloatArray | float) -> FloatArray:
        """Misses on each worker if one more answer with so much context decodes there."""
        upper = np.minimum(np.maximum(GRID_TOKENS.searchsorted(num_tokens), 1), NUM_CONTEXTS - 1)
        share = (num_tokens - GRID_TOKENS[upper - 1]) / (GRID_TOKENS[upper] - GRID_TOKENS[upper - 1])
        lower, higher = self._harm[rows, upper - 1], self._harm[rows, upper]
        harm: FloatArray = lower + (higher - lower) * share
        return harm

    def delay_harm(self, rows: IntArray, delay_s: FloatArray) -> FloatArray:
        """Misses on each worker if its answers are delayed by ``delay_s``."""
        upper = np.minimum(np.maximum(GRID_S.searchsorted(delay_s), 1), NUM_DELAYS - 1)
        share = np.minimum((delay_s - GRID_S[upper - 1]) / (GRID_S[upper] - GRID_S[upper - 1]), 1.0)
        lower, higher = self._harm[rows, upper + NUM_CONTEXTS - 1], self._harm[rows, upper + NUM_CONTEXTS]
        harm: FloatArray = lower + (higher - lower) * share
        return harm


def _counted(num_tokens: FloatArray) -> IntArray:
    """Lengths that `Lengths` counts."""
    counted: IntArray = np.minimum(np.maximum(num_tokens, 1), MAX_LENGTH).astype(np.int64)
    return counted
