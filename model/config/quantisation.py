"""How the matrices of a checkpoint's layers are quantised: read from config.json, refused by key where it is not known.

Read by `pdserve.model.config.shape` for workers, the router and the planner; `pdserve.model.weights.files` and
`pdserve.model.weights.stored` know how each layout is stored. Never imports torch, never reads a weight.

Sources: the documentation of compressed-tensors (pack-, int-, float- and naive-quantized), GPTQModel ("Packing Formats
and Compatibility"), AutoAWQ (gemm) and transformers (fp8, fbgemm_fp8, mxfp4) for keys and defaults.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from pdserve.contracts.precision import GROUP_SIZES, INT4_GROUP_INPUTS
from pdserve.model.config.families import mixtral_name

_PREFIXES = (("", ""), ("", "language_model."), ("model.", "model.language_model."))
"""How names of the language model begin in text-only and in multimodal checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A matrix is ``(values - zeros) * scales``. The default is that of the settings ``int8`` and ``fp8``."""

    kind: str
    """Kind of the values: ``int8``, ``int4``, ``e4m3`` or ``e2m1``."""
    method: str = ""
    """Name of the method for people; empty: the weights are quantised as they are loaded."""
    layout: str = ""
    """How the tensors are stored: ``packed`` (weight_packed), ``plain`` (weight), ``gptq``, ``awq`` or ``blocks`` (of
    stacked experts)."""
    group_inputs: int = 0
    """Inputs of an output that share a scale; 0: all."""
    block_outputs: int = 1
    """Outputs that share scales; a scale of the whole matrix counts as one of each output."""
    has_zeros: bool = False
    zeros_less_one: bool = False
    """Zero points are stored less 1."""
    act_order: bool = False
    """Inputs of a group are not neighbours: a tensor names the group of each."""
    targets: tuple[str, ...] = ()
    """Patterns of the modules that are quantised; empty: all."""
    ignored: tuple[str, ...] = ()
    """Patterns of the modules that are not."""

    def __str__(self) -> str:
        return f"{self.kind} weights" + (f" ({self.method})" if self.method else "")

    @property
    def bits(self) -> int:
        """Bits of a value."""
        return 4 if self.kind in ("int4", "e2m1") else 8

    @property
    def group_bytes(self) -> int:
        """Bytes in memory of the scale, float32, or of e2m1 its exponent, and the zero point, int8, of an output's
        group."""
        if self.kind == "e2m1":
            return 1
        return 5 if self.has_zeros else 4

    def num_groups(self, num_inputs: int) -> int:
        """Scales of an output."""
        return -(-num_inputs // self.group_inputs) if self.group_inputs else 1

    def quantises(self, module: str) -> bool:
        """Whether the matrix ``module``, such as ``model.layers.0.mlp.up_proj``, is quantised."""
        return (not self.targets or _matches(module, self.targets)) and not _matches(module, self.ignored)


def held_scheme(setting: str, stored: Scheme | None) -> Scheme | None:
    """How matrices of a checkpoint in the scheme ``stored`` are held with the setting ``quantization``; None: in the
    model's dtype."""
    match setting:
        case "auto":
            return stored
        case "int8":
            return Scheme(kind="int8")
        case "int4":
            return Scheme(kind="int4", group_inputs=INT4_GROUP_INPUTS)
        case "fp8":
            return Scheme(kind="e4m3")
    return None


def served_scheme(setting: str, stored: Scheme | None) -> Scheme | None:
    """As `held_scheme`, of what workers compute with.

    A checkpoint that is quantised is served as it is. ``none`` is refused as well: vLLM and SGLang refuse an option
    that contradicts config.json, too, and rounded weights gain nothing by taking two to four times the memory.

    Raises:
        ValueError: the setting contradicts the checkpoint.
    """
    if stored is not None and setting != "auto":
        raise ValueError(
            f"model.quantization is {setting}, and the checkpoint has {stored} (quantization_config of config.json): "
            "set model.quantization to auto, or serve the model in 16 bits that it was made from"
        )
    return held_scheme(setting, stored)


def parse_scheme(config: Mapping[str, object]) -> Scheme | None:
    """Scheme of the checkpoint whose config.json has the values ``config``; None if it is not quantised.

    Raises:
        ValueError: a method, format or option that is not known, by its key; or two objects that differ.
    """
    text = config.get("text_config")
    places = {"": config, "text_config.": text if isinstance(text, Mapping) else {}}
    schemes = {
        f"{place}{name}": _Keys(f"{place}{name}", given).scheme()
        for place, values in places.items()
        for name in ("quantization_config", "compression_config")
        if (given := values.get(name))
    }
    if len(set(schemes.values())) > 1:
        raise ValueError(f"config.json: {' and '.join(schemes)} differ; remove those that are not of these weights")
    return next(iter(schemes.values()), None)


