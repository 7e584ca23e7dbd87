"""The Llama decoder over a paged KV pool: one ragged batch of new tokens in, logits of the rows that sample out.

Touvron et al. 2023 (LLaMA) and the Llama 3 report: RMSNorm before each part, rotary attention with grouped query heads,
SwiGLU. Used by `pdserve.model.model_executor`; attention and the rotary write are kernels. Holds weights, no sequences.

Shape suffixes: T new tokens of the batch, B rows that sample, V vocabulary, E hidden size, I intermediate size,
N query heads, H KV heads, M = N + 2 H heads, D head dim, C = D / 2, F features.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import embedding, linear, rms_norm, silu

from pdserve.kernels.metadata import AttentionMetadata
from pdserve.kernels.selection import AttentionKernels
from pdserve.model.config import LlamaConfig
from pdserve.model.rope import RopeAngles, inverse_frequencies, rope_angles
from pdserve.model.weights import load_weights


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer. Matrices are ``[outputs, inputs]``; projections of the same input are one."""

    attention_norm: torch.Tensor
    """``[E]``."""
    qkv: torch.Tensor
    """``[M * D, E]``: queries, keys, values."""
    output: torch.Tensor
    """``[E, N * D]``."""
    mlp_norm: torch.Tensor
    """``[E]``."""
    gate_up: torch.Tensor
    """``[2 * I, E]``: gate, then up."""
    down: torch.Tensor
    """``[E, I]``."""


