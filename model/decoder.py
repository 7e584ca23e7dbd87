"""The Llama decoder over a paged KV pool: one ragged batch of new tokens in, logits of some of them out.

Touvron et al. 2023 (LLaMA) and the Llama 3 report: RMSNorm before each part, rotary attention with grouped query heads,
SwiGLU. Used by `pdserve.model.model_executor`; attention and the rotary write are kernels. Holds weights, no sequences.

Shape suffixes: T new tokens of the batch, B those whose next one is wanted, V vocabulary, E hidden size, I intermediate
size, N query heads, H KV heads, M = N + 2 H heads, D head dim, C = D / 2, F features.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.metadata import AttentionMetadata
from pdserve.kernels.operations import AttentionRule, DecoderKernels, Linear
from pdserve.kernels.torch_dense import matrix_dtype
from pdserve.model.config import DecoderConfig
from pdserve.model.rope import RopeAngles, inverse_frequencies, rope_angles
from pdserve.model.weights import load_weights


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer. Projections of the same input are one."""

    attention_norm: torch.Tensor
    qkv: Linear
    """``[M * D, E]``: queries, keys, values."""
    output: Linear
    """``[E, N * D]``."""
    mlp_norm: torch.Tensor
    gate_up: Linear
    """``[2 * I, E]``: gate, then up."""
    down: Linear
    """``[E, I]``."""


class Decoder:
    """A decoder with the weights of one checkpoint, on the CPU."""

    def __init__(self, folder: Path, config: DecoderConfig, dtype: torch.dtype, kernels: DecoderKernels) -> None:
        """Load the checkpoint in ``folder``, rounded to ``dtype``.

        Raises:
            ValueError: the weights are unusable or do not match ``config``.
        """
        self._config = config
        self._dtype = kernels.activation_dtype or dtype
        self._kernels = kernels
        self._rule = AttentionRule(scale=config.head_dim**-0.5)
        self._inv_freq_C = inverse_frequencies(config)
        weights = _Weights(folder, config, dtype)
        pack = kernels.pack_linear
        self._embedding = pack(weights.embedding)
        self._lm_head = self._embedding if config.tie_word_embeddings else pack(weights.lm_head)
        self._norm = weights.norm.to(self._dtype)
        self._layers = [
            DecoderLayer(
                attention_norm=layer["input_layernorm"].to(self._dtype),
                qkv=pack(layer["qkv"]),
                output=pack(layer["self_attn.o_proj"]),
                mlp_norm=layer["post_attention_layernorm"].to(self._dtype),
                gate_up=pack(layer["gate_up"]),
                down=pack(layer["mlp.down_proj"]),
            )
            for layer in weights.layers
        ]

    @torch.inference_mode()
    def forward(
        self, tokens_T: torch.Tensor, kv_pool: KvPool, metadata: AttentionMetadata, wanted_B: torch.Tensor
    ) -> torch.Tensor:
        """Write the KV of every new token and return the last hidden states of some, for `logits`.

        Args:
            tokens_T: token ids, ``[num_tokens]``.
            kv_pool: written in place.
            metadata: where the tokens' sequences lie in the pool.
            wanted_B: indices into ``tokens_T`` of the tokens to return, in any order.

        Returns:
            ``[B, E]``.
        """
        angles = rope_angles(metadata.positions, self._inv_freq_C)
        x_TE = self._embedding.rows(tokens_T).to(self._dtype)
        for index, layer in enumerate(self._layers):
            x_TE += self._attention(index, layer, x_TE, angles, kv_pool, metadata)
            x_TE += self._mlp(layer, x_TE)
        return self._normalise(x_TE[wanted_B], self._norm)

    @torch.inference_mode()
    def logits(self, x_BE: torch.Tensor) -> torch.Tensor:
        """What `forward` returned, or part of it, as logits: float32 ``[B, V]``."""
        return self._lm_head(x_BE).float()

    def _attention(
        self,
        index: int,
        layer: DecoderLayer,
        x_TE: torch.Tensor,
        angles: RopeAngles,
        kv_pool: KvPool,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        qkv_TF = layer.qkv(self._normalise(x_TE, layer.attention_norm))
        qkv_TMD = qkv_TF.view(len(x_TE), -1, self._config.head_dim)
        self._kernels.rope_and_write_kv(qkv_TMD, angles.cos, angles.sin, kv_pool, index, metadata)
        q_TND = qkv_TMD[:, : self._config.num_heads]
        o_TND = self._kernels.paged_attention(q_TND, kv_pool, index, metadata, self._rule)
        return layer.output(o_TND.flatten(1))

    def _mlp(self, layer: DecoderLayer, x_TE: torch.Tensor) -> torch.Tensor:
        gate_up_TF = layer.gate_up(self._normalise(x_TE, layer.mlp_norm))
        return layer.down(self._kernels.gate(gate_up_TF, "silu"))

    def _normalise(self, x_TE: torch.Tensor, weight_E: torch.Tensor) -> torch.Tensor:
        return self._kernels.rms_normalise(x_TE, weight_E, self._config.rms_norm_eps)


class _Weights:
    """The checkpoint's tensors in the model's dtype, those of one input laid out as one."""

    def __init__(self, folder: Path, config: DecoderConfig, dtype: torch.dtype) -> None:
        tied = config.tie_word_embeddings
        self.embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype)
        self.lm_head = self.embedding if tied else torch.empty_like(self.embedding)
        self.norm = torch.empty(config.hidden_size, dtype=dtype)
        self.layers = [_empty_layer(config, dtype) for _ in range(config.num_layers)]
        destinations = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if not tied:
            destinations["lm_head.weight"] = self.lm_head
        for index, layer in enumerate(self.layers):
            for name, tensor in _checkpoint_parts(config, layer).items():
                destinations[f"model.layers.{index}.{name}.weight"] = tensor
        ignored = ("rotary_emb.inv_freq", "lm_head.weight") if tied else ("rotary_emb.inv_freq",)
        load_weights(folder, destinations, dtype=dtype, ignored_suffixes=ignored)


def _empty_layer(config: DecoderConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    hidden, intermediate, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    shapes = {
        "input_layernorm": (hidden,),
        "qkv": ((config.num_heads + 2 * config.num_kv_heads) * head_dim, hidden),
        "self_attn.o_proj": (hidden, config.num_heads * head_dim),
        "post_attention_layernorm": (hidden,),
        "gate_up": (2 * intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    return {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}


def _checkpoint_parts(config: DecoderConfig, layer: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Where each tensor of the checkpoint goes: names of Hugging Face, views of fused weights."""
    num_kv_outputs = config.num_kv_heads * config.head_dim
    parts = {name: tensor for name, tensor in layer.items() if name not in ("qkv", "gate_up")}
    parts["self_attn.q_proj"], parts["self_attn.k_proj"], parts["self_attn.v_proj"] = layer["qkv"].split_with_sizes(
        [config.num_heads * config.head_dim, num_kv_outputs, num_kv_outputs]
    )
    parts["mlp.gate_proj"], parts["mlp.up_proj"] = layer["gate_up"].chunk(2)
    return parts


def weight_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Bytes that the weights take in this process, matrices in their `matrix_dtype` and norms in ``dtype``."""
    num_norms = (2 * config.num_layers + 1) * config.hidden_size
    num_in_matrices = config.num_parameters - num_norms
    return num_in_matrices * matrix_dtype(dtype).itemsize + num_norms * dtype.itemsize