class _Keys:
    """The object of config.json that describes the scheme."""

    def __init__(self, name: str, values: object) -> None:
        if not isinstance(values, Mapping):
            raise ValueError(f"config.json: {name} must be an object, not {values!r}; download it again")
        self._name = name
        self._values: Mapping[str, Any] = values

    def scheme(self) -> Scheme:
        methods = {
            "compressed-tensors": self._compressed_tensors,
            "gptq": self._gptq,
            "awq": self._awq,
            "fp8": self._fp8,
            "fbgemm_fp8": self._fp8,
            "mxfp4": self._mxfp4,
        }
        default = "compressed-tensors" if "config_groups" in self._values else None
        scheme = methods[self._choice("quant_method", methods, default)]()
        try:
            for patterns in (scheme.targets, scheme.ignored):
                _parsed(patterns)
        except re.error as error:
            raise ValueError(
                f"config.json: {self._name} has {error.pattern!r}, which is no regular expression ({error}): correct it"
            ) from error
        return scheme

    def _gptq(self) -> Scheme:
        bits = self._choice("bits", (4, 8))
        version = self._choice("checkpoint_format", ("gptq", "gptq_v2"), self._values.get("format", "gptq"))
        for key, only in (("lm_head", False), ("is_marlin_format", False), ("pack_dtype", "int32")):
            self._choice(key, (only,), only)
        dynamic = self._values.get("dynamic") or {}
        if others := [pattern for pattern in dynamic if not pattern.startswith("-:")]:
            raise self._refusal("dynamic", f"{others[0]!r}, another scheme of some matrices", "one scheme for all")
        blocks = self._values.get("modules_in_block_to_quantize") or ()
        return Scheme(
            method="GPTQ",
            layout="gptq",
            kind=f"int{bits}",
            group_inputs=self._group("group_size", 128),
            has_zeros=not self._values.get("sym", True),
            zeros_less_one=version == "gptq",
            act_order=bool(self._values.get("desc_act")),
            targets=tuple(name for names in blocks for name in ([names] if isinstance(names, str) else names)),
            ignored=tuple(f"re:{pattern.removeprefix('-:')}" for pattern in dynamic),
        )

    def _awq(self) -> Scheme:
        old_names = {"w_bit": "bits", "q_group_size": "group_size"}
        self._values = {old_names.get(key, key): value for key, value in self._values.items()}
        self._choice("bits", (4,))
        for key in ("version", "format", "checkpoint_format"):
            self._choice(key, ("gemm",), "gemm")
        return Scheme(
            method="AWQ",
            layout="awq",
            kind="int4",
            group_inputs=self._group("group_size", 128),
            has_zeros=True,
            ignored=self._patterns("modules_to_not_convert"),
        )

    def _fp8(self) -> Scheme:
        self._choice("fmt", ("e4m3",), "e4m3")
        scheme = Scheme(
            method="FP8",
            layout="plain",
            kind="e4m3",
            ignored=self._patterns("modules_to_not_convert") + self._patterns("ignored_layers"),
        )
        return self._in_blocks(scheme, "weight_block_size")

    def _mxfp4(self) -> Scheme:
        return Scheme(
            method="MXFP4",
            layout="blocks",
            kind="e2m1",
            group_inputs=32,
            targets=("mlp.experts",),
            ignored=self._patterns("modules_to_not_convert"),
        )

    def _compressed_tensors(self) -> Scheme:
        sparsity = self._values.get("sparsity_config") or {}
        if sparsity.get("format", "dense") != "dense":
            raise self._refusal("sparsity_config", f"format {sparsity['format']}", "all weights stored")
        if transforms := (self._values.get("transform_config") or {}).get("config_groups"):
            raise self._refusal("transform_config", f"{len(transforms)} rotations of activations", "none")
        groups = self._values.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise self._refusal("config_groups", "no groups", "one scheme for all")
        schemes = [self._config_group(group) for group in groups.values()]
        if any(replace(each, targets=()) != replace(schemes[0], targets=()) for each in schemes):
            raise self._refusal("config_groups", f"{len(groups)} schemes", "one scheme for all")
        targets = tuple(target for each in schemes for target in each.targets)
        return replace(schemes[0], targets=() if "Linear" in targets else targets, ignored=self._patterns("ignore"))

    def _config_group(self, group: Any) -> Scheme:
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise self._refusal("config_groups", "a group without weights", "a scheme for weights")
        layouts = {"pack-quantized": "packed"}
        layouts |= dict.fromkeys(("int-quantized", "float-quantized", "naive-quantized"), "plain")
        form = _Keys(self._name, {"format": group.get("format") or self._values.get("format")})
        layout = layouts[form._choice("format", layouts)]
        keys = _Keys(f"{self._name}.config_groups.weights", weights)
        kind = keys._choice("type", ("int", "float"), "int"), keys._choice("num_bits", (4, 8))
        if kind == ("float", 4):
            raise keys._refusal("num_bits", "4 of floats", "8")
        is_symmetric = bool(weights.get("symmetric", True))
        if kind[0] == "float" and not is_symmetric:
            raise keys._refusal("symmetric", "False of floats", "true")
        scheme = Scheme(
            method="compressed-tensors",
            layout=layout,
            kind="e4m3" if kind[0] == "float" else f"int{kind[1]}",
            has_zeros=not is_symmetric,
            act_order=weights.get("actorder") in (True, "group", "dynamic"),
            targets=_Keys(f"{self._name}.config_groups", group)._patterns("targets"),
        )
        default = "tensor" if weights.get("group_size") in (None, 0, -1) else "group"
        match keys._choice("strategy", ("tensor", "channel", "group", "block"), default):
            case "group":
                return replace(scheme, group_inputs=keys._group("group_size"))
            case "block":
                return keys._in_blocks(scheme, "block_structure")
        return scheme

    def _in_blocks(self, scheme: Scheme, key: str) -> Scheme:
        block = self._values.get(key)
        if block is None:
            return scheme
        match block:
            case [int(num_outputs), int(num_inputs)] if num_outputs > 0 and num_inputs in GROUP_SIZES:
                return replace(scheme, block_outputs=num_outputs, group_inputs=num_inputs)
        raise self._refusal(key, repr(block), "blocks of 32, 64 or 128 inputs, such as [128, 128]")

    def _group(self, key: str, default: int | None = None) -> int:
        """Inputs of a group; 0 for all."""
        return max(0, int(self._choice(key, (*GROUP_SIZES, -1), default)))

    def _patterns(self, key: str) -> tuple[str, ...]:
        patterns = self._values.get(key) or ()
        if not isinstance(patterns, list | tuple) or not all(isinstance(each, str) for each in patterns):
            raise self._refusal(key, repr(patterns), "a list of names")
        return tuple(patterns)

    def _choice(self, key: str, choices: Iterable[Any], default: object = None) -> Any:
        value = self._values.get(key)
        value = default if value is None else value
        for choice in choices:
            if choice == (value.lower() if isinstance(value, str) else value):
                return choice
        raise self._refusal(key, repr(value), " or ".join(map(str, choices)))

    def _refusal(self, key: str, found: str, served: str) -> ValueError:
        return ValueError(
            f"config.json: {self._name}.{key} is {found}, which is not served; serve a checkpoint with {served}, "
            "or one in 16 bits"
        )


