"""An open-loop load generator: sends each request at its due time, whatever happens to earlier ones.

`measure_load` sends a workload (`pdserve.planner.workload.requests`) to an OpenAI-compatible server and returns the
same arrays as the simulator, so the same code computes attainment and percentiles of both. A request's time starts when
it was due, not when it was sent: a late generator makes figures worse, never better. The result includes the
generator's lateness and CPU use; a measurement with too much of either is invalid (`GeneratorHealth.problems`).

Prompts are token ids. Answers have exactly the workload's length, by ``ignore_eos``, which pdserve and vLLM support.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import NamedTuple

import msgspec
import numpy as np
import uvloop

from pdserve.loadgen.client import StreamClient, StreamedAnswer
from pdserve.planner.arrays import FloatArray
from pdserve.planner.simulate.simulation import RequestTimes
from pdserve.planner.workload.requests import Segment, SimulatedRequest

LEAD_S = 0.2
"""From the call to instant 0 of the workload."""
PROBE_S = 0.02
"""Interval at which the generator measures its own loop's lateness."""
MAX_LATE_S = 0.01
MAX_CPU_SHARE = 0.7
"""Beyond these a generator distorts what it measures; of lateness, the 99th percentile counts."""

_FIRST_PRIVATE_CONTENT = 2**31
_REJECTIONS = (429, 503)
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorHealth:
    """Load and lateness of the generator, in real seconds."""

    cpu_share: float
    """Share of one core."""
    send_late_p99_s: float
    """From a request's due time to its write to the socket."""
    send_late_max_s: float
    loop_late_p99_s: float
    """Lateness of a timer in the loop that also reads the answers."""

    def problems(self, max_late_s: float = MAX_LATE_S) -> list[str]:
        """Reasons why the measurement is invalid, a line each."""
        found = []
        if self.cpu_share > MAX_CPU_SHARE:
            found.append(f"the load generator used {self.cpu_share:.0%} of a core; lower the rate")
        for what, late_s in (("sent", self.send_late_p99_s), ("read", self.loop_late_p99_s)):
            if late_s > max_late_s:
                late = f"{late_s * 1e3:.1f} ms late or more"
                found.append(f"the load generator {what} 1 % {late}; give it a core of its own, or lower the rate")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Times at the client, in seconds of the workload's clock, which starts with it."""

    times: RequestTimes
    """``started_s`` is unknown to a client, and NaN."""
    gap_s: FloatArray
    """Every gap between two tokens of a complete answer (ITL)."""
    errors: Counter[str]
    """Count of each error of requests that were neither finished nor rejected."""
    ended_s: float
    """Time of the last complete answer."""
    offered_until_s: float = inf
    """Time of the last request that begins a session: later turns arrive while the load falls."""
    health: GeneratorHealth

    @property
    def num_finished(self) -> int:
        return int(np.count_nonzero(~np.isnan(self.times.last_token_s)))

    @property
    def num_rejected(self) -> int:
        return int(np.count_nonzero(self.times.is_rejected))


class Progress(NamedTuple):
    """State of a running load; tokens are counted as they arrive."""

    num_sent: int
    num_done: int
    num_prefilled_tokens: int
    """Prompt tokens of requests whose token 0 arrived."""
    num_output_tokens: int


class PromptWriter:
    """Token ids for prompts: equal where the workload says that contents are equal, random everywhere else.

    Args:
        seed: prompts of two seeds share nothing, so that none is found in a prefix cache that saw the other.
    """

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._seed = seed
        self._num_private = 0

    def tokens(self, request: SimulatedRequest, before: Sequence[int] = ()) -> list[int]:
        """The prompt of ``request``.

        Args:
            before: of a follow-up, the prompt of the turn before and its answer.
        """
        segments = request.segments
        if not segments:
            self._num_private += 1
            num_tokens = max(1, request.num_prompt_tokens - len(before))
            segments = (Segment(_FIRST_PRIVATE_CONTENT + self._num_private, num_tokens),)
        tokens = list(before)
        for segment in segments:
            random = np.random.default_rng((self._seed, segment.content))
            tokens += random.integers(0, self._vocab_size, segment.num_tokens).tolist()
        return tokens


