"""One request in flight, as its client sees it: the tokens on their way, and the one outcome.

The HTTP edge iterates it; its legs (`pdserve.router.leg`) bring the tokens. It begins with one leg for all choices, and
where that one cannot go on whole, with one for each. Never speaks to a worker.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from pdserve.contracts.request import Outcome
from pdserve.contracts.step import TokenLogprobs
from pdserve.router.generation import GenerationError, TokenDelta
from pdserve.router.job import ChoiceProgress, Job, Tries, late_error
from pdserve.router.leg import Leg, LegPlacer
from pdserve.router.metrics import RouterMetrics


class FlightOwner(LegPlacer, Protocol):
    """What a flight asks of the dispatcher."""

    def next_request_id(self) -> int:
        """A name for one more leg."""
        ...

    def entered(self, leg: Leg) -> None:
        """Tell ``leg`` what workers say of it from now on, and place it."""
        ...

    def landed(self, flight: Flight) -> None:
        """``flight.outcome`` is set: forget it."""
        ...


class Flight:
    """Implements `pdserve.router.generation.Generation` for the edge and `LegOwner` for its legs."""

    def __init__(
        self,
        owner: FlightOwner,
        metrics: RouterMetrics,
        now_s: Callable[[], float],
        job: Job,
        num_choices: int,
    ) -> None:
        self.job = job
        self.num_choices = num_choices
        self.outcome: Outcome | None = None
        self.legs: list[Leg] = []
        """Those that are not over."""
        self._owner = owner
        self._metrics = metrics
        self._now_s = now_s
        self._num_cached_tokens: int | None = None
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._deltas: deque[TokenDelta] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: GenerationError | None = None

    # What the HTTP edge sees

    @property
    def num_cached_tokens(self) -> int:
        return self._num_cached_tokens or 0

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprobs]:
        return self._prompt_logprobs

    def __aiter__(self) -> AsyncIterator[TokenDelta]:
        return self

    async def __anext__(self) -> TokenDelta:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self.outcome is not None:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._deltas.popleft()

    def take_ready(self) -> Sequence[TokenDelta]:
        ready = list(self._deltas)
        self._deltas.clear()
        return ready

    def finish(self, choice: int) -> None:
        for leg in list(self.legs):
            leg.drop(choice)

    def cancel(self) -> None:
        if self.outcome is None:
            self._land(Outcome.CANCELLED)

    # What the dispatcher tells it

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return self._now_s() >= self.job.deadline_s

    def begin(self) -> None:
        """Ask for the first attempt."""
        self._enter([ChoiceProgress(index) for index in range(self.num_choices)], Tries())

    def fail(self, error: GenerationError) -> None:
        """End it with an error, on every worker too."""
        if self.outcome is None:
            self._error = error
            self._land(Outcome.REJECTED if error.status == 400 else Outcome.FAILED)

    def fail_late(self) -> None:
        self.fail(late_error())

    # What its legs tell it

    def started(self, num_cached_tokens: int) -> None:
        if self._num_cached_tokens is None:
            self._num_cached_tokens = min(num_cached_tokens, len(self.job.prompt_tokens))
            self._metrics.cached_prompt_tokens.inc(self._num_cached_tokens)

    @property
    def wants_prompt_logprobs(self) -> bool:
        is_asked = self.job.sampling.num_prompt_logprobs >= 0
        return is_asked and len(self._prompt_logprobs) < len(self.job.prompt_tokens) - 1

    def take_prompt_logprobs(self, first_position: int, entries: Sequence[TokenLogprobs]) -> bool:
        num_known = len(self._prompt_logprobs) + 1  # the first token has none
        if first_position > num_known:
            return False
        num_missing = len(self.job.prompt_tokens) - num_known
        self._prompt_logprobs += entries[num_known - first_position :][:num_missing]
        return True

    def deliver(self, delta: TokenDelta) -> None:
        self._deltas.append(delta)
        if self._waiter is not None:
            self._wake()

    def split(self, leg: Leg) -> None:
        leg.end()
        self.legs.remove(leg)
        for choice in leg.choices:
            self._enter([choice], Tries(leg.tries.num_attempts, leg.tries.num_failures))

    def leg_over(self, leg: Leg) -> None:
        self.legs.remove(leg)
        if not self.legs:
            self._land(Outcome.FINISHED)

    # Its own steps

    def _enter(self, choices: Sequence[ChoiceProgress], tries: Tries) -> None:
        request_id = self._owner.next_request_id()
        leg = Leg(
            self,
            self._owner,
            self._metrics,
            self._now_s,
            request_id=request_id,
            job=self.job,
            choices=choices,
            tries=tries,
        )
        self.legs.append(leg)
        self._owner.entered(leg)

    def _wake(self) -> None:
        """Let the edge look again, if it waits."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _land(self, outcome: Outcome) -> None:
        """Reach the outcome, once."""
        assert self.outcome is None
        self.outcome = outcome
        for leg in self.legs:
            leg.end()
        self.legs.clear()
        self._wake()
        self._owner.landed(self)
