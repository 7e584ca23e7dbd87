"""One rank's share of a model on its device: computes steps as the leader packed them.

Every rank has a `RankModel`. The leader's belongs to a `pdserve.model.executors.model.ModelExecutor`, or to one for
each micro-batch of a pipeline, which packs the steps, sends each to the other ranks, and samples. The others call
`RankModel.follow`. The ranks of a stage launch the same operations in the same order, because collectives meet only so,
and all stages take the steps in the same order. A worker of one rank is its own leader.

The last collective of a step in a stage follows all that the step reads and writes in any of its ranks' pools, and the
message to the leader follows those of all stages. Once the leader's step is over, so is every rank's use of the blocks.

Shape suffixes: R rows that a captured step may sample, B rows that a step samples, V vocabulary, E hidden size, T some
tokens.
"""

from __future__ import annotations

from itertools import accumulate, chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.precision import Precision
from pdserve.contracts.step import BlockCopy
from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.operations import DecoderKernels
from pdserve.kernels.selection import select_kernels, select_sampling_kernels
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.config.sharding import shard_of
from pdserve.model.decoder.decoder import Decoder
from pdserve.model.decoder.ranks import ONE_RANK, Ranks
from pdserve.model.executors.block_copies import BlockCopies, copy_blocks
from pdserve.model.executors.decode_graphs import DecodeGraphs, warm_up
from pdserve.model.executors.device_queue import select_queue, swap_slots
from pdserve.model.executors.step_inputs import StepShape, StepTensors
from pdserve.model.sampling.logprobs import pieces_of
from pdserve.model.sampling.sampling import likeliest

_NUM_COUNTS = 14
"""Words of an encoded step before the lengths of its prompts."""
_NO_WORDS = np.empty(0, np.int32)


class PackedStep(NamedTuple):
    """A step as every rank computes it. The defaults are those of a step without rows."""

    words: npt.NDArray[np.int32] = _NO_WORDS
    """`pdserve.model.executors.step_inputs.pack_step`."""
    shape: StepShape = StepShape(0, 0, 0, 0, 0, 0)
    """Without padding."""
    num_sampling: int = 0
    prompt_lengths: tuple[int, ...] = ()
    """Tokens of each row that requests prompt log probabilities."""
    is_decode: bool = False
    """As in `pdserve.model.executors.step_inputs.OutputRows`."""
    has_late_tokens: bool = False
    """Some tokens are in `RankModel.sampled_R`."""
    is_captured: bool = False
    micro_batch: int = 0
    """Of the pipeline."""
    swap_outs: tuple[BlockCopy, ...] = ()
    """As in `pdserve.contracts.step.StepBatch`, like ``swap_ins``; a step has either copies or rows."""
    swap_ins: tuple[BlockCopy, ...] = ()

    def encode(self) -> npt.NDArray[np.int32]:
        """The step as words for `decode`."""
        flags = (self.is_decode, self.has_late_tokens, self.is_captured)
        lists = (self.prompt_lengths, self.swap_outs, self.swap_ins)
        counts = (*self.shape, self.num_sampling, *flags, self.micro_batch, *map(len, lists), *self.prompt_lengths)
        copies = (*chain.from_iterable(self.swap_outs), *chain.from_iterable(self.swap_ins))
        return np.concatenate((np.array((*counts, *copies), np.int32), self.words))

    @classmethod
    def decode(cls, encoded: npt.NDArray[np.int32]) -> PackedStep:
        *shape, num_sampling, is_decode, has_late_tokens, is_captured, micro_batch, num_prompts, num_outs, num_ins = (
            encoded[:_NUM_COUNTS].tolist()
        )
        ends = accumulate((num_prompts, 2 * num_outs, 2 * num_ins))
        lengths, outs, ins, words = np.split(encoded[_NUM_COUNTS:], list(ends))
        return cls(
            words=words,
            shape=StepShape(*shape),
            num_sampling=num_sampling,
            prompt_lengths=tuple(lengths.tolist()),
            is_decode=bool(is_decode),
            has_late_tokens=bool(has_late_tokens),
            is_captured=bool(is_captured),
            micro_batch=micro_batch,
            swap_outs=tuple(map(BlockCopy._make, outs.reshape(-1, 2).tolist())),
            swap_ins=tuple(map(BlockCopy._make, ins.reshape(-1, 2).tolist())),
        )


