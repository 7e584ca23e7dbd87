"""What the ``goodput`` policy scores: a prompt on a worker that computes it, its answer on one that decodes it. Pure;
`pdserve.router.requests.goodput` makes them.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple

from pdserve.contracts.worker_config import WorkerRole
from pdserve.router.requests.lengths import Lengths
from pdserve.router.requests.placement import PrefillChoice, PrefixPull, PromptBlocks, tie_order
from pdserve.router.requests.worker_view import WorkerView


@dataclass(slots=True)
class DecodeOption:
    """An answer on one worker."""

    view: WorkerView
    num_cached: int
    """Tokens of the prompt that the worker caches."""
    lacking: float
    """Blocks and batch slots, as in `shortfall`."""
    step_s: float
    """Seconds of a step with the answer."""
    chance: float
    """Probability of meeting TPOT."""
    joining_s: float
    """Seconds that those add to a step that are about to be handed off."""
    own_misses: float
    """Expected misses of TPOT of answers about to join, and what the time of this answer counts as."""
    known_harm: float | None = None
    """What `harm` returned: it is asked for with the handoff, and again with each prompt that would decode there."""

    def gain(self, weight: float) -> float:
        """Score, less the harm."""
        return weight * self.chance - self.own_misses

    def harm(self, lengths: Lengths) -> float:
        """Expected misses of answers that decode there."""
        if self.known_harm is None:
            after_s = self.joining_s + self.step_s - self.view.step_s
            self.known_harm = self.view.misses_of_steps(self.joining_s, after_s, lengths)
        return self.known_harm


class Handoff(NamedTuple):
    """A prompt that is handed off."""

    best: DecodeOption
    score: float
    """Gain of ``best`` for this arrival, less the harm there."""
    num_pulled: int
    """Tokens of the prompt that the best worker is expected to pull."""
    num_decode: int
    """Decode workers."""
    hosts: AbstractSet[str]
    """Of the best few."""


class PrefillOption(NamedTuple):
    """A prompt on one worker."""

    view: WorkerView
    decode: DecodeOption | None
    """Its answer there; None if it is handed off."""
    num_cached: int
    """Tokens that the worker caches, or will when it has pulled them."""
    num_pulled: int
    """Tokens that are pulled from it for the answer."""
    prefill_s: float
    """Seconds of its own tokens."""
    due_s: float
    ttft_s: float
    chance: float
    """Probability of meeting TTFT."""
    spread_s: float
    """Error of the predicted TTFT."""
    cost: float
    """Misses that its seconds are expected to cause among prompts behind it."""
    gain: float
    """Score, less the harm."""
    pull: PrefixPull | None
    """What it pulls first."""

    def harm(self, lengths: Lengths) -> float:
        """Expected misses of answers that decode there."""
        delayed = self.view.misses_of_delay(self.prefill_s, lengths)
        return delayed + self.decode.harm(lengths) if self.decode else delayed

    def order(self, blocks: PromptBlocks, harm: float) -> tuple[Any, ...]:
        """The best one has the least; it begins with the score, negated."""
        tie = tie_order(blocks, self.view.snapshot)
        return harm - self.gain, self.ttft_s, self.view.role is WorkerRole.DECODE, tie, self.decode is None

    def spared_if_late(self, num_tokens: int) -> float:
        """Part of ``cost`` that a late prompt would not cause: it delays nothing that arrives while it waits, and what
        arrives later by half a chunk at most."""
        chunk = min(1.0, self.view.snapshot.max_batch_tokens / (num_tokens - self.num_cached))
        return self.cost * (self.ttft_s - self.prefill_s * (1 + chunk) / 2) / self.ttft_s

    def choice(self) -> PrefillChoice:
        return PrefillChoice(
            self.view.worker_id,
            self.decode is None,
            self.ttft_s,
            self.num_cached,
            num_pulled_tokens=self.num_pulled,
            prefill_s=self.prefill_s,
            due_s=self.due_s,
            prefix=self.pull,
        )
