"""Which quantised checkpoints are known, and in which words the others are refused."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.model.config.quantisation import Scheme, held_scheme, parse_scheme, served_scheme

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}


def compressed(form: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**WEIGHTS, **weights}, "format": None}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


def parsed(config: object) -> Scheme:
    scheme = parse_scheme({"quantization_config": config})
    assert scheme is not None
    return scheme


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GPTQ, Scheme(method="GPTQ", layout="gptq", kind="int4", group_inputs=128, zeros_less_one=True)),
        (
            {**GPTQ, "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2", "sym": False, "desc_act": True},
            Scheme(method="GPTQ", layout="gptq", kind="int8", has_zeros=True, act_order=True),
        ),
        (AWQ, Scheme(method="AWQ", layout="awq", kind="int4", group_inputs=128, has_zeros=True)),
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"},
            Scheme(method="AWQ", layout="awq", kind="int4", group_inputs=64, has_zeros=True),
        ),
        (
            {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
            Scheme(method="FP8", layout="plain", kind="e4m3", group_inputs=128, block_outputs=128),
        ),
        (
            {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["model.layers.0.self_attn"]},
            Scheme(method="FP8", layout="plain", kind="e4m3", ignored=("model.layers.0.self_attn",)),
        ),
        (
            {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
            Scheme(
                method="MXFP4",
                layout="blocks",
                kind="e2m1",
                group_inputs=32,
                targets=("mlp.experts",),
                ignored=("lm_head",),
            ),
        ),
    ],
)
def test_schemes(config: dict[str, Any], expected: Scheme) -> None:
    assert parsed(config) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (compressed(), {"layout": "packed", "kind": "int4", "group_inputs": 128}),
        (compressed(symmetric=False, actorder="group"), {"has_zeros": True, "act_order": True}),
        (compressed(actorder="static"), {"act_order": False}),
        (compressed(actorder="dynamic"), {"act_order": True}),
        (compressed("int-quantized", num_bits=8, strategy="channel"), {"layout": "plain", "kind": "int8"}),
        (compressed("float-quantized", num_bits=8, type="float", strategy="tensor"), {"kind": "e4m3"}),
        (
            compressed("naive-quantized", num_bits=8, type="float", strategy="block", block_structure=[64, 128]),
            {"group_inputs": 128, "block_outputs": 64},
        ),
    ],
)
def test_schemes_of_compressed_tensors(config: dict[str, Any], expected: dict[str, Any]) -> None:
    scheme = parsed(config)
    assert {name: getattr(scheme, name) for name in expected} == expected
    assert str(scheme) == f"{scheme.kind} weights (compressed-tensors)"


def test_a_checkpoint_without_a_scheme_has_none() -> None:
    assert parse_scheme({}) is parse_scheme({"quantization_config": None}) is None


def test_the_scheme_may_be_under_an_older_key_or_of_the_language_model() -> None:
    older = {key: value for key, value in compressed().items() if key != "quant_method"}
    assert parse_scheme({"compression_config": older}) == parsed(compressed())
    assert parse_scheme({"text_config": {"quantization_config": GPTQ}}) == parsed(GPTQ)


def test_two_places_must_say_the_same() -> None:
    both = {"quantization_config": GPTQ, "text_config": {"quantization_config": {**GPTQ, "damp_percent": 0.1}}}
    assert parse_scheme(both) == parsed(GPTQ)
    both["text_config"] = {"quantization_config": AWQ}
    with pytest.raises(
        ValueError, match=r"^config\.json: quantization_config and text_config\.quantization_config differ"
    ):
        parse_scheme(both)
    with pytest.raises(ValueError, match=r"text_config\.compression_config\.bits is 3"):
        parse_scheme({"quantization_config": GPTQ, "text_config": {"compression_config": {**GPTQ, "bits": 3}}})


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (["fp8"], r"quantization_config must be an object, not \['fp8'\]; download it again"),
        ({"bits": 4}, "quantization_config.quant_method is None, which is not served; serve a checkpoint with comp"),
        ({"quant_method": "quark"}, "quant_method is 'quark', which is not served"),
        ({**GPTQ, "bits": 3}, "bits is 3, which is not served; serve a checkpoint with 4 or 8, or one in 16 bits"),
        ({**GPTQ, "group_size": 100}, "group_size is 100, .*with 32 or 64 or 128 or -1,"),
        ({**GPTQ, "lm_head": True}, "lm_head is True"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({**GPTQ, "dynamic": {"+:.*down.*": {"bits": 8}}}, r"dynamic is '\+:\.\*down\.\*', another scheme"),
        ({**AWQ, "bits": 3}, "bits is 3"),
        ({**AWQ, "version": "gemv"}, "version is 'gemv', .*with gemm"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 48]}, r"weight_block_size is \[128, 48\]"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'"),
        (compressed("nvfp4-pack-quantized"), "format is 'nvfp4-pack-quantized'"),
        (compressed(num_bits=3), "config_groups.weights.num_bits is 3"),
        (compressed(type="float"), "num_bits is 4 of floats"),
        (compressed(type="float", num_bits=8, symmetric=False), "symmetric is False of floats"),
        (compressed(strategy="tensor_group"), "strategy is 'tensor_group'"),
        (compressed(group_size=None), "group_size is None"),
        ({**compressed(), "config_groups": {}}, "config_groups is no groups"),
        (
            {**compressed(), "config_groups": {"group_0": {"targets": "Linear", "weights": WEIGHTS}}},
            "config_groups.targets is 'Linear'",
        ),
        ({**compressed(), "ignore": "lm_head"}, "ignore is 'lm_head', .*with a list of names"),
        ({**compressed(), "ignore": ["re:*lm_head"]}, r"quantization_config has '\*lm_head', .* correct it"),
        ({**compressed(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is format sparse"),
        ({**compressed(), "transform_config": {"config_groups": {"R1": {}}}}, "transform_config is 1 rotations"),
        (
            {
                **compressed(),
                "config_groups": {
                    name: {"targets": ["Linear"], "weights": {**WEIGHTS, "num_bits": bits}}
                    for name, bits in (("a", 4), ("b", 8))
                },
            },
            "config_groups is 2 schemes",
        ),
    ],
)
def test_what_is_not_served_is_named(config: object, problem: str) -> None:
    with pytest.raises(ValueError, match=f"^config.json: .*{problem}"):
        parsed(config)


@pytest.mark.parametrize(
    ("ignored", "module", "is_quantised"),
    [
        (("lm_head",), "model.layers.0.mlp.up_proj", True),
        (("mlp.gate",), "model.layers.0.mlp.gate_proj", True),
        (("up_proj",), "model.layers.0.mlp.up_proj", False),
        (("model.layers.1",), "model.layers.11.mlp.up_proj", True),
        (("model.layers.1",), "model.layers.1.mlp.up_proj", False),
        (("model.language_model.layers.1",), "model.layers.1.mlp.up_proj", False),
        (("language_model.model.layers.1",), "model.layers.1.mlp.up_proj", False),
        (("re:.*self_attn.*",), "model.layers.1.self_attn.q_proj", False),
        (("re:self_attn.*",), "model.layers.1.self_attn.q_proj", True),
        (("re:model.language_model.layers.1.mlp.*",), "model.layers.1.mlp.up_proj", False),
        (("model.layers.*.self_attn",), "model.layers.1.self_attn.q_proj", False),
        (("model.layers.*.self_attn",), "model.layers.1.mlp.up_proj", True),
        (("*.self_attn*",), "model.layers.1.self_attn.q_proj", False),
        (("layers.1*",), "model.layers.11.mlp.up_proj", False),
        (("layers.*.up",), "model.layers.11.mlp.up_proj", True),
        (("mlp.gate.",), "model.layers.0.mlp.gate_proj", True),
        (("model.layers.1.",), "model.layers.1.mlp.up_proj", False),
        ((".model.layers.1",), "model.layers.1.mlp.up_proj", False),
        (("block_sparse_moe.experts.3.w1",), "model.layers.1.mlp.experts.3.gate_proj", False),
        (("block_sparse_moe.experts.3.w1",), "model.layers.1.mlp.experts.3.up_proj", True),
        (("re:.*block_sparse_moe.experts.3.w2",), "model.layers.1.mlp.experts.3.down_proj", False),
    ],
)
def test_modules_are_excepted_by_part_of_their_path_or_by_a_pattern(
    ignored: tuple[str, ...], module: str, is_quantised: bool
) -> None:
    assert Scheme(kind="int8", ignored=ignored).quantises(module) is is_quantised


def test_modules_that_gptq_names_are_the_quantised_ones() -> None:
    some = parsed({**GPTQ, "modules_in_block_to_quantize": [["self_attn.k_proj"], ["mlp.up_proj", "mlp.gate_proj"]]})
    assert some.quantises("model.layers.3.mlp.up_proj")
    assert not some.quantises("model.layers.3.mlp.down_proj")
    all_but = parsed({**GPTQ, "dynamic": {r"-:.*\.3\..*": {}}})
    assert not all_but.quantises("model.layers.3.mlp.up_proj")
    assert all_but.quantises("model.layers.4.mlp.up_proj")


def test_a_setting_that_contradicts_the_checkpoint_is_refused() -> None:
    for setting in ("none", "int8", "int4"):
        with pytest.raises(ValueError, match=rf"quantization is {setting}, .* int4 weights \(AWQ\).*set .* to auto"):
            served_scheme(setting, parsed(AWQ))
        assert held_scheme(setting, parsed(AWQ)) == held_scheme(setting, None)
    assert served_scheme("auto", parsed(AWQ)) == parsed(AWQ)
    assert served_scheme("auto", None) is None
