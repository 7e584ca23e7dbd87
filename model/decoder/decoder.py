"""The decoder over a paged KV pool: one ragged batch of new tokens in, logits out.

The transformer of Touvron et al. 2023 (LLaMA): RMSNorm before each part, rotary attention with grouped query heads, a
gated MLP or experts (Jiang et al. 2024, Mixtral). `pdserve.model.config.decoder_config.DecoderConfig` describes the
differences of other families. Used by the executors; products, attention and the rotary write are kernels. Holds
weights, no sequences.

Shape suffixes: T new tokens of the batch, B tokens to output, V vocabulary, E hidden size, M heads of queries, keys and
values, N query heads, D head dim, F features, K experts of a token, P = T K pairs of a token and one of its experts, I
features of an expert.
"""

from __future__ import annotations

from pathlib import Path

import torch

from pdserve.contracts.precision import Precision
from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.metadata import AttentionMetadata
from pdserve.kernels.operations import AttentionRule, DecoderKernels, Linear
from pdserve.kernels.torch.experts import route
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.config.shape import ModelShape
from pdserve.model.config.sharding import shard_of
from pdserve.model.decoder.ranks import ONE_RANK, Ranks
from pdserve.model.decoder.rope import RopeAngles, inverse_frequencies, rope_angles
from pdserve.model.weights.decoder_weights import DenseMlp, ExpertMlp, LayerWeights, load_decoder_weights, products_of

_EXPERT_BYTES = 2**28
"""Upper limit of activations of a call of experts where calls of an MLP are limited. As few calls as that allows: each
reads all experts again."""