class Llama:
    """A decoder with the weights of one checkpoint, on the CPU."""

    def __init__(self, folder: Path, config: LlamaConfig, dtype: torch.dtype, kernels: AttentionKernels) -> None:
        """Load the checkpoint in ``folder``; activations and KV are of ``dtype``.

        Raises:
            ValueError: the weights are unusable or do not match ``config``.
        """
        self._config = config
        self._dtype = dtype
        self._kernels = kernels
        self._inv_freq_C = inverse_frequencies(config)
        held = matrix_dtype(dtype)
        self._embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=held)
        self._layers = [_empty_layer(config, dtype, held) for _ in range(config.num_layers)]
        self._norm = torch.empty(config.hidden_size, dtype=dtype)
        tied = config.tie_word_embeddings
        self._lm_head = self._embedding if tied else torch.empty_like(self._embedding)
        ignored = ("rotary_emb.inv_freq", "lm_head.weight") if tied else ("rotary_emb.inv_freq",)
        load_weights(folder, self._checkpoint_tensors(), dtype=dtype, ignored_suffixes=ignored)

    @torch.inference_mode()
    def forward(
        self, tokens_T: torch.Tensor, kv_pool: torch.Tensor, metadata: AttentionMetadata, sampled_B: torch.Tensor
    ) -> torch.Tensor:
        """Write the KV of every new token and return the logits of some.

        Args:
            tokens_T: token ids, ``[num_tokens]``.
            kv_pool: of `pdserve.contracts.kv_layout.KvLayout.shape` and this model's dtype; written in place.
            metadata: where the tokens' sequences lie in the pool.
            sampled_B: indices into ``tokens_T`` whose next token is wanted.

        Returns:
            float32 ``[B, V]``.
        """
        angles = rope_angles(metadata.positions, self._inv_freq_C)
        x_TE = embedding(tokens_T, self._embedding).to(self._dtype)
        for index, layer in enumerate(self._layers):
            x_TE += self._attention(index, layer, x_TE, angles, kv_pool, metadata)
            x_TE += self._mlp(layer, x_TE)
        x_BE = self._normalise(x_TE[sampled_B], self._norm)
        return _project(x_BE, self._lm_head).float()

    def _attention(
        self,
        index: int,
        layer: DecoderLayer,
        x_TE: torch.Tensor,
        angles: RopeAngles,
        kv_pool: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        qkv_TF = _project(self._normalise(x_TE, layer.attention_norm), layer.qkv)
        qkv_TMD = qkv_TF.view(len(x_TE), -1, self._config.head_dim)
        self._kernels.rope_and_write_kv(qkv_TMD, angles.cos, angles.sin, kv_pool, index, metadata)
        q_TND = qkv_TMD[:, : self._config.num_heads]
        o_TND = self._kernels.paged_attention(q_TND, kv_pool, index, metadata)
        return _project(o_TND.flatten(1), layer.output)

    def _mlp(self, layer: DecoderLayer, x_TE: torch.Tensor) -> torch.Tensor:
        gate_TI, up_TI = _project(self._normalise(x_TE, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
        return _project(silu(gate_TI).mul_(up_TI), layer.down)

    def _normalise(self, x_TE: torch.Tensor, weight_E: torch.Tensor) -> torch.Tensor:
        return rms_norm(x_TE, weight_E.shape, weight_E, self._config.rms_norm_eps)

    def _checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """Where each tensor of the checkpoint goes: names of Hugging Face, views of our weights."""
        tensors = {"model.embed_tokens.weight": self._embedding, "model.norm.weight": self._norm}
        if not self._config.tie_word_embeddings:
            tensors["lm_head.weight"] = self._lm_head
        for index, layer in enumerate(self._layers):
            for name, tensor in _layer_tensors(self._config, layer).items():
                tensors[f"model.layers.{index}.{name}.weight"] = tensor
        return tensors


def _empty_layer(config: LlamaConfig, dtype: torch.dtype, held: torch.dtype) -> DecoderLayer:
    hidden, intermediate, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    return DecoderLayer(
        attention_norm=torch.empty(hidden, dtype=dtype),
        qkv=torch.empty((config.num_heads + 2 * config.num_kv_heads) * head_dim, hidden, dtype=held),
        output=torch.empty(hidden, config.num_heads * head_dim, dtype=held),
        mlp_norm=torch.empty(hidden, dtype=dtype),
        gate_up=torch.empty(2 * intermediate, hidden, dtype=held),
        down=torch.empty(hidden, intermediate, dtype=held),
    )


def _layer_tensors(config: LlamaConfig, layer: DecoderLayer) -> dict[str, torch.Tensor]:
    num_kv_outputs = config.num_kv_heads * config.head_dim
    q_NE, k_HE, v_HE = layer.qkv.split_with_sizes([config.num_heads * config.head_dim, num_kv_outputs, num_kv_outputs])
    gate_IE, up_IE = layer.gate_up.chunk(2)
    return {
        "input_layernorm": layer.attention_norm,
        "self_attn.q_proj": q_NE,
        "self_attn.k_proj": k_HE,
        "self_attn.v_proj": v_HE,
        "self_attn.o_proj": layer.output,
        "post_attention_layernorm": layer.mlp_norm,
        "mlp.gate_proj": gate_IE,
        "mlp.up_proj": up_IE,
        "mlp.down_proj": layer.down,
    }


def matrix_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype to hold matrices in: float32 where this CPU has no instructions to multiply ``dtype`` with.

    Such a product was measured 5 to 10 times slower than float32's for more than one token; the price is the memory.
    """
    native = {
        torch.float32: True,
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    return dtype if native[dtype] else torch.float32


def weight_bytes(config: LlamaConfig, dtype: torch.dtype) -> int:
    """Bytes that the weights take in this process, matrices in their `matrix_dtype` and norms in ``dtype``."""
    num_norms = (2 * config.num_layers + 1) * config.hidden_size
    num_in_matrices = config.num_parameters - num_norms
    return num_in_matrices * matrix_dtype(dtype).itemsize + num_norms * dtype.itemsize


def _project(x_TE: torch.Tensor, weight_FE: torch.Tensor) -> torch.Tensor:
    """``[T, F]`` of the dtype of ``x_TE``, multiplied in the weight's dtype."""
    return linear(x_TE.to(weight_FE.dtype), weight_FE).to(x_TE.dtype)