class Begun(NamedTuple):
    """A step after the forward pass of this rank's layers."""

    inputs: torch.Tensor
    """The step's words."""
    hidden: torch.Tensor
    """As `pdserve.model.decoder.decoder.Decoder.forward` returns them."""


class Computed(NamedTuple):
    """What a step computed, on the device."""

    inputs: torch.Tensor
    """The step's words."""
    logits: torch.Tensor | None
    """float32 ``[B, V]``, of sampling rows; None if no row samples."""
    best: torch.Tensor | None
    """``[B]``: highest logit of each."""
    tokens: torch.Tensor | None
    """``[B]``, likeliest tokens. Where the next step may take them from the device, a view of `RankModel.sampled_R`."""
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
        num_swap_slots: int = 0,
        max_captured_rows: int = 0,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        """Load the rank's share of the checkpoint in ``folder`` to the pool's device and capture its decode steps.

        Args:
            layout: layout of all ranks' pool, for the model that ``config`` describes.
            pool: the rank's heads of it, and all layers or its own; new tokens' KV is written to it.
            precision: of weights and activations; the KV dtype is the layout's.
            num_swap_slots: host slots of each micro-batch for blocks of preempted sequences, if the rank copies blocks.
            max_captured_rows: rows of the largest captured decode step; 0 captures none. A pipeline captures none, and
                launches as many: a replay could not wait for the stage before.
            ranks: share the model; all are built at the same time.

        Raises:
            ValueError: unusable weights, or weights that do not match ``config``.
        """
        shard = shard_of(config.shape, ranks.place)
        num_layers = len(shard.layers) if ranks.has_own_pool else layout.num_layers
        expected = (layout.num_blocks, len(shard.kv_heads), num_layers, *layout.shape[3:])
        assert pool.shape == expected, f"{pool.shape} for {layout}"
        device, kernels = pool.values.device, select_kernels(pool)
        self._pool = pool
        self._slots = [swap_slots(num_swap_slots, pool.blocks) for _ in range(ranks.place.pipeline_parallel)]
        self._ranks = ranks
        self.place, self.has_own_pool = ranks.place, ranks.has_own_pool
        self._model = Decoder(folder, config, precision, kernels, ranks)
        self.logits = self._model.logits
        self.queue = select_queue(device)
        self.pipeline_depth = self.queue.pipeline_depth if self.place.pipeline_parallel == 1 else 1
        """As in `pdserve.contracts.step.Executor`: one where the first stage needs what the last one computes."""
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
        if max_captured_rows and can_capture(kernels) and self.place.pipeline_parallel == 1:
            max_blocks = min(layout.num_blocks, layout.num_blocks_for(config.max_context_length))
            self._graphs = DecodeGraphs(
                self._model, pool, self.queue, self._captured_R, vocab_size=vocab_size, max_blocks=max_blocks
            )

    def padding(self, num_rows: int, is_decode: bool) -> int | None:
        """Padding rows of the captured step that computes ``num_rows``; None if none does."""
        has_room = num_rows <= len(self._captured_R) and self.sampled_R is self._captured_R
        return self._graphs.padding(num_rows) if self._graphs is not None and has_room and is_decode else None

    def copy_blocks(self, copies: BlockCopies, micro_batch: int) -> None:
        """Launch a step's copies."""
        copy_blocks(copies, self._pool.blocks, self._slots[micro_batch], _copy_block)

    def end_copies(self, micro_batch: int) -> None:
        """Launch the end of a step of copies, on every rank: stage after stage, and at last on the leader."""
        if self.place.stage > 0:
            self._receive_word(micro_batch)
        word = self._ranks.sum_(torch.zeros(1, device=self._pool.values.device))
        if self.place.pipeline_parallel > 1:
            self._ranks.send(word, micro_batch)
            if self.place.rank == 0:
                self._receive_word(micro_batch)

    def begin(self, step: PackedStep) -> Begun | None:
        """Launch the forward pass of this rank's layers; write the KV of its tokens. None for a captured step."""
        if step.is_captured:
            return None
        inputs = self.queue.put(step.words)
        tensors = StepTensors.of(inputs, step.shape)
        wanted = None if step.is_decode else tensors.outputs
        tokens_T = tensors.known_tokens(self.sampled_R) if step.has_late_tokens else tensors.tokens.long()
        return Begun(inputs, self._model.forward(tokens_T, self._pool, tensors.metadata, wanted, step.micro_batch))

    def end(self, step: PackedStep, begun: Begun | None) -> Computed:
        """Launch what follows `begin`. On the leader of a pipeline, wait for it."""
        if begun is None:
            assert self._graphs is not None
            logits_BV, best_B = self._graphs.run(step.words, step.shape.num_rows)
            return Computed(self._graphs.inputs, logits_BV, best_B, self.sampled_R[: step.num_sampling], [])
        hidden_BE, *prompts = torch.split(begun.hidden, [step.num_sampling, *step.prompt_lengths])
        if not step.num_sampling:
            if not prompts:
                self._confirm(step.micro_batch)
            return Computed(begun.inputs, None, None, None, prompts)
        logits_BV = self.logits(hidden_BE, micro_batch=step.micro_batch)
        best_B, tokens_B = likeliest(logits_BV)
        if self.place.pipeline_parallel > 1:  # the micro-batches' threads share this object
            return Computed(begun.inputs, logits_BV, best_B, tokens_B, prompts)
        self.sampled_R = tokens_B
        if len(tokens_B) <= len(self._captured_R):
            self._captured_R[: len(tokens_B)] = tokens_B
            self.sampled_R = self._captured_R
        return Computed(begun.inputs, logits_BV, best_B, self.sampled_R[: step.num_sampling], prompts)

    def _confirm(self, micro_batch: int) -> None:
        """Let the leader know that every stage has computed a step without outputs."""
        if self.place.pipeline_parallel > 1:
            if self.place.is_last_stage:
                self._ranks.send(torch.zeros(1, device=self._pool.values.device), micro_batch)
            else:
                self._receive_word(micro_batch)

    def _receive_word(self, micro_batch: int) -> None:
        self._ranks.receive((1,), torch.float32, micro_batch)

    def share_tokens(self, tokens_B: torch.Tensor) -> None:
        """Give all ranks the tokens that the leader sampled, where the next step takes them from the device."""
        if self.pipeline_depth > 1:
            self._ranks.copy_leaders_(tokens_B)

    @torch.inference_mode()
    def follow(self, step: PackedStep) -> None:
        """Launch a step of the leader's on another rank."""
        if not step.shape.num_rows:
            self.copy_blocks(step, step.micro_batch)
            self.end_copies(step.micro_batch)
            return
        begun = self.begin(step)
        if not self.place.is_last_stage:
            return
        computed = self.end(step, begun)
        for hidden_TE in computed.prompts:
            for piece_TE in pieces_of(hidden_TE):
                self.logits(piece_TE, micro_batch=step.micro_batch)
        if computed.tokens is not None:
            self.share_tokens(computed.tokens)


def _copy_block(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def can_capture(kernels: DecoderKernels) -> bool:
    """Return True if decode steps may be captured; always on a CPU, where a replay computes directly."""
    return kernels.is_capturable or kernels.device.type == "cpu"