@cache  # Some checkpoints have thousands of modules and hundreds of patterns, and are asked several times.
def _matches(module: str, patterns: tuple[str, ...]) -> bool:
    """Whether a pattern names ``module`` or a part of its path, with any characters for ``*``, or matches its beginning
    after ``re:``."""
    paths, expressions = _parsed(patterns)
    names = _spellings(module)
    text = f".{'. .'.join(names)}."
    if any(map(text.__contains__, paths)):
        return True
    return any(each.match(name) for each in expressions for name in names)


@cache
def _parsed(patterns: tuple[str, ...]) -> tuple[list[str], list[re.Pattern[str]]]:
    """Paths, with the dots around them, and expressions."""
    paths, expressions = [], []
    for each in patterns:
        if each.startswith("re:"):
            expressions.append(re.compile(each[3:]))
        elif "*" in each:
            part = re.escape(each.strip(".")).replace(r"\*", ".*")
            expressions.append(re.compile(rf"(.*\.)?{part}(\..*)?$"))
        else:
            paths.append(f".{each.strip('.')}.")
    return paths, expressions


def _spellings(module: str) -> list[str]:
    """Names of a module in text-only and in multimodal checkpoints, and in those of Mixtral."""
    names = [new + module.removeprefix(old) for old, new in _PREFIXES if module.startswith(old)]
    if (of_mixtral := mixtral_name(module)) != module:
        names.append(of_mixtral)
    return names
