"""Bytes of a model's weights, in its dtype or quantised. Read by the cost model; never imports torch.

Only the matrices of the layers are quantised, also by those who publish checkpoints. Errors in the embedding table and
the output projection go straight into the logits: on random checkpoints whose tables have a few large columns, as
trained models have, quantising them too made the divergence from the exact model 4 to 8 times as large.
"""

from __future__ import annotations

from functools import cache
from sys import maxsize
from typing import NamedTuple

from pdserve.contracts.kv_layout import DTYPE_BYTES
from pdserve.contracts.precision import QUANTIZATION_SETTINGS
from pdserve.model.config.quantisation import Scheme, held_scheme
from pdserve.model.config.shape import ModelShape
from pdserve.model.weights.files import layer_matrices

_FIRST_JOINED = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
"""As `pdserve.model.weights.decoder_weights` joins matrices of the same input."""


class WeightBytes(NamedTuple):
    layers: int
    """Matrices of all layers with their scales: what every step reads."""
    experts: int
    """Of these, the routed experts."""
    table: int
    """Embedding table, or output projection."""
    total: int
    """Includes norms and biases; a tied output projection counts once."""


def weight_bytes(shape: ModelShape, dtype: str, quantization: str) -> WeightBytes:
    """Bytes of the weights of ``shape`` as compiled CPU kernels or a GPU hold them.

    Raises:
        ValueError: ``quantization`` is not one of `QUANTIZATION_SETTINGS`.
    """
    if quantization not in QUANTIZATION_SETTINGS:
        raise ValueError(
            f"quantization {quantization!r} is not supported: use one of {', '.join(QUANTIZATION_SETTINGS)}"
        )
    value_bytes = DTYPE_BYTES[dtype]
    num_dense = shape.num_dense_layers
    num_experts = (shape.num_layers - num_dense) * shape.num_experts
    layers, experts = shape.matrix_parameters * value_bytes, num_experts * shape.expert_parameters * value_bytes
    if (scheme := held_scheme(quantization, shape.scheme)) is not None:
        extra = _excepted_bytes(shape, scheme, value_bytes)
        layers = num_dense * _layer_bytes(shape, scheme, is_dense=True) + extra.layers
        router_bytes = shape.router_parameters * value_bytes
        layers += (shape.num_layers - num_dense) * (_layer_bytes(shape, scheme, is_dense=False) + router_bytes)
        num_groups = shape.expert_groups(scheme.group_inputs or maxsize)
        expert_bytes = shape.expert_parameters * scheme.bits // 8 + num_groups * scheme.group_bytes
        experts = num_experts * expert_bytes + extra.experts
    return WeightBytes(
        layers=layers,
        experts=experts,
        table=shape.table_parameters * value_bytes,
        total=layers + (shape.num_parameters - shape.matrix_parameters) * value_bytes,
    )


def _layer_bytes(shape: ModelShape, scheme: Scheme, *, is_dense: bool) -> int:
    num_groups = shape.layer_groups(scheme.group_inputs or maxsize, is_dense=is_dense)
    return shape.layer_groups(1, is_dense=is_dense) * scheme.bits // 8 + num_groups * scheme.group_bytes


class _Extra(NamedTuple):
    layers: int
    experts: int
    """Of these, the routed experts."""


@cache
def _excepted_bytes(shape: ModelShape, scheme: Scheme, value_bytes: int) -> _Extra:
    """What the matrices that the scheme excepts, and those that are joined with one, take in the model's dtype, beyond
    what they would take in the scheme."""
    if shape.latent is not None or not shape.gated_mlp:  # has other matrices, and is not served
        return _Extra(0, 0)
    matrices = layer_matrices(shape)
    excepted = {_joined(module) for module in matrices if not scheme.quantises(module)}
    extra = {
        module: num_outputs * (num_inputs * value_bytes - num_inputs * scheme.bits // 8)
        - num_outputs * scheme.num_groups(num_inputs) * scheme.group_bytes
        for module, (num_outputs, num_inputs) in matrices.items()
        if _joined(module) in excepted
    }
    return _Extra(sum(extra.values()), sum(each for module, each in extra.items() if ".experts." in module))


def _joined(module: str) -> str:
    """Of matrices of the same input, which are held as one, the first."""
    prefix, _, name = module.rpartition(".")
    return f"{prefix}.{_FIRST_JOINED.get(name, name)}"
