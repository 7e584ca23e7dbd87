"""One rank's share of a model on its device: computes steps as the leader packed them.

Every rank has a `RankModel`. The leader's belongs to a `pdserve.model.executors.model.ModelExecutor`, which packs the
steps, sends each to the other ranks, and samples. The others call `RankModel.follow`. All launch the same operations in
the same order, because collectives meet only so. A worker of one rank is its own leader.

Shape suffixes: R rows that a captured step may sample, B rows that a step samples, V vocabulary, E hidden size, T some
tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.precision import Precision
from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.operations import DecoderKernels
from pdserve.kernels.selection import select_kernels, select_sampling_kernels
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.config.sharding import shard_of
from pdserve.model.decoder.decoder import Decoder
from pdserve.model.decoder.ranks import ONE_RANK, Ranks
from pdserve.model.executors.decode_graphs import DecodeGraphs, warm_up
from pdserve.model.executors.device_queue import select_queue
from pdserve.model.executors.step_inputs import StepShape, StepTensors
from pdserve.model.sampling.logprobs import pieces_of
from pdserve.model.sampling.sampling import likeliest

_NUM_COUNTS = 10
"""Words of an encoded step before the lengths of its prompts."""


class PackedStep(NamedTuple):
    """A step as every rank computes it."""

    words: npt.NDArray[np.int32]
    """`pdserve.model.executors.step_inputs.pack_step`."""
    shape: StepShape
    """Without padding."""
    num_sampling: int
    prompt_lengths: tuple[int, ...]
    """Tokens of each row that requests prompt log probabilities."""
    is_decode: bool
    """As in `pdserve.model.executors.step_inputs.OutputRows`."""
    has_late_tokens: bool
    """Some tokens are in `RankModel.sampled_R`."""
    is_captured: bool

    def encode(self) -> npt.NDArray[np.int32]:
        """The step as words for `decode`."""
        lengths = self.prompt_lengths
        flags = (self.is_decode, self.has_late_tokens, self.is_captured)
        counts = (*self.shape, self.num_sampling, *flags, len(lengths), *lengths)
        return np.concatenate((np.array(counts, np.int32), self.words))

    @classmethod
    def decode(cls, encoded: npt.NDArray[np.int32]) -> PackedStep:
        *shape, num_sampling, is_decode, has_late_tokens, is_captured, num_prompts = encoded[:_NUM_COUNTS].tolist()
        lengths, words = np.split(encoded[_NUM_COUNTS:], [num_prompts])
        flags = map(bool, (is_decode, has_late_tokens, is_captured))
        return cls(words, StepShape(*shape), num_sampling, tuple(lengths.tolist()), *flags)


class Computed(NamedTuple):
    """What a step computed, on the device."""

    inputs: torch.Tensor
    """The step's words."""
    logits: torch.Tensor | None
    """float32 ``[B, V]``, of sampling rows; None if no row samples."""
    best: torch.Tensor | None
    """``[B]``: highest logit of each; `RankModel.sampled_R` has the likeliest tokens."""
    prompts: list[torch.Tensor]
    """Hidden states ``[T, E]`` of each row that requests prompt log probabilities, for `RankModel.logits`."""


