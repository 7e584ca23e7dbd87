from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file

from pdserve.contracts.kv_layout import DTYPE_BYTES
from pdserve.contracts.precision import Precision
from pdserve.kernels import weight_quantisation
from pdserve.kernels.cpu import dense, shared_weights
from pdserve.kernels.operations import Experts, Linear
from pdserve.kernels.selection import CPU_KERNELS, TORCH_KERNELS
from pdserve.kernels.torch import dense as torch_dense
from pdserve.kernels.torch.dense import matrix_dtype
from pdserve.kernels.weight_quantisation import GroupedWeight
from pdserve.model.config import sharding
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.config.sharding import Place
from pdserve.model.weights import decoder_weights, files
from pdserve.model.weights import stored as stored_weights
from pdserve.model.weights.decoder_weights import (
    DenseMlp,
    ExpertMlp,
    held_bytes,
    load_decoder_weights,
    missing_bytes,
    products_of,
)
from pdserve.model.weights.random_checkpoint import write_random_checkpoint
from pdserve.model.weights.stored import Checkpoint
from tests.model.checkpoints import FAMILIES, write_checkpoint, write_family
from tests.model.quantised_checkpoints import FORMS, write_mxfp4, write_quantised


def test_weights_of_another_shape_are_refused_as_a_whole(tmp_path: Path) -> None:
    wide = write_checkpoint(tmp_path / "wide")
    narrow = write_checkpoint(tmp_path / "narrow", intermediate_size=96)
    with pytest.raises(ValueError, match="do not match config") as error:
        load_decoder_weights(wide, DecoderConfig.from_folder(narrow), Precision(), CPU_KERNELS)
    for problem in (
        "model.layers.0.mlp.gate_proj.weight has shape [112, 64], not [96, 64]",
        "model.layers.1.mlp.down_proj.weight has shape [64, 112], not [64, 96]",
    ):
        assert problem in str(error.value)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"), ("bfloat16", "int4")],
)
def test_weight_bytes_are_those_that_are_held(tmp_path: Path, dtype: str, quantization: str, family: str) -> None:
    assert_held_bytes(write_family(tmp_path, family), Precision(dtype=dtype, quantization=quantization))


def test_dtype_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    precision = Precision(dtype="bfloat16")
    cases = (
        (precision, "bfloat16"),
        (replace(precision, cpu_products="float32"), "float32"),
        (Precision(dtype="float16"), "float32"),
        (Precision(dtype="float32"), "float32"),
    )
    monkeypatch.setattr(decoder_weights, "multiplies_bfloat16", lambda: True)
    for each, products in cases:
        assert products_of(each) == products
    monkeypatch.setattr(decoder_weights, "multiplies_bfloat16", lambda: False)
    assert products_of(precision) == "float32"
    monkeypatch.setattr(decoder_weights, "load_library", lambda: None)
    for each, _ in cases:
        assert getattr(torch, products_of(each)) is matrix_dtype(getattr(torch, each.dtype))


@pytest.mark.parametrize("form", FORMS)
def test_weight_bytes_of_quantised_checkpoints_are_those_that_are_held(tmp_path: Path, form: str) -> None:
    quantised, _ = write_quantised(tmp_path, "llama", form, hidden_size=256, intermediate_size=512)
    assert_held_bytes(quantised, Precision(dtype="bfloat16"))


def test_weight_bytes_of_experts_in_mxfp4_are_those_that_are_held(tmp_path: Path) -> None:
    quantised, _ = write_mxfp4(tmp_path, hidden_size=256, intermediate_size=512)
    assert_held_bytes(quantised, Precision(dtype="bfloat16"))


def test_a_matrix_beside_one_that_is_excepted_is_held_as_a_float(tmp_path: Path) -> None:
    excepted = ["model.layers.0.self_attn.v_proj", "model.layers.1.mlp.gate_proj"]
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    quantised, _ = write_quantised(tmp_path, "llama", "awq", excepted=excepted, **sizes)
    assert_held_bytes(quantised, Precision(dtype="bfloat16"))


def assert_held_bytes(folder: Path, precision: Precision) -> None:
    config = DecoderConfig.from_folder(folder)
    weights = load_decoder_weights(folder, config, precision, CPU_KERNELS)
    assert weights.embedding is not None
    assert weights.lm_head is not None
    assert weights.norm is not None
    held = {id(linear): linear.num_bytes for linear in (weights.embedding, weights.lm_head)}
    num_bytes = sum(held.values()) + sum(
        matrices.num_bytes
        for layer in weights.layers
        for matrices in (layer.qkv, layer.output, *matrices_of(layer.mlp))
    )
    norms = [weights.norm, *(norm for layer in weights.layers for norm in (layer.attention_norm, layer.mlp_norm))]
    num_bytes += sum(norm.nbytes for norm in norms)
    shape = config.shape
    num_bytes += (shape.num_layers - shape.num_dense_layers) * shape.router_parameters * DTYPE_BYTES[precision.dtype]
    # Compiled kernels fill matrices up to whole panels; here, that is the vocabulary of 211.
    assert 0.95 * num_bytes <= held_bytes(config.shape, precision.dtype, precision.quantization) <= 1.02 * num_bytes


def matrices_of(mlp: DenseMlp | ExpertMlp) -> Iterator[Linear | Experts]:
    """All but the router, a few rows of a panel."""
    if isinstance(mlp, DenseMlp):
        yield from mlp
    else:
        yield from (mlp.gate_up, mlp.down, *(mlp.shared or ()))


