"""Measures one checkpoint under pdserve and under transformers; writes the report after each row.

Called by `pdserve.bench.gpu_model.run`. Only one of the two is in the device's memory at a time.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from pdserve.bench.gpu_model import limits as formulas
from pdserve.bench.gpu_model.handoff import measure_handoff
from pdserve.bench.gpu_model.limits import DeviceLimits, Variant
from pdserve.bench.gpu_model.own import BLOCK_SIZE, OwnModel, StepSeconds, random_tokens
from pdserve.bench.gpu_model.peer import PeerModel, first_line
from pdserve.bench.gpu_model.plan import DecodeShape, Plan, decode_shapes, num_blocks
from pdserve.bench.gpu_model.report import Report, Row
from pdserve.bench.kernels.contest import PeerAbsentError
from pdserve.bench.kernels.timing import clocks_under
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.config.shape import ModelShape

_GREEDY_PROMPT, _GREEDY_ANSWER = 32, 8
OWN, PEER = "pdserve", "transformers"


@dataclass(frozen=True, slots=True)
class Bench:
    """A checkpoint on a device, and the report that takes what is measured of it."""

    folder: Path
    plan: Plan
    device: torch.device
    limits: DeviceLimits
    free_bytes: int | None
    """As of `decode_shapes`."""
    report: Report
    keep: Callable[[], object]
    """Writes the report."""

    def own(self, variant: Variant, *, decode: bool, prefill: bool) -> list[int]:
        """Steps of our executor; returns its answer to the common prompt, none where it failed."""
        shapes = self._shapes(variant) if decode else []
        answers: list[int] = []

        def measure() -> None:
            tell(f"{OWN}: loading and capturing, {variant.name}")
            most_rows = max((shape.num_rows for shape in shapes), default=1)
            blocks = num_blocks(self.plan, shapes)
            model = OwnModel(self.folder, variant, self.device, num_blocks=blocks, max_rows=most_rows)
            for shape in shapes:
                self._guarded(f"{OWN}, {shape.num_rows} rows", partial(self._own_decode, model, variant, shape))
            for num_tokens in self.plan.prompt_tokens if prefill else ():
                self._guarded(f"{OWN}, {num_tokens} tokens", partial(self._own_prefill, model, variant, num_tokens))
            answers.extend(model.greedy(self._prompt(), _GREEDY_ANSWER))

        self._guarded(f"{OWN}, {variant.name}", measure)
        return answers

    def _own_decode(self, model: OwnModel, variant: Variant, shape: DecodeShape) -> None:
        self._keep_decode(OWN, variant, shape, model.decode(*shape, self.plan.num_steps))
        if self.device.type == "cuda":
            clocks = clocks_under(lambda: model.step_once(*shape), self.device)
            self.report.clocks[f"decoding {shape.num_rows} rows, {variant.name}"] = clocks

    def _own_prefill(self, model: OwnModel, variant: Variant, num_tokens: int) -> None:
        self._keep_prefill(OWN, variant, num_tokens, model.prefill(num_tokens, self.plan.num_prompts))

    def handoff(self) -> None:
        """The KV of the shortest prompt from one pool to another; beside copies to the host and back."""
        variant, num_tokens = Variant(dtype=self.plan.dtype), min(self.plan.prompt_tokens)

        def measure() -> None:
            config = DecoderConfig.from_folder(self.folder)
            layout = config.kv_layout(-(-num_tokens // BLOCK_SIZE), BLOCK_SIZE, variant.held_kv_dtype, "random")
            tell(f"handing off {layout.pool_bytes / 1e6:.0f} MB")
            seconds = measure_handoff(layout, self.device)
            self._keep_prompt("handoff", OWN, variant, num_tokens, seconds.handoff_s, seconds.link_s)

        self._guarded(f"{OWN}, handoff", measure)

    def peer(self, own_answer: list[int]) -> None:
        """The same steps of transformers.

        Args:
            own_answer: of `own`, for comparison; empty for none.
        """
        variant = Variant(dtype=self.plan.dtype)

        def measure() -> None:
            tell(f"{PEER}: loading")
            options = dict(self.plan.peer_options or {})
            model = PeerModel(self.folder, self.plan.dtype, self.device, options=options)
            for num_tokens in self.plan.prompt_tokens:
                self._guarded(f"{PEER}, {num_tokens} tokens", partial(self._peer_prefill, model, variant, num_tokens))
            if own_answer:
                self.report.notes.append(agreement(own_answer, model.greedy(self._prompt(), len(own_answer))))
            for shape in self._shapes(variant):
                self._guarded(f"{PEER}, {shape.num_rows} rows", partial(self._peer_decode, model, variant, shape))
            self.report.notes += [f"{PEER}, {way}" for way in model.ways]

        self._guarded(PEER, measure)

    def _peer_prefill(self, model: PeerModel, variant: Variant, num_tokens: int) -> None:
        self._keep_prefill(PEER, variant, num_tokens, model.prefill_s(num_tokens, self.plan.num_prompts))

    def _peer_decode(self, model: PeerModel, variant: Variant, shape: DecodeShape) -> None:
        self._keep_decode(PEER, variant, shape, model.decode_s(*shape, self.plan.num_steps))

    def _prompt(self) -> list[int]:
        return random_tokens(_GREEDY_PROMPT, self._shape.vocab_size, seed=1)

    @property
    def _shape(self) -> ModelShape:
        return DecoderConfig.from_folder(self.folder).shape

    def _shapes(self, variant: Variant) -> list[DecodeShape]:
        shapes = list(decode_shapes(self.plan, self._shape, variant, self.free_bytes))
        for num_rows in set(self.plan.decode_rows) - {fitting.num_rows for fitting in shapes}:
            note = f"{num_rows} rows are not measured with {variant.name}: not half of their context fits the device"
            if note not in self.report.notes:
                self.report.notes.append(note)
        return shapes

    def _keep_decode(self, engine: str, variant: Variant, shape: DecodeShape, seconds: StepSeconds | float) -> None:
        mean_context = shape.context_tokens - (self.plan.num_steps - 1) / 2
        self._keep(
            seconds,
            Row(
                phase="decode",
                engine=engine,
                held=variant.name,
                num_rows=shape.num_rows,
                context_tokens=shape.context_tokens,
                num_tokens=shape.num_rows,
                step_s=0.0,
                limit_s=formulas.decode_limit_s(self._shape, variant, shape.num_rows, mean_context, self.limits),
            ),
        )

    def _keep_prefill(self, engine: str, variant: Variant, num_tokens: int, seconds: StepSeconds | float) -> None:
        limit_s = formulas.prefill_limit_s(self._shape, num_tokens, self.limits)
        self._keep_prompt("prefill", engine, variant, num_tokens, seconds, limit_s)

    def _keep_prompt(
        self,
        phase: str,
        engine: str,
        variant: Variant,
        num_tokens: int,
        seconds: StepSeconds | float,
        limit_s: float,
    ) -> None:
        self._keep(
            seconds,
            Row(
                phase=phase,
                engine=engine,
                held=variant.name,
                num_rows=1,
                context_tokens=num_tokens,
                num_tokens=num_tokens,
                step_s=0.0,
                limit_s=limit_s,
            ),
        )

    def _keep(self, seconds: StepSeconds | float, row: Row) -> None:
        times = seconds._asdict() if isinstance(seconds, StepSeconds) else {"step_s": seconds}
        row = replace(row, **times)
        self.report.rows.append(row)
        self.keep()
        tell(f"{row.phase} {row.shape}: {row.engine}, {row.held}: {row.step_s * 1e3:.3f} ms, {row.limit_share:.1%}")

    def _guarded(self, what: str, measure: Callable[[], None]) -> None:
        """What fails is reported, and does not stop the rest.

        Raises:
            DeviceLostError: the device is lost with it.
        """
        try:
            measure()
        except DeviceLostError:
            raise
        except PeerAbsentError as error:
            self.report.notes.append(f"{what} is absent: {error}")
        except Exception as error:  # Whatever it was, what was measured before and what comes next is worth having.
            self._keep_failure(f"{what}: {first_line(error)}", is_peer=what.startswith(PEER))
            if isinstance(error, torch.AcceleratorError):
                raise DeviceLostError from error
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.keep()

    def _keep_failure(self, line: str, *, is_peer: bool) -> None:
        """Of a peer, it is no failure of ours."""
        (self.report.notes if is_peer else self.report.failures).append(line)
        self.keep()
        tell(f"FAILED: {line}")


class DeviceLostError(Exception):
    """Nothing can be measured on it any more."""


def agreement(own: list[int], peer: list[int]) -> str:
    """In words."""
    same = next((place for place, (a, b) in enumerate(zip(own, peer, strict=True)) if a != b), len(own))
    return f"greedy answers to one prompt: the first {same} of {len(own)} tokens are the same"


def tell(line: str) -> None:
    """Progress, which is no part of what is printed."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