class RankModel:
    """Computes steps on one rank. Not thread-safe."""

    def __init__(
        self,
        *,
        folder: Path,
        config: DecoderConfig,
        layout: KvLayout,
        pool: KvPool,
        precision: Precision,
        max_captured_rows: int = 0,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        """Load the rank's share of the checkpoint in ``folder`` to the pool's device and capture its decode steps.

        Args:
            layout: layout of all ranks' pool, for the model that ``config`` describes.
            pool: the rank's heads of it; new tokens' KV is written to it.
            precision: of weights and activations; the KV dtype is the layout's.
            max_captured_rows: rows of the largest captured decode step; 0 captures none.
            ranks: share the model; all are built at the same time.

        Raises:
            ValueError: unusable weights, or weights that do not match ``config``.
        """
        shard = shard_of(config.shape, ranks.rank, ranks.num_ranks)
        assert pool.shape == (layout.num_blocks, len(shard.kv_heads), *layout.shape[2:]), f"{pool.shape} for {layout}"
        device, kernels = pool.values.device, select_kernels(pool)
        self._pool = pool
        self._ranks = ranks
        self.num_ranks = ranks.num_ranks
        self._model = Decoder(folder, config, precision, kernels, ranks)
        self.logits = self._model.logits
        self.queue = select_queue(device)
        self._vocab_size = vocab_size = config.shape.vocab_size
        # Tokens of the previous step, in the captured steps' buffer unless that step sampled too many rows for it.
        self._captured_R = torch.zeros(max_captured_rows, dtype=torch.int64, device=device)
        self.sampled_R = self._captured_R
        self._graphs: DecodeGraphs | None = None
        if device.type != "cpu":
            warm_up(
                self._model,
                pool,
                self.queue,
                select_sampling_kernels(device),
                vocab_size=vocab_size,
                max_rows=max_captured_rows,
            )
        if max_captured_rows and can_capture(kernels):
            max_blocks = min(layout.num_blocks, layout.num_blocks_for(config.max_context_length))
            self._graphs = DecodeGraphs(
                self._model, pool, self.queue, self._captured_R, vocab_size=vocab_size, max_blocks=max_blocks
            )

    def padding(self, num_rows: int, is_decode: bool) -> int | None:
        """Padding rows of the captured step that computes ``num_rows``; None if none does."""
        has_room = num_rows <= len(self._captured_R) and self.sampled_R is self._captured_R
        return self._graphs.padding(num_rows) if self._graphs is not None and has_room and is_decode else None

    def compute(self, step: PackedStep) -> Computed:
        """Launch the forward pass; write the KV of its tokens."""
        if step.is_captured:
            assert self._graphs is not None
            logits_BV, best_B = self._graphs.run(step.words, step.shape.num_rows)
            return Computed(self._graphs.inputs, logits_BV, best_B, [])
        inputs = self.queue.put(step.words)
        tensors = StepTensors.of(inputs, step.shape)
        wanted = None if step.is_decode else tensors.outputs
        tokens_T = tensors.known_tokens(self.sampled_R) if step.has_late_tokens else tensors.tokens.long()
        hidden_OE = self._model.forward(tokens_T, self._pool, tensors.metadata, wanted)
        hidden_BE, *prompts = torch.split(hidden_OE, [step.num_sampling, *step.prompt_lengths])
        if not step.num_sampling:
            return Computed(inputs, None, None, prompts)
        logits_BV = self.logits(hidden_BE)
        best_B, self.sampled_R = likeliest(logits_BV)
        if len(self.sampled_R) <= len(self._captured_R):
            self._captured_R[: len(self.sampled_R)] = self.sampled_R
            self.sampled_R = self._captured_R
        return Computed(inputs, logits_BV, best_B, prompts)

    def share_tokens(self, num_sampled: int) -> None:
        """Give all ranks the tokens that the leader sampled, where the next step takes them from `sampled_R`."""
        if self.queue.pipeline_depth > 1:
            self._ranks.copy_leaders_(self.sampled_R[:num_sampled])

    @torch.inference_mode()
    def follow(self, step: PackedStep) -> None:
        """Launch a step of the leader's on another rank."""
        computed = self.compute(step)
        for hidden_TE in computed.prompts:
            for piece_TE in pieces_of(hidden_TE):
                self.logits(piece_TE)
        if step.num_sampling:
            self.share_tokens(step.num_sampling)


def can_capture(kernels: DecoderKernels) -> bool:
    """Return True if decode steps may be captured; always on a CPU, where a replay computes directly."""
    return kernels.is_capturable or kernels.device.type == "cpu"