def measure_load(
    url: str,
    requests: Sequence[SimulatedRequest],
    *,
    vocab_size: int,
    time_scale: float = 1.0,
    timeout_s: float = 600.0,
    max_concurrency: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    api_key: str = "",
) -> Measurement:
    """Send ``requests``, in order of arrival, and wait for all answers.

    Args:
        url: of the server, without ``/v1``.
        vocab_size: token ids of prompts are below it.
        time_scale: a second of the workload lasts this many real ones; for emulated clusters that are slowed alike.
        timeout_s: real seconds that one answer may take.
        max_concurrency: requests in flight at once. Those beyond wait, and are due when they leave, as in vLLM.
        progress: called about once a second, and at the end.

    Raises:
        OSError: nobody listens at ``url``.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        client = StreamClient(url, api_key)
        load = _Load(client, requests, vocab_size, time_scale, timeout_s, max_concurrency, progress)
        return runner.run(load.run())


@dataclass(slots=True, eq=False)
class _Sent:
    """One request that was sent, and its answer."""

    request: SimulatedRequest
    num_prompt_tokens: int
    due_s: float
    """On the real clock."""
    answer: StreamedAnswer


class _Load:
    """One run."""

    def __init__(
        self,
        client: StreamClient,
        requests: Sequence[SimulatedRequest],
        vocab_size: int,
        time_scale: float,
        timeout_s: float,
        max_concurrency: int | None,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._client = client
        self._requests = requests
        # A server's prefix cache outlives a measurement.
        self._writer = PromptWriter(vocab_size, seed=time.time_ns())
        self._time_scale = time_scale
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(max_concurrency or len(requests) + 1)
        self._progress = progress
        self._sent: list[_Sent] = []
        self._num_done = 0
        self._loop_late_s: list[float] = []

    async def run(self) -> Measurement:
        await self._client.open()
        probe = asyncio.create_task(self._probe())
        cpu_s, began_s = time.process_time(), time.monotonic()
        started_s = began_s + LEAD_S
        running = []
        try:
            for request in self._requests:
                due_s = started_s + request.arrived_s * self._time_scale
                tokens = self._writer.tokens(request)
                body = _body(request, tokens)
                await _sleep_until(due_s)
                running.append(asyncio.create_task(self._converse(request, tokens, body, due_s)))
            await asyncio.gather(*running)
            cpu_share = (time.process_time() - cpu_s) / (time.monotonic() - began_s)
            if self._progress is not None:
                self._progress(self._reached())
        finally:
            for task in (probe, *running):
                task.cancel()
            self._client.close()
        return self._measurement(started_s, cpu_share)

    async def _converse(self, request: SimulatedRequest, tokens: list[int], body: bytes, due_s: float) -> None:
        """Send a request and, one after the other, the turns that follow it."""
        while True:
            if self._slots.locked():
                await self._slots.acquire()
                due_s = time.monotonic()
            else:
                await self._slots.acquire()
            answer = StreamedAnswer()
            self._sent.append(_Sent(request, len(tokens), due_s, answer))
            try:
                await self._client.complete(body, answer, self._timeout_s)
            finally:
                self._slots.release()
                self._num_done += 1
            if request.follow_up is None or answer.error:
                return
            request = request.follow_up
            due_s = answer.token_s[-1] + request.arrived_s * self._time_scale
            tokens = self._writer.tokens(request, [*tokens, *answer.token_ids])
            body = _body(request, tokens)
            await _sleep_until(due_s)

    async def _probe(self) -> None:
        reported_s = time.monotonic()
        while True:
            due_s = time.monotonic() + PROBE_S
            await asyncio.sleep(PROBE_S)
            now_s = time.monotonic()
            self._loop_late_s.append(now_s - due_s)
            if self._progress is not None and now_s - reported_s >= 1:
                reported_s = now_s
                self._progress(self._reached())

    def _reached(self) -> Progress:
        return Progress(
            num_sent=len(self._sent),
            num_done=self._num_done,
            num_prefilled_tokens=sum(each.num_prompt_tokens for each in self._sent if each.answer.token_s),
            num_output_tokens=sum(each.answer.num_tokens or len(each.answer.token_s) for each in self._sent),
        )

    def _measurement(self, started_s: float, cpu_share: float) -> Measurement:
        sent = sorted(self._sent, key=lambda each: each.due_s)
        # Of requests that never left there is no lateness, but an error each.
        late_s = [each.answer.sent_s - each.due_s for each in sent if each.answer.sent_s] or [0.0]
        health = GeneratorHealth(
            cpu_share=cpu_share,
            send_late_p99_s=float(np.percentile(late_s, 99)),
            send_late_max_s=max(late_s),
            loop_late_p99_s=float(np.percentile(self._loop_late_s or [0.0], 99)),
        )
        times = _request_times(sent, started_s, self._time_scale)
        gaps = [
            np.diff(each.answer.token_s[: each.answer.num_tokens or None]) for each in sent if not each.answer.error
        ]
        is_failed = [bool(each.answer.error) and each.answer.status not in _REJECTIONS for each in sent]
        errors = Counter(each.answer.error for each, failed in zip(sent, is_failed, strict=True) if failed)
        firsts = {id(request) for request in self._requests}
        offered_until_s = max((each.due_s for each in sent if id(each.request) in firsts), default=started_s)
        has_ended = not np.isnan(times.last_token_s).all()
        return Measurement(
            times=times,
            gap_s=np.concatenate([*gaps, np.zeros(0)]) / self._time_scale,
            errors=errors,
            ended_s=float(np.nanmax(times.last_token_s)) if has_ended else 0.0,
            health=health,
            offered_until_s=(offered_until_s - started_s) / self._time_scale,
        )


def _body(request: SimulatedRequest, tokens: list[int]) -> bytes:
    return _encode(
        {
            "prompt": tokens,
            "max_tokens": request.num_output_tokens,
            "ignore_eos": True,
            "temperature": 0,  # costs the server less than the API's default of 1
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"return_token_ids": True} if request.follow_up is not None else {}),
        }
    )


async def _sleep_until(instant_s: float) -> None:
    # uvloop's timers are of whole milliseconds from the loop's last turn, and so early at times.
    wait_s = instant_s - time.monotonic()
    while wait_s > 0:
        await asyncio.sleep(wait_s)
        wait_s = instant_s - time.monotonic()


def _request_times(sent: Sequence[_Sent], started_s: float, time_scale: float) -> RequestTimes:
    def floats(instant_s: Callable[[_Sent], float]) -> FloatArray:
        return (np.array([instant_s(each) for each in sent], np.float64) - started_s) / time_scale

    return RequestTimes(
        arrived_s=floats(lambda each: each.due_s),
        started_s=np.full(len(sent), nan),
        first_token_s=floats(lambda each: _token_s(each.answer, 0)),
        second_token_s=floats(lambda each: _token_s(each.answer, 1)),
        last_token_s=floats(lambda each: nan if each.answer.error else _token_s(each.answer, -1)),
        num_prompt_tokens=np.array([each.num_prompt_tokens for each in sent], np.int64),
        num_cached_tokens=np.array([each.answer.num_cached_tokens for each in sent], np.int64),
        num_output_tokens=np.array(
            [each.answer.num_tokens or each.request.num_output_tokens for each in sent], np.int64
        ),
        is_rejected=np.array([each.answer.status in _REJECTIONS for each in sent], np.bool_),
    )


def _token_s(answer: StreamedAnswer, index: int) -> float:
    """Time of a token; an event that brings only the end, after the last token, does not count as one."""
    token_s = answer.token_s[: answer.num_tokens or None]
    return token_s[index] if token_s and index < len(token_s) else nan
