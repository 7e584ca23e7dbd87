"""What the tensors of a checkpoint are called and how large they are, for every family that is supported. Pure.

Asked by whoever checks a checkpoint's files, and by `pdserve.model.decoder_weights`, which loads them.
"""

from __future__ import annotations

from typing import NamedTuple

from pdserve.model.shape import ModelShape


class NormNames(NamedTuple):
    """What a checkpoint calls the norms of a layer; empty for those that it has not."""

    attention: str
    attention_post: str
    mlp: str
    mlp_post: str


def norm_names(shape: ModelShape) -> NormNames:
    """``post_attention_layernorm`` is the norm before the MLP in families that have none there by name."""
    if not shape.post_norms:
        return NormNames("input_layernorm", "", "post_attention_layernorm", "")
    return NormNames(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    )


def tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint of ``shape``, by the name that transformers gives it."""
    tensors = {
        "model.embed_tokens.weight": (shape.vocab_size, shape.hidden_size),
        "model.norm.weight": (shape.hidden_size,),
    }
    if not shape.tie_word_embeddings:
        tensors["lm_head.weight"] = (shape.vocab_size, shape.hidden_size)
    layer = _layer_tensor_shapes(shape)
    for index in range(shape.num_layers):
        tensors |= {f"model.layers.{index}.{name}": tensor for name, tensor in layer.items()}
    return tensors


def _layer_tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    hidden, intermediate = shape.hidden_size, shape.intermediate_size
    num_q, num_kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    projections = {
        "self_attn.q_proj": (num_q, hidden, shape.qkv_bias),
        "self_attn.k_proj": (num_kv, hidden, shape.qkv_bias),
        "self_attn.v_proj": (num_kv, hidden, shape.qkv_bias),
        "self_attn.o_proj": (hidden, num_q, shape.output_bias),
        "mlp.gate_proj": (intermediate, hidden, shape.mlp_bias),
        "mlp.up_proj": (intermediate, hidden, shape.mlp_bias),
        "mlp.down_proj": (hidden, intermediate, shape.mlp_bias),
    }
    tensors: dict[str, tuple[int, ...]] = {}
    for name, (num_outputs, num_inputs, has_bias) in projections.items():
        tensors[f"{name}.weight"] = (num_outputs, num_inputs)
        if has_bias:
            tensors[f"{name}.bias"] = (num_outputs,)
    tensors |= {f"{name}.weight": (hidden,) for name in norm_names(shape) if name}
    if shape.qk_norm:
        tensors |= {f"self_attn.{part}_norm.weight": (shape.head_dim,) for part in "qk"}
    return tensors


def is_ignored(name: str, shape: ModelShape) -> bool:
    """Whether a tensor may be in a checkpoint of ``shape`` and is not needed."""
    return name.endswith("rotary_emb.inv_freq") or (shape.tie_word_embeddings and name == "lm_head.weight")