def test_weights_that_another_worker_has_packed_take_no_memory(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "qwen2_moe")
    config, precision = DecoderConfig.from_folder(folder), Precision(dtype="bfloat16")

    def missing(precision: Precision = precision, place: Place = Place()) -> int:  # noqa: B008  # immutable
        return missing_bytes(folder, config.shape, precision, [place])

    all_bytes = held_bytes(config.shape, "bfloat16", "none")
    assert missing() == all_bytes
    weights = load_decoder_weights(folder, config, precision, CPU_KERNELS)
    assert missing() == 0
    for others in (missing(replace(precision, quantization="int8")), missing(place=Place(0, 2))):
        assert others > 0
    (folder / "model.safetensors").touch()
    assert missing() == all_bytes
    assert weights.layers


@pytest.mark.parametrize(
    "module", [shared_weights, dense, weight_quantisation, decoder_weights, stored_weights, files, sharding]
)
def test_other_code_does_not_use_the_copy(module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path)
    shape, read = DecoderConfig.from_folder(folder).shape, Path.read_bytes
    before = decoder_weights._copy_key(folder, shape, Precision(dtype="float32"), Place())
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (str(path) == module.__file__))
    assert decoder_weights._copy_key(folder, shape, Precision(dtype="float32"), Place()) != before


def test_without_a_compiler_matrices_are_held_as_this_cpu_multiplies_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = DecoderConfig.from_folder(write_checkpoint(tmp_path)).shape
    monkeypatch.setattr(decoder_weights, "load_library", lambda: None)
    held_in = torch_dense.matrix_dtype(torch.bfloat16)
    assert held_bytes(shape, "bfloat16", "none") == shape.num_parameters * held_in.itemsize
    for quantization in ("int8", "int4"):
        with pytest.raises(ValueError, match=r"install g\+\+, or set model.quantization none"):
            held_bytes(shape, "bfloat16", quantization)


def test_one_matrix_at_a_time_is_in_memory_beside_what_the_kernels_hold(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "qwen2")
    taken: list[weakref.ref[torch.Tensor]] = []

    def pack(
        weight_FE: torch.Tensor | GroupedWeight,
        bias_F: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> Linear:
        assert isinstance(weight_FE, torch.Tensor)
        assert all(weight() is None for weight in taken)
        taken.append(weakref.ref(weight_FE))
        return TORCH_KERNELS.pack_linear(weight_FE[:1].clone())

    kernels = TORCH_KERNELS._replace(pack_linear=pack)
    load_decoder_weights(folder, DecoderConfig.from_folder(folder), Precision(), kernels)
    assert len(taken) == 2 + 4 * 2


def test_loading_leaves_nothing_in_memory_but_the_weights(tmp_path: Path) -> None:
    folder = write_random_checkpoint(
        tmp_path / "model",
        num_layers=12,
        hidden_size=768,
        intermediate_size=3072,
        num_heads=12,
        num_kv_heads=2,
        vocab_size=512,
        dtype="bfloat16",
    )
    # In a process of its own, whose memory is nobody else's.
    run = subprocess.run([sys.executable, "-c", _LOAD, str(folder)], check=True, capture_output=True, text=True)
    grown_bytes, weight_bytes = map(int, run.stdout.split())
    assert weight_bytes < grown_bytes < 1.1 * weight_bytes + 10 * 2**20


_LOAD = """
import sys
from pathlib import Path

import psutil
import torch

from pdserve.contracts.precision import Precision
from pdserve.kernels.selection import CPU_KERNELS
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.weights.decoder_weights import held_bytes, load_decoder_weights

folder = Path(sys.argv[1])
config = DecoderConfig.from_folder(folder)
num_bytes = held_bytes(config.shape, "bfloat16", "none")
torch.ones(1000, 1000).sum()
before = psutil.Process().memory_info().rss
weights = load_decoder_weights(folder, config, Precision(dtype="bfloat16"), CPU_KERNELS)
print(psutil.Process().memory_info().rss - before, num_bytes)
"""


def stored(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_tensors_of_one_input_are_read_as_one(tmp_path: Path) -> None:
    given = {"gate": torch.randn(3, 4), "up": torch.randn(2, 4)}
    with Checkpoint(stored(tmp_path, given), torch.float32) as checkpoint:
        both, one = checkpoint.read("gate", "up"), checkpoint.read("up")
    assert torch.equal(both, torch.cat((given["gate"], given["up"])))
    assert torch.equal(one, given["up"])


def test_what_was_read_does_not_change_with_the_file(tmp_path: Path) -> None:
    folder = stored(tmp_path, {"w": torch.ones(4)})
    with Checkpoint(folder, torch.float32) as checkpoint:
        held = checkpoint.read("w")
    file = folder / "model.safetensors"
    with file.open("r+b") as opened:
        opened.seek(-16, 2)
        opened.write(bytes(16))
    assert held.tolist() == [1.0] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_are_rounded_to_the_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    given = {"w": torch.randn(4, 4)}
    with Checkpoint(stored(tmp_path, given), dtype) as checkpoint:
        assert torch.equal(checkpoint.read("w"), given["w"].to(dtype))


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        Checkpoint(tmp_path, torch.float32)
    (tmp_path / "model.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read.*download it again"):
        Checkpoint(tmp_path, torch.float32)