class Decoder:
    """A decoder with one rank's weights of a checkpoint, on its kernels' device."""

    def __init__(
        self,
        folder: Path,
        config: DecoderConfig,
        precision: Precision,
        kernels: DecoderKernels,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        """Load the checkpoint in ``folder``; only the matrices of layers are quantised.

        Args:
            ranks: share the model. All must call `forward` for the same batches, and the ranks of the last stage, which
                computes them, and the leader `logits`.

        Raises:
            ValueError: the weights are unusable or do not match ``config``.
        """
        self._config = config
        self._kernels = kernels
        dtype = getattr(torch, precision.dtype)
        self._activation_dtype = kernels.activation_dtype or dtype
        # Rounded, because that is how Gemma was trained.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        self._inv_freqs_C = {
            rope: inverse_frequencies(rope, config.shape.head_dim).to(kernels.device)
            for rope in {layer.rope for layer in config.layers}
        }
        self._expert_rows = _expert_rows(config.shape) if kernels.mlp_rows else None
        self._ranks = ranks
        self.has_logits = ranks.place.is_last_stage or ranks.place.rank == 0
        """Whether this rank calls `logits`: it computes them, or is the leader, which receives them."""
        self._shard = shard_of(config.shape, ranks.place)
        self._weights = load_decoder_weights(folder, config, precision, kernels, ranks.place)
        self._rules = {
            index: AttentionRule(
                scale=config.attention_scale,
                window=config.layers[index].window,
                softcap=config.attention_softcap,
                sinks=layer.sinks,
                in_bfloat16=products_of(precision) == "bfloat16",
            )
            for index, layer in zip(self._shard.layers, self._weights.layers, strict=True)
        }

    @torch.inference_mode()
    def forward(
        self,
        tokens_T: torch.Tensor,
        kv_pool: KvPool,
        metadata: AttentionMetadata,
        wanted_B: torch.Tensor | None = None,
        micro_batch: int = 0,
    ) -> torch.Tensor:
        """Write the KV of every new token and return last hidden states, ``[B, E]``, for `logits`.

        A stage before the last one sends its activations on, and returns ``[B, 0]``.

        Args:
            tokens_T: token ids, on any device, like the rest of the batch.
            kv_pool: written in place.
            metadata: rows of the batch and their KV.
            wanted_B: indices into ``tokens_T`` of the tokens to return, in any order; by default all.
            micro_batch: of the pipeline.
        """
        metadata = metadata.to(self._kernels.device)
        tokens_T = tokens_T.to(self._kernels.device)
        angles = {
            rope: rope_angles(metadata.positions, inv_freq_C, rope.attention_factor)
            for rope, inv_freq_C in self._inv_freqs_C.items()
        }
        if self._weights.embedding is None:
            x_TE = self._ranks.receive(
                (len(tokens_T), self._config.shape.hidden_size), self._activation_dtype, micro_batch
            )
        else:
            x_TE = self._embed(self._weights.embedding, tokens_T).to(self._activation_dtype) * self._embedding_scale
        for index, layer in zip(self._shard.layers, self._weights.layers, strict=True):
            rope = self._config.layers[index].rope
            self._add_attention(index, layer, x_TE, angles[rope], kv_pool, metadata)
            num_rows = self._kernels.mlp_rows if isinstance(layer.mlp, DenseMlp) else self._expert_rows
            for some_TE in torch.split(x_TE, num_rows or len(x_TE)):
                self._add_mlp(layer, some_TE)
        if self._weights.norm is None:
            self._ranks.send(x_TE, micro_batch)
            return x_TE.new_empty(len(tokens_T if wanted_B is None else wanted_B), 0)
        x_BE = x_TE if wanted_B is None else x_TE[wanted_B.to(x_TE.device)]
        return self._normalise(x_BE, self._weights.norm)

    @torch.inference_mode()
    def logits(self, x_BE: torch.Tensor, out_BV: torch.Tensor | None = None, micro_batch: int = 0) -> torch.Tensor:
        """Logits of `forward`'s hidden states: float32 ``[B, V]``.

        Args:
            out_BV: receives the logits and is returned.
            micro_batch: of the pipeline, whose last stage sends them to the leader.
        """
        vocab_size, softcap = self._config.shape.vocab_size, self._config.logit_softcap
        if self._weights.lm_head is None:
            return self._ranks.receive((len(x_BE), vocab_size), torch.float32, micro_batch)
        logits_BV = self._ranks.gather_columns(self._weights.lm_head(x_BE), vocab_size)
        logits_BV = logits_BV.float() if out_BV is None else out_BV.copy_(logits_BV)
        if softcap:
            logits_BV.div_(softcap).tanh_().mul_(softcap)
        if self._weights.embedding is None:
            self._ranks.send(logits_BV, micro_batch)
        return logits_BV

    def _embed(self, table: Linear, tokens_T: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding table: ``[T, E]``."""
        if self._ranks.place.tensor_parallel == 1:
            return table.rows(tokens_T)
        rows_T = tokens_T - self._shard.vocabulary.start
        is_mine_T = (rows_T >= 0) & (rows_T < len(self._shard.vocabulary))
        x_TE = table.rows(rows_T.where(is_mine_T, 0)) * is_mine_T[:, None]
        return self._ranks.sum_(x_TE)

    def _add_attention(
        self,
        index: int,
        layer: LayerWeights,
        x_TE: torch.Tensor,
        angles: RopeAngles,
        kv_pool: KvPool,
        metadata: AttentionMetadata,
    ) -> None:
        qkv_TF = layer.qkv(self._normalise(x_TE, layer.attention_norm))
        qkv_TMD = qkv_TF.view(len(x_TE), -1, self._config.shape.head_dim)
        in_pool = index - kv_pool.first_layer
        self._kernels.rope_and_write_kv(qkv_TMD, angles.cos, angles.sin, kv_pool, in_pool, metadata, layer.qk_norm)
        q_TND = qkv_TMD[:, : len(self._shard.heads)]
        o_TND = self._kernels.paged_attention(q_TND, kv_pool, in_pool, metadata, self._rules[index])
        self._add_product(x_TE, layer.output, o_TND.flatten(1), layer.attention_post_norm)

    def _add_mlp(self, layer: LayerWeights, x_TE: torch.Tensor) -> None:
        normal_TE = self._normalise(x_TE, layer.mlp_norm)
        if isinstance(layer.mlp, DenseMlp):
            gated_TI = self._kernels.gate(layer.mlp.gate_up(normal_TE), self._config.activation)
            self._add_product(x_TE, layer.mlp.down, gated_TI, layer.mlp_post_norm)
        else:
            y_TE = self._ranks.sum_(self._sum_experts(layer.mlp, normal_TE))
            x_TE += self._normalise(y_TE, layer.mlp_post_norm)

    def _sum_experts(self, mlp: ExpertMlp, x_TE: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sum of each token's experts: ``[T, E]``."""
        kernels, config = self._kernels, self._config
        logits_TA = mlp.router(x_TE.float())
        routes = route(
            logits_TA,
            config.shape.experts_per_token,
            normalise=config.normalise_experts,
            of_chosen=config.softmax_of_chosen,
        )
        pairs = kernels.sort_pairs(routes.experts, self._shard.experts)
        gate_up_PF = mlp.gate_up(x_TE.index_select(0, pairs.tokens), pairs.starts)
        y_PE = mlp.down(kernels.gate(gate_up_PF, config.activation), pairs.starts)
        y_TE = kernels.combine(y_PE, pairs.places, routes.weights)
        if mlp.shared is None or mlp.shared_gate is None:
            return y_TE
        shared_TE = mlp.shared.down(kernels.gate(mlp.shared.gate_up(x_TE), config.activation))
        return y_TE.add_(shared_TE.mul_(_sigmoid(mlp.shared_gate(x_TE.float()))))

    def _add_product(
        self, x_TE: torch.Tensor, linear: Linear, in_TF: torch.Tensor, post_norm_E: torch.Tensor | None
    ) -> None:
        """Add to ``x_TE`` in place the output of attention or MLP."""
        if post_norm_E is None and self._ranks.place.tensor_parallel == 1:
            linear(in_TF, x_TE)
        else:
            x_TE += self._normalise(self._ranks.sum_(linear(in_TF)), post_norm_E)

    def _normalise(self, x_TE: torch.Tensor, weight_E: torch.Tensor | None) -> torch.Tensor:
        """Return ``x_TE`` itself if the family has no such norm."""
        return x_TE if weight_E is None else self._kernels.rms_normalise(x_TE, weight_E, self._config.rms_norm_eps)


def _sigmoid(x_T1: torch.Tensor) -> torch.Tensor:
    """As a softmax, in which an element's last bits do not depend on its place in the tensor."""
    return torch.cat((x_T1, torch.zeros_like(x_T1)), dim=1).softmax(dim=1)[:, :1]


def _expert_rows(shape: ModelShape) -> int:
    """Tokens per call of experts: each has, in float32, inputs and features, or features and outputs, of its pairs."""
    pair_bytes = (shape.hidden_size + 2 * shape.intermediate_size) * 4
    return max(1, _EXPERT_BYTES // (max(1, shape.experts_per_token) * pair_bytes))
