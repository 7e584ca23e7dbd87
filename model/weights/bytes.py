"""Bytes of a model's weights, in its dtype or quantised. Read by the cost model; never imports torch.

Only the matrices of the layers are quantised. Errors in the embedding table and the output projection go straight into
the logits: on random checkpoints whose tables have a few large columns, as trained models have, quantising them too
made the divergence from the exact model 4 to 8 times as large.
"""

from __future__ import annotations

from typing import NamedTuple

from pdserve.contracts.kv_layout import DTYPE_BYTES
from pdserve.contracts.precision import QUANTIZATION_SETTINGS
from pdserve.model.config.shape import ModelShape

_SCALE_BYTES = 4
INT4_GROUP_INPUTS = 128
"""Equals `pdserve.kernels.weight_quantisation.GROUP_INPUTS`."""


class WeightBytes(NamedTuple):
    layers: int
    """Matrices of all layers with their scales: what every step reads."""
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
    layer_bytes = {
        "none": shape.layer_parameters * value_bytes,
        "int8": shape.layer_parameters + shape.layer_outputs * _SCALE_BYTES,
        "fp8": shape.layer_parameters + shape.layer_outputs * _SCALE_BYTES,
        "int4": shape.layer_parameters // 2 + shape.layer_groups(INT4_GROUP_INPUTS) * _SCALE_BYTES,
    }[quantization]
    num_in_layers = shape.num_layers * shape.layer_parameters
    return WeightBytes(
        layers=shape.num_layers * layer_bytes,
        table=shape.table_parameters * value_bytes,
        total=shape.num_layers * layer_bytes + (shape.num_parameters - num_in_layers) * value_bytes,
    )
