"""Which checkpoints are refused before a weight is read, and with which words."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.config.shape import ModelShape
from pdserve.model.weights.files import check_weights, read_header, shard_paths
from tests.model.checkpoints import FAMILIES, write_checkpoint, write_family
from tests.model.quantised_checkpoints import FORMS, write_mxfp4, write_quantised

SHAPE = ModelShape(
    num_layers=1, hidden_size=8, intermediate_size=8, num_heads=2, num_kv_heads=2, head_dim=4, vocab_size=16
)


def stored(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


def shape_of(folder: Path) -> ModelShape:
    return DecoderConfig.from_folder(folder).shape


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_of_every_family_pass(tmp_path: Path, family: str) -> None:
    folder = write_family(tmp_path, family)
    check_weights(folder, shape_of(folder))


def test_a_header_tells_where_the_tensors_are(tmp_path: Path) -> None:
    given = {"w": torch.randn(3, 2), "b": torch.randn(3, dtype=torch.bfloat16)}
    file = stored(tmp_path, given) / "model.safetensors"
    tensors = read_header(file)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()} == {
        "w": ("F32", (3, 2)),
        "b": ("BF16", (3,)),
    }
    tensor = tensors["w"]
    assert file.read_bytes()[tensor.start : tensor.end] == given["w"].numpy().tobytes()


def test_every_mismatch_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["extra"] = torch.zeros(1)
    tensors["rotary_emb.inv_freq"] = torch.zeros(1)
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(3)
    tensors["model.layers.1.mlp.down_proj.weight"] = tensors["model.layers.1.mlp.down_proj.weight"].to(torch.int8)
    with pytest.raises(ValueError, match="do not match config") as error:
        check_weights(stored(folder, tensors), shape_of(folder))
    for problem in (
        "missing model.norm.weight",
        "unexpected extra",
        "model.layers.0.mlp.down_proj.weight has shape [3], not [64, 112]",
        "model.layers.1.mlp.down_proj.weight has dtype I8, not one of F64",
    ):
        assert problem in str(error.value)
    assert "inv_freq" not in str(error.value)


@pytest.mark.parametrize("form", FORMS)
def test_quantised_checkpoints_pass(tmp_path: Path, form: str) -> None:
    folder, _ = write_quantised(tmp_path, "qwen2", form)
    left_out = check_weights(folder, shape_of(folder))
    assert left_out == ("14 of *.input_scale" if "fp8" in form else "")


@pytest.mark.parametrize(
    ("form", "changes", "problem"),
    [
        ("w8a8-fp8", {"weight_scale": None}, "missing {module}.weight_scale"),
        ("fp8-block", {"weight_scale_inv": None}, "missing {module}.weight_scale"),
        ("fp8-block", {"weight_scale": torch.ones(2, 2)}, "unexpected {module}.weight_scale"),
        ("fp8-block", {"weight_scale_inv": torch.ones(1, 2)}, "{module}.weight_scale_inv has shape [1, 2], not [3, 2]"),
        ("w4a16", {"weight_packed": torch.zeros(128, 16)}, "{module}.weight_packed has shape [128, 16], not [128, 8]"),
        ("w4a16", {"weight_packed": torch.zeros(128, 8)}, "{module}.weight_packed has dtype F32, not one of I32"),
        ("gptq", {"qzeros": None}, "missing {module}.qzeros"),
        ("awq", {"scales": torch.ones(128, 2)}, "{module}.scales has shape [128, 2], not [2, 128]"),
        ("awq", {"bias": torch.ones(128)}, "unexpected {module}.bias"),
    ],
)
def test_a_quantised_matrix_without_its_scales_or_of_another_size_is_named(
    tmp_path: Path, form: str, changes: dict[str, torch.Tensor | None], problem: str
) -> None:
    folder, _ = write_quantised(tmp_path, "llama", form)
    tensors, module = load_file(folder / "model.safetensors"), "model.layers.1.mlp.up_proj"
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[f"{module}.{name}"]
        else:
            tensors[f"{module}.{name}"] = tensor
    with pytest.raises(ValueError, match=re.escape(problem.format(module=module))):
        check_weights(stored(folder, tensors), shape_of(folder))


@pytest.mark.parametrize("changes", [{"group_size": 64}, {"bits": 8}])
def test_groups_of_another_size_than_the_configuration_says_are_refused(
    tmp_path: Path, changes: dict[str, int]
) -> None:
    folder, _ = write_quantised(tmp_path, "mixtral", "gptq")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"has shape .* or correct the bits and the size of groups or blocks"):
        check_weights(folder, shape_of(folder))


def test_biases_of_zeros_that_tools_for_gptq_add_are_left_out(tmp_path: Path) -> None:
    folder, _ = write_quantised(tmp_path, "llama", "gptq")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.bias"] = torch.zeros(128).half()
    check_weights(stored(folder, tensors), shape_of(folder))


def test_quantised_tables_are_refused(tmp_path: Path) -> None:
    folder, _ = write_quantised(tmp_path, "llama", "w4a16")
    tensors = load_file(folder / "model.safetensors")
    _, parts = FORMS["w4a16"].pack(tensors.pop("lm_head.weight"))
    tensors |= {f"lm_head.{part}": tensor for part, tensor in parts.items()}
    with pytest.raises(ValueError, match=r"missing lm_head\.weight; .*\. Serve a checkpoint .* embeddings and lm_head"):
        check_weights(stored(folder, tensors), shape_of(folder))


def test_matrices_that_the_scheme_excepts_are_floats(tmp_path: Path) -> None:
    folder, plain = write_quantised(tmp_path, "llama", "awq")
    tensors, module = load_file(folder / "model.safetensors"), "model.layers.1.mlp.up_proj"
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(module)}
    tensors[f"{module}.weight"] = load_file(plain / "model.safetensors")[f"{module}.weight"]
    shape = shape_of(folder)
    with pytest.raises(ValueError, match=f"{module} is not quantised, and quantization_config does not except it"):
        check_weights(stored(folder, tensors), shape)
    assert shape.scheme is not None
    check_weights(folder, replace(shape, scheme=replace(shape.scheme, ignored=("layers.1.mlp.up_proj",))))


@pytest.mark.parametrize(("part", "name"), [("down_proj", "w2"), ("gate_proj", "w1")])
def test_experts_that_are_quantised_in_part_are_refused(tmp_path: Path, part: str, name: str) -> None:
    """Kernels take all experts of a layer in one form."""
    folder, _ = write_quantised(tmp_path, "mixtral", "awq", excepted=[f"model.layers.1.mlp.experts.2.{part}"])
    with pytest.raises(
        ValueError, match=rf"excepts model\.layers\.1\.block_sparse_moe\.experts\.2\.{name}, and not .* all"
    ):
        check_weights(folder, shape_of(folder))


def test_experts_in_mxfp4_pass(tmp_path: Path) -> None:
    folder, plain = write_mxfp4(tmp_path)
    assert check_weights(folder, shape_of(folder)) == ""
    assert check_weights(plain, shape_of(plain)) == ""


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"mlp.experts.down_proj_scales": None}, "missing {layer}.mlp.experts.down_proj_scales"),
        ({"mlp.experts.down_proj_scales": torch.ones(6, 64, 4)}, "_scales has dtype F32, not one of U8"),
        (
            {"mlp.experts.gate_up_proj_blocks": torch.zeros(6, 256, 4, 16, dtype=torch.uint8)},
            "{layer}.mlp.experts.gate_up_proj_blocks has shape [6, 256, 4, 16], not [6, 256, 2, 16]",
        ),
        ({"mlp.experts.down_proj_bias": None}, "missing {layer}.mlp.experts.down_proj_bias"),
        ({"self_attn.sinks": torch.zeros(2)}, "{layer}.self_attn.sinks has shape [2], not [4]"),
        ({"mlp.router.bias": None}, "missing {layer}.mlp.router.bias"),
    ],
)
def test_parts_of_experts_in_mxfp4_that_are_missing_or_of_another_size_are_named(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], problem: str
) -> None:
    folder, _ = write_mxfp4(tmp_path)
    tensors, layer = load_file(folder / "model.safetensors"), "model.layers.1"
    for name, tensor in changes.items():
        del tensors[f"{layer}.{name}"]
        if tensor is not None:
            tensors[f"{layer}.{name}"] = tensor
    with pytest.raises(ValueError, match=re.escape(problem.format(layer=layer))):
        check_weights(stored(folder, tensors), shape_of(folder))


def test_experts_of_some_layers_in_mxfp4_are_refused(tmp_path: Path) -> None:
    folder, _ = write_mxfp4(tmp_path)
    shape = shape_of(folder)
    assert shape.scheme is not None
    some = replace(shape, scheme=replace(shape.scheme, ignored=("model.layers.1.mlp",)))
    with pytest.raises(
        ValueError, match=r"excepts model\.layers\.1\.mlp\.experts\.gate_up_proj; .* all experts, or none"
    ):
        check_weights(folder, some)


def test_experts_in_mxfp4_of_which_config_json_says_nothing_are_named(tmp_path: Path) -> None:
    folder, _ = write_mxfp4(tmp_path)
    with pytest.raises(ValueError, match=r"The weights are quantised, and config\.json does not say how"):
        check_weights(folder, replace(shape_of(folder), scheme=None))


ORDERED = torch.arange(64, dtype=torch.int32) // 32


@pytest.mark.parametrize(
    ("form", "end", "values", "problem"),
    [
        ("gptq", "g_idx", ORDERED.flip(0), "has inputs in act-order, .*set .*desc_act to true"),
        ("gptq-act-order", "g_idx", ORDERED.clamp(max=0), "does not give each group 32 inputs"),
        ("gptq-that-is-v2", "qzeros", ORDERED.view(2, 32)[:, :16], "are not all in the middle, .*sym is true: set it"),
    ],
)
def test_groups_and_zero_points_that_config_json_denies_are_refused(
    tmp_path: Path, form: str, end: str, values: torch.Tensor, problem: str
) -> None:
    folder, _ = write_quantised(tmp_path, "llama", form)
    tensors, name = load_file(folder / "model.safetensors"), f"model.layers.1.mlp.up_proj.{end}"
    assert tensors[name].shape == values.shape
    tensors[name] = values.contiguous()
    with pytest.raises(ValueError, match=f"^{re.escape(str(folder))}/model.safetensors: {re.escape(name)} {problem}"):
        check_weights(stored(folder, tensors), shape_of(folder))


def test_experts_whose_gate_and_up_are_in_another_order_are_refused(tmp_path: Path) -> None:
    folder, _ = write_quantised(tmp_path, "mixtral", "gptq-act-order")
    tensors, prefix = load_file(folder / "model.safetensors"), "model.layers.1.block_sparse_moe.experts.2."
    tensors[f"{prefix}w3.g_idx"] = tensors[f"{prefix}w3.g_idx"].flip(0)
    assert not torch.equal(tensors[f"{prefix}w3.g_idx"], tensors[f"{prefix}w1.g_idx"])
    names = rf"{re.escape(prefix)}w3\.g_idx has inputs in another order than {re.escape(prefix)}w1\.g_idx"
    with pytest.raises(
        ValueError, match=f"{re.escape(str(folder))}/model.safetensors: {names}, .*; serve a checkpoint"
    ):
        check_weights(stored(folder, tensors), shape_of(folder))


@pytest.mark.parametrize("part", ["w1", "w3"])
def test_without_act_order_an_expert_may_lack_the_groups_of_some_matrices(tmp_path: Path, part: str) -> None:
    """But none that has them may have them in another order."""
    folder, _ = write_quantised(tmp_path, "mixtral", "gptq")
    tensors, prefix = load_file(folder / "model.safetensors"), "model.layers.1.block_sparse_moe.experts.2."
    del tensors[f"{prefix}{part}.g_idx"]
    assert check_weights(stored(folder, tensors), shape_of(folder)) == ""
    other = f"{prefix}{'w3' if part == 'w1' else 'w1'}.g_idx"
    tensors[other] = tensors[other].flip(0)
    with pytest.raises(ValueError, match=f"{re.escape(other)} has inputs in act-order, .*set .*desc_act to true"):
        check_weights(stored(folder, tensors), shape_of(folder))


def test_with_act_order_an_expert_lacks_the_groups_of_no_matrix(tmp_path: Path) -> None:
    folder, _ = write_quantised(tmp_path, "mixtral", "gptq-act-order")
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.1.block_sparse_moe.experts.2.w3.g_idx"
    del tensors[name]
    with pytest.raises(ValueError, match=f"missing {re.escape(name)}"):
        check_weights(stored(folder, tensors), shape_of(folder))


def test_tensors_of_mixtral_are_named_as_in_the_file(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "mixtral")
    tensors, prefix = load_file(folder / "model.safetensors"), "model.layers.0.block_sparse_moe."
    del tensors[f"{prefix}experts.1.w1.weight"], tensors[f"{prefix}gate.weight"]
    tensors[f"{prefix}experts.0.w2.weight"] = torch.zeros(3)
    tensors[f"{prefix}experts.9.w3.weight"] = torch.zeros(3)
    with pytest.raises(ValueError, match="do not match config") as error:
        check_weights(stored(folder, tensors), shape_of(folder))
    for problem in (
        f"missing {prefix}gate.weight",
        f"missing {prefix}experts.1.w1.weight",
        f"unexpected {prefix}experts.9.w3.weight",
        f"{prefix}experts.0.w2.weight has shape [3]",
    ):
        assert problem in str(error.value)
    assert ".mlp." not in str(error.value)


def test_of_many_mismatches_a_few_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing model\.embed_tokens\.weight; .*; and 5 more\. Take config\.json"):
        check_weights(stored(tmp_path, {"w": torch.zeros(1)}), SHAPE)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, max_shard_size="100KB")
    check_weights(folder, shape_of(folder))
    lost = shard_paths(folder)[1]
    lost.unlink()
    with pytest.raises(ValueError, match=f"lacks {lost.name}"):
        check_weights(folder, shape_of(folder))


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"metadata": {}}', '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"w": 1}}']
)
def test_a_damaged_index_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"index\.json names no shards"):
        shard_paths(tmp_path)


@pytest.mark.parametrize("name", ["../model.safetensors", "/model.safetensors", "sub/model.safetensors", ".", ""])
def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    """Only files that `model_hash` sees are read."""
    folder = tmp_path / "model"
    for place in (tmp_path, folder, folder / "sub"):
        place.mkdir(exist_ok=True)
        stored(place, {"w": torch.zeros(2)})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(ValueError, match=r"index\.json names .* not a \.safetensors file in its own folder"):
        shard_paths(folder)


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    pointer = tmp_path / "model.safetensors"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:e3b0c442\nsize 2048\n")
    with pytest.raises(ValueError, match=r"safetensors is a pointer of Git LFS; run git lfs pull in its folder"):
        read_header(pointer)


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        (slice(0, -4), r"model\.safetensors has \d+ bytes, but its header describes \d+; download it again"),
        (slice(0, 30), "is cut short; download it again"),
        (slice(0, 0), "is cut short; download it again"),
        (slice(1, None), "is not a safetensors file"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, cut: slice, said: str) -> None:
    file = stored(tmp_path, {"w": torch.zeros(100)}) / "model.safetensors"
    file.write_bytes(file.read_bytes()[cut])
    with pytest.raises(ValueError, match=said):
        read_header(file)


def test_pickles_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin are pickles.*save_pretrained"):
        shard_paths(tmp_path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        shard_paths(tmp_path)
