"""Bytes of a model's weights, in its dtype or quantised. Read by the cost model; never imports torch.

Only the matrices of the layers are quantised. Errors in the embedding table and the output projection go straight into
the logits: on random checkpoints whose tables have a few large columns, as trained models have, quantising them too
made the divergence from the exact model 4 to 8 times as large.
"""

from __future__ import annotations

from sys import maxsize
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

    def layer_bytes(*, is_dense: bool) -> int:
        parameters = shape.layer_groups(1, is_dense=is_dense)
        match quantization:
            case "none":
                return parameters * value_bytes
            case "int4":
                return parameters // 2 + shape.layer_groups(INT4_GROUP_INPUTS, is_dense=is_dense) * _SCALE_BYTES
            case _:
                return parameters + shape.layer_groups(maxsize, is_dense=is_dense) * _SCALE_BYTES

    num_dense = shape.num_dense_layers
    layers = (shape.num_layers - num_dense) * (layer_bytes(is_dense=False) + shape.router_parameters * value_bytes)
    layers += num_dense * layer_bytes(is_dense=True)
    return WeightBytes(
        layers=layers,
        table=shape.table_parameters * value_bytes,
        total=layers + (shape.num_parameters - shape.matrix_parameters) * value_bytes,
    )
