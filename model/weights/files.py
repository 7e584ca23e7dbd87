"""Checks the safetensors files of a checkpoint without reading weights: tensor names, dtypes, shapes and file sizes.

Of quantised matrices it reads the small tensors: groups of inputs, and zero points that should be in the middle.

Called before a worker starts and by the readers of weights. Messages have names as in the files. Never imports torch,
never unpickles.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pdserve.model.config.families import MIXTRAL_PROJECTIONS, mixtral_name
from pdserve.model.config.quantisation import Scheme
from pdserve.model.config.shape import ModelShape
from pdserve.model.config.tokenizer_config import check_pulled

_INDEX_NAME = "model.safetensors.index.json"
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
_LEFT_OUT = re.compile(
    r"(model\.)?(?P<part>vision_tower|multi_modal_projector|visual|mtp\w*)\..+|"
    r".+\.(?P<kind>(q|k|v|kv|prob)_scale|inv_freq|(input|output|activation)_(scale(_ub)?|zero_point))"
)
"""Tensors that text does not need: encoders of images, drafts of further tokens, scales of a KV cache in 8 bits, and of
activations, which stay floats."""
_QUANTISED = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", "_blocks")
"""Ends of names that only quantised weights have."""
_SIZED_BY_SCHEME = (*_QUANTISED, ".qzeros", ".scales", "_scales", ".weight_zero_point")
"""Ends of names of tensors whose shapes depend on the bits and groups of the scheme."""
_MIXTRAL = re.compile(
    r"(?P<layer>.+)\.block_sparse_moe\.(?P<part>gate|experts\.\d+)(\.(?P<projection>w[123]))?\.(?P<kind>\w+)"
)
_OF_MIXTRAL = {name: f".{projection}" for projection, name in MIXTRAL_PROJECTIONS.items()}
_MAX_PROBLEMS = 8
"""Upper limit of tensors named in one message."""
_MAX_HEADER_BYTES = 100 * 10**6
"""Limit of the safetensors library."""


class StoredTensor(NamedTuple):
    """Header entry of one tensor."""

    dtype: str
    """Name in safetensors: ``F32``, ``BF16``, ..."""
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte in the file."""
    end: int


def read_header(shard: Path) -> dict[str, StoredTensor]:
    """Read the header of a safetensors file.

    Raises:
        ValueError: not a safetensors file, or its size does not match the header.
    """
    num_bytes = shard.stat().st_size
    check_pulled(shard)
    try:
        with shard.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > min(num_bytes, _MAX_HEADER_BYTES):
                raise ValueError("the header is longer than the file")
            tensors = _parse_tensors(file.read(size))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{shard} is not a safetensors file, or is cut short; download it again") from error
    expected = max((tensor.end for tensor in tensors.values()), default=8 + size)
    if num_bytes != expected:
        raise ValueError(f"{shard} has {num_bytes} bytes, but its header describes {expected}; download it again")
    return tensors


def _parse_tensors(text: bytes) -> dict[str, StoredTensor]:
    """Parse a header; a malformed one raises ValueError, KeyError, TypeError or AttributeError."""
    tensors = {}
    for name, entry in json.loads(text).items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        if not 0 <= start <= end:
            raise ValueError("a tensor that begins before the data or after its own end")
        origin = 8 + len(text)
        tensors[name] = StoredTensor(str(entry["dtype"]), tuple(entry["shape"]), origin + start, origin + end)
    return tensors


