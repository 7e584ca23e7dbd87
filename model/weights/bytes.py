"""Bytes that a model's weights take, in its dtype or quantised. Read by the cost model; never imports torch.

Quantised are the matrices of the layers. The embedding table and the output projection stay in the model's dtype: what
is lost there goes straight into the logits. On random checkpoints whose tables have a few large columns, as those of
trained models do, quantising them too made the divergence from the exact model 4 to 8 times as large.
"""

from __future__ import annotations

from typing import NamedTuple

from pdserve.contracts.kv_layout import DTYPE_BYTES
from pdserve.contracts.precision import QUANTIZATION_SETTINGS
from pdserve.model.config.shape import ModelShape

_SCALE_BYTES = 4
_GROUP_INPUTS = 128
"""As `pdserve.kernels.weight_quantisation.GROUP_INPUTS`."""


class WeightBytes(NamedTuple):
    """Bytes of a whole model's weights."""

    layers: int
    """The matrices of all layers, with their scales: what every step reads."""
    table: int
    """The embedding table, or the output projection."""
    total: int
    """Norms and biases included; a tied output projection is counted once."""


def weight_bytes(shape: ModelShape, dtype: str, quantization: str) -> WeightBytes:
    """Bytes of the weights of ``shape`` as compiled kernels, or a GPU, hold them.

    Args:
        dtype: of the model; a key of `DTYPE_BYTES`.
        quantization: one of `QUANTIZATION_SETTINGS`.

    Raises:
        ValueError: there is no such quantization.
    """
    if quantization not in QUANTIZATION_SETTINGS:
        raise ValueError(
            f"quantization {quantization!r} is not supported: use one of {', '.join(QUANTIZATION_SETTINGS)}"
        )
    value_bytes = DTYPE_BYTES[dtype]
    layer_bytes = {
        "none": shape.layer_parameters * value_bytes,
        "int8": shape.layer_parameters + shape.layer_outputs * _SCALE_BYTES,
        "int4": shape.layer_parameters // 2 + shape.layer_groups(_GROUP_INPUTS) * _SCALE_BYTES,
    }[quantization]
    num_in_layers = shape.num_layers * shape.layer_parameters
    return WeightBytes(
        layers=shape.num_layers * layer_bytes,
        table=shape.table_parameters * value_bytes,
        total=shape.num_layers * layer_bytes + (shape.num_parameters - num_in_layers) * value_bytes,
    )