class _Found(NamedTuple):
    """A tensor, and where it is."""

    shard: Path
    name: str
    """In the file; `text_name` makes ours of it."""
    tensor: StoredTensor

    def __str__(self) -> str:
        return f"{self.shard}: {self.name}"

    def values(self, dtype: str) -> npt.NDArray[Any]:
        """Read all values, as a flat array."""
        size = np.dtype(dtype).itemsize
        return np.fromfile(self.shard, dtype, (self.tensor.end - self.tensor.start) // size, offset=self.tensor.start)


class Accepted(NamedTuple):
    """What a tensor may be."""

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    is_optional: bool = False


def check_weights(folder: Path, shape: ModelShape) -> str:
    """Check the weights of a checkpoint of ``shape`` without reading them; return which are known and left out.

    Raises:
        ValueError: weights are missing, pickled, damaged or of another model; the message names up to 8 missing,
            extra or misshapen tensors. Or a small tensor of a quantised matrix is not as config.json says.
    """
    stored = {
        text_name(name): _Found(shard, name, tensor)
        for shard in shard_paths(folder)
        for name, tensor in read_header(shard).items()
    }
    zero_biases: set[str] = set()
    if shape.scheme is not None:  # tools for GPTQ write biases of zeros into models that have none
        biases = {name: found for name, found in stored.items() if name.endswith(".bias")}
        zero_biases = {name for name, found in biases.items() if not found.values("u1").any()}
    wanted, problems = _wanted(shape, stored)
    missing = [name for name, each in wanted.items() if name not in stored and not each.is_optional]
    problems += [f"missing {_name_in_file(name, stored)}" for name in missing]
    ignored = {"lm_head.weight"} if shape.tie_word_embeddings else set()
    unexpected = sorted(stored.keys() - wanted - ignored - zero_biases)
    left_out = {name: found for name in unexpected if (found := _LEFT_OUT.fullmatch(name))}
    problems += [f"unexpected {stored[name].name}" for name in unexpected if name not in left_out]
    misshapen = []
    for name in filter(wanted.__contains__, stored):
        dtypes, shapes, _ = wanted[name]
        _, given_name, tensor = stored[name]
        if tensor.shape not in shapes:
            misshapen.append(name)
            problems.append(f"{given_name} has shape {list(tensor.shape)}, not {list(shapes[0])}")
        elif tensor.dtype not in dtypes:
            problems.append(f"{given_name} has dtype {tensor.dtype}, not one of {', '.join(dtypes)}")
    if problems:
        num_more = len(problems) - _MAX_PROBLEMS
        more = f"; and {num_more} more" if num_more > 0 else ""
        remedy = "Take config.json and weights from one and the same checkpoint"
        if shape.scheme is None and any(name.endswith(_QUANTISED) for name in unexpected):
            remedy = (
                "The weights are quantised, and config.json does not say how: download it again, or put the contents "
                "of quantize_config.json, with quant_method, under quantization_config there"
            )
        elif any(name.startswith(("lm_head.", "model.embed_tokens.")) for name in unexpected):
            remedy = "Serve a checkpoint in which embeddings and lm_head are not quantised"
        elif len(misshapen) == len(problems) and all(name.endswith(_SIZED_BY_SCHEME) for name in misshapen):
            remedy += ", or correct the bits and the size of groups or blocks in quantization_config there"
        raise ValueError(
            f"{folder}: weights do not match config.json: {'; '.join(problems[:_MAX_PROBLEMS])}{more}. {remedy}"
        )
    if shape.scheme is not None:
        _check_small_tensors(shape, shape.scheme, stored)
    kinds = Counter(found["part"] or f"*.{found['kind']}" for found in left_out.values() if found["kind"] != "inv_freq")
    return ", ".join(f"{number} of {kind}" for kind, number in kinds.items())


def _name_in_file(name: str, stored: Mapping[str, _Found]) -> str:
    """Name of a tensor or module that may be missing, as the files would have it."""
    is_mixtral = any(".block_sparse_moe." in found.name for found in stored.values())
    return mixtral_name(name) if is_mixtral else name


def _check_small_tensors(shape: ModelShape, scheme: Scheme, stored: Mapping[str, _Found]) -> None:
    end = "g_idx" if scheme.layout == "gptq" else "weight_g_idx"
    for module, (num_outputs, num_inputs) in layer_matrices(shape).items():
        if (groups := stored.get(f"{module}.{end}")) is not None:
            order_E = input_order(str(groups), groups.values("<i4"), scheme)
            if order_E is not None and ".experts." in module and module.endswith(".up_proj"):
                gate = stored[f"{module.removesuffix('up_proj')}gate_proj.{end}"]  # with act-order each has one
                if (order_E != input_order(str(gate), gate.values("<i4"), scheme)).any():
                    raise ValueError(
                        f"{groups} has inputs in another order than {gate.name}, and kernels take both of an expert "
                        "as one; serve a checkpoint without act-order, or one in 16 bits"
                    )
        zeros = stored.get(f"{module}.qzeros")
        if scheme.layout == "gptq" and not scheme.has_zeros and zeros is not None:
            # Of version 1 they are less 1. Some files say that they are of version 1 and are not: here it is seen.
            of_groups = zeros.values("u1").reshape(scheme.num_groups(num_inputs), -1)
            stored_B = of_groups[:, : num_outputs * scheme.bits // 8]
            middle = 0x88 if scheme.bits == 4 else 0x80
            if not ((stored_B == middle).all() or (stored_B == middle - (0x11 if scheme.bits == 4 else 1)).all()):
                raise ValueError(
                    f"{zeros} are not all in the middle, and quantization_config.sym is true: set it to false in "
                    "config.json, if the weights were quantised so"
                )


def input_order(name: str, group_of_E: npt.NDArray[np.int32], scheme: Scheme) -> npt.NDArray[np.int64] | None:
    """Inputs in the order of their groups, int64 ``[E]``; None where that is their own, as config.json says.

    Args:
        name: of the tensor, for messages.
        group_of_E: group of each input. Without act-order, engines do not read it, and some tools write zeros.

    Raises:
        ValueError: it is not what config.json says.
    """
    size = scheme.group_inputs
    if not size:
        return None
    ordered_E = np.arange(len(group_of_E)) // size
    if not scheme.act_order:
        if not group_of_E.any() or (group_of_E == ordered_E).all():
            return None
        raise ValueError(
            f"{name} has inputs in act-order, and config.json says that they are not: set "
            "quantization_config.desc_act to true there, if the weights were quantised so"
        )
    order_E = np.argsort(group_of_E, kind="stable")
    if (group_of_E[order_E] != ordered_E).any():
        raise ValueError(f"{name} does not give each group {size} inputs; quantise the model again, or download it")
    return order_E


def _wanted(shape: ModelShape, stored: Mapping[str, _Found]) -> tuple[dict[str, Accepted], list[str]]:
    """What a checkpoint of ``shape`` may hold, by name, and what is quantised though it should not, or the reverse."""
    wanted = {name: Accepted(_FLOAT_DTYPES, (size,)) for name, size in tensor_shapes(shape).items()}
    problems: list[str] = []
    if (scheme := shape.scheme) is None:
        return wanted, problems
    for name, (num_inputs, num_outputs) in stacked_experts(shape).items():
        if not scheme.quantises(name):
            raise ValueError(
                f"config.json: quantization_config excepts {name}; serve a checkpoint that quantises all experts, or "
                "none"
            )
        groups = (shape.num_experts, num_outputs, scheme.num_groups(num_inputs))
        wanted[f"{name}_blocks"] = Accepted(("U8",), ((*groups, scheme.group_inputs // 2),))
        wanted[f"{name}_scales"] = Accepted(("U8",), (groups,))
        del wanted[name]
    quantised_experts = {_of_all_experts(module) for module in layer_matrices(shape) if scheme.quantises(module)}
    for module, size in layer_matrices(shape).items():
        if not scheme.quantises(module):
            if ".experts." in module and _of_all_experts(module) in quantised_experts:
                raise ValueError(
                    f"config.json: quantization_config excepts {_name_in_file(module, stored)}, and not that of all "
                    "experts of its layer; serve a checkpoint that quantises all or none"
                )
            continue
        name = f"{module}.weight"
        if name in stored and stored[name].tensor.dtype in _FLOAT_DTYPES:
            problems.append(
                f"{_name_in_file(module, stored)} is not quantised, and quantization_config does not except it"
            )
            continue
        del wanted[name]
        wanted |= {f"{module}.{part}": each for part, each in matrix_tensors(scheme, *size).items()}
        if f"{name}_scale_inv" in stored and f"{name}_scale" in wanted:
            wanted[f"{name}_scale_inv"] = wanted.pop(f"{name}_scale")
    return wanted, problems


def _of_all_experts(module: str) -> str:
    return re.sub(r"\.experts\.\d+\.", ".experts.*.", module)


def matrix_tensors(scheme: Scheme, num_outputs: int, num_inputs: int) -> dict[str, Accepted]:
    """Tensors of a quantised matrix ``[F, E]``, by the ends of their names.

    F output and E input features, G groups of inputs, B blocks of outputs. Words of 32 bits hold several values:

    - ``packed``: ``weight_packed [F, E / 8]``, ``weight_scale [F, G]``, ``weight_zero_point [F / 8, G]``
    - ``plain``: ``weight [F, E]``, ``weight_scale [B, G]`` (or ``weight_scale_inv``, which multiplies, too),
      ``weight_zero_point [B, G]``
    - ``gptq``: ``qweight [E / 8, F]``, ``scales [G, F]``, ``qzeros [G, F / 8]``
    - ``awq``: ``qweight [E, F / 8]``, ``scales [G, F]``, ``qzeros [G, F / 8]``
    """

    def words(count: int) -> int:
        return -(-count * scheme.bits // 32)

    group_of_inputs = Accepted(("I32",), ((num_inputs,),))
    num_groups, num_blocks = scheme.num_groups(num_inputs), -(-num_outputs // scheme.block_outputs)
    if scheme.layout in ("gptq", "awq"):
        packed = (words(num_inputs), num_outputs) if scheme.layout == "gptq" else (num_inputs, words(num_outputs))
        return {
            "qweight": Accepted(("I32",), (packed,)),
            "scales": Accepted(_FLOAT_DTYPES, ((num_groups, num_outputs),)),
            "qzeros": Accepted(("I32",), ((num_groups, words(num_outputs)),)),
            "g_idx": group_of_inputs._replace(is_optional=not scheme.act_order),
        }
    scales: tuple[tuple[int, ...], ...] = ((num_blocks, num_groups),)
    if not scheme.group_inputs:  # of each output, or of all
        scales = (*scales, (num_outputs,), (1, 1), (1,), ())
    tensors = {"weight_scale": Accepted(_FLOAT_DTYPES, scales)}
    if scheme.layout == "packed":
        tensors["weight_packed"] = Accepted(("I32",), ((num_outputs, words(num_inputs)),))
        tensors["weight_shape"] = Accepted(("I32", "I64"), ((2,),), is_optional=True)
        if scheme.has_zeros:
            tensors["weight_zero_point"] = Accepted(("I32",), ((words(num_outputs), num_groups),))
    else:
        tensors["weight"] = Accepted(("F8_E4M3",) if scheme.kind == "e4m3" else ("I8",), ((num_outputs, num_inputs),))
        if scheme.has_zeros:
            tensors["weight_zero_point"] = Accepted(("I8",), scales)
    if scheme.act_order:
        tensors["weight_g_idx"] = group_of_inputs
    return tensors


def text_name(name: str) -> str:
    """Name of a tensor as in Llama and Qwen: multimodal checkpoints put a prefix before it, and Mixtral's experts have
    other names."""
    for prefix, of_text in (("model.language_model.", "model."), ("language_model.", "")):
        if name.startswith(prefix):
            name = of_text + name.removeprefix(prefix)
            break
    if found := _MIXTRAL.fullmatch(name):
        projection = _OF_MIXTRAL.get(found["projection"], "")
        return f"{found['layer']}.mlp.{found['part']}{projection}.{found['kind']}"
    return name


def shard_paths(folder: Path) -> list[Path]:
    """List the safetensors files of the checkpoint in ``folder``.

    Raises:
        ValueError: no files, or the index names a file that is missing or outside the folder.
    """
    index = folder / _INDEX_NAME
    names = {"model.safetensors"}
    if index.exists():
        names = _indexed_names(index)
    elif not (folder / "model.safetensors").exists():
        raise ValueError(f"{folder} holds no model.safetensors and no {_INDEX_NAME}; {_remedy_without(folder)}")
    missing = sorted(name for name in names if not (folder / name).exists())
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(missing)}, named in {_INDEX_NAME}; download the missing files")
    return [folder / name for name in sorted(names)]


def _indexed_names(index: Path) -> set[str]:
    """File names in the index, restricted to safetensors in its folder, which the model's hash covers."""
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} names no shards ({error!r}); download it again") from error
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{index} names no shards; download it again")
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{index} names {name!r}, not a .safetensors file in its own folder; download it again")
    return names


def _remedy_without(folder: Path) -> str:
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if not pickled:
        others = sorted(folder.glob("*.safetensors"))
        said = "".join(f"{path.name} {'is there' if path.exists() else 'is a link to nothing'}; " for path in others)
        return f"{said}name a folder written by save_pretrained()"
    return (
        f"{', '.join(pickled)} are pickles, which can run code and are never loaded: convert them with transformers, "
        "from_pretrained(...).save_pretrained(...), on a machine you trust them on"
    )


def norm_names(shape: ModelShape) -> dict[str, str]:
    """Tensor names of a layer's norms, keyed by field of `pdserve.model.weights.decoder_weights.LayerWeights`."""
    if not shape.post_norms:
        return {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    return {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }


def tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a checkpoint of ``shape``, keyed by their transformers name."""
    tensors = {
        "model.embed_tokens.weight": (shape.vocab_size, shape.hidden_size),
        "model.norm.weight": (shape.hidden_size,),
    }
    if not shape.tie_word_embeddings:
        tensors["lm_head.weight"] = (shape.vocab_size, shape.hidden_size)
    for index in range(shape.num_layers):
        layer = _layer_tensor_shapes(shape, is_dense=not shape.num_experts or index in shape.dense_layers)
        tensors |= {f"model.layers.{index}.{name}": tensor for name, tensor in layer.items()}
    for name, (num_inputs, num_outputs) in stacked_experts(shape).items():
        tensors[name] = (shape.num_experts, num_inputs, num_outputs)
        tensors[f"{name}_bias"] = (shape.num_experts, num_outputs)
    return tensors


def stacked_experts(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of matrices that are stacked for all experts of a layer, in float ``[X, E, F]``, by name."""
    if not shape.stacked_experts:
        return {}
    parts = {
        "gate_up_proj": (shape.hidden_size, 2 * shape.intermediate_size),
        "down_proj": (shape.intermediate_size, shape.hidden_size),
    }
    return {
        f"model.layers.{index}.mlp.experts.{part}": size
        for index in range(shape.num_layers)
        for part, size in parts.items()
    }


def stored_tensors(shape: ModelShape) -> dict[str, Accepted]:
    """Tensors of a checkpoint of ``shape`` in its scheme, keyed by their transformers name.

    Raises:
        ValueError: the scheme quantises some of a layer's experts alone.
    """
    return _wanted(shape, {})[0]


def layer_matrices(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of all layers' matrices, keyed by module: ``model.layers.0.mlp.up_proj``. Not of routers and
    gates of experts, which are never quantised, nor `stacked_experts`."""
    return {
        name.removesuffix(".weight"): (size[0], size[1])
        for name, size in tensor_shapes(shape).items()
        if len(size) == 2
        and ".layers." in name
        and name.endswith(".weight")
        and not name.endswith(("gate.weight", "router.weight"))
    }


def _layer_tensor_shapes(shape: ModelShape, *, is_dense: bool) -> dict[str, tuple[int, ...]]:
    hidden, num_experts = shape.hidden_size, shape.num_experts
    num_q, num_kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    projections = {
        "self_attn.q_proj": (num_q, hidden, shape.qkv_bias),
        "self_attn.k_proj": (num_kv, hidden, shape.qkv_bias),
        "self_attn.v_proj": (num_kv, hidden, shape.qkv_bias),
        "self_attn.o_proj": (hidden, num_q, shape.output_bias),
    }
    if is_dense:
        mlps = {"mlp": shape.dense_intermediate_size if num_experts else shape.intermediate_size}
    else:
        num_apart = 0 if shape.stacked_experts else num_experts
        mlps = {f"mlp.experts.{expert}": shape.intermediate_size for expert in range(num_apart)}
        router = "mlp.router" if shape.stacked_experts else "mlp.gate"
        projections[router] = (num_experts, hidden, shape.stacked_experts)
        if shape.shared_intermediate_size:
            mlps["mlp.shared_expert"] = shape.shared_intermediate_size
            projections["mlp.shared_expert_gate"] = (1, hidden, False)
    for name, intermediate in mlps.items():
        projections |= {
            f"{name}.gate_proj": (intermediate, hidden, shape.mlp_bias),
            f"{name}.up_proj": (intermediate, hidden, shape.mlp_bias),
            f"{name}.down_proj": (hidden, intermediate, shape.mlp_bias),
        }
    tensors: dict[str, tuple[int, ...]] = {}
    for name, (num_outputs, num_inputs, has_bias) in projections.items():
        tensors[f"{name}.weight"] = (num_outputs, num_inputs)
        if has_bias:
            tensors[f"{name}.bias"] = (num_outputs,)
    tensors |= {f"{name}.weight": (hidden,) for name in norm_names(shape).values()}
    if shape.qk_norm:
        tensors |= {f"self_attn.{part}_norm.weight": (shape.head_dim,) for part in "qk"}
    if shape.sinks:
        tensors["self_attn.sinks"] = (shape.num_heads,)
    return tensors
