"""Reads and writes a file of devices: a user's own hardware, or what `pdserve profile` has measured.

    devices:
      my-l40s:                      # any name; one of the catalogue's changes that device
        base: l40s                  # the figures that are not given here; a device of the catalogue or one above
        price_per_hour_usd: 1.2
        link_bandwidth: 28e9
      this-machine:
        base: cpu
        num_cores: 4                # with base cpu only
        peak_flops: {float32: 4.1e11, bfloat16: 4.1e11}
        compute_efficiency: [[1, 0.2], [64, 0.7], [512, 0.9]]      # [tokens, share], or one number
        decode_attention_efficiency: 0.6
        layer_overhead_s: 4.0e-5
        measured: {date: 2026-11-21, model: tiny float32, step_tokens: [1, 2048], batch_size: [1, 64],
                   context_tokens: [0, 4096], errors: {prefill: 0.04, decode: 0.06}}
        sources: {compute_efficiency: pdserve profile}

The keys are the fields of `pdserve.model.hardware.Hardware`, where their units stand, and ``base`` and ``num_cores``.
Without a base every field that has no default must be given. A figure without a source has the file's name for one.

Read by the command line and the search; what it gives goes to `pdserve.model.hardware.hardware` as ``added``.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn

import yaml

from pdserve.model.curve import Curve
from pdserve.model.hardware import Hardware, Measured, hardware
from pdserve.model.hardware_catalogue import ALIASES


class HardwareFileError(ValueError):
    """One line that names the file, the line, the key and the remedy."""


def read_hardware_file(path: Path) -> dict[str, Hardware]:
    """The devices of the file at ``path``, by name in small letters; an alias counts as what it stands for.

    Raises:
        HardwareFileError: the file cannot be read, or says something that makes no device.
    """
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise HardwareFileError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        raise HardwareFileError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError:
        raise HardwareFileError(f"{path} is nested too deeply; it has devices with keys in them") from None
    if root is None:
        raise HardwareFileError(f"{path} is empty; write devices: and a device below it")
    devices: dict[str, Hardware] = {}
    for key, section in _Place(path, "", root).items():
        if key != "devices":
            section.fail(f"unknown key; the file has one key, devices{_suggest(key, ['devices'])}")
        for name, place in section.items():
            known_as = ALIASES.get(name.lower(), name.lower())
            if known_as in devices:
                place.fail(f"a device of the name {known_as} stands above; give each one name")
            devices[known_as] = _read_device(known_as, place, devices)
    return devices


def write_hardware_file(path: Path, devices: Iterable[Hardware]) -> None:
    """Write ``devices`` so that `read_hardware_file` gives the same again."""
    document = {"devices": {device.name: _plain(device) for device in devices}}
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120)
    path.write_text(
        f"# Devices that pdserve knows beside its catalogue. Units are in docstrings of Hardware.\n{text}", "utf-8"
    )


def _plain(device: Hardware) -> dict[str, object]:
    """The fields of a device as YAML writes them."""
    fields: dict[str, object] = {}
    for field in dataclasses.fields(Hardware):
        value = getattr(device, field.name)
        if isinstance(value, Curve):
            fields[field.name] = [list(point) for point in value.points]
        elif isinstance(value, Measured):
            ranges = {name: list(limits) for name, limits in dataclasses.asdict(value).items() if name in _RANGES}
            fields[field.name] = {**dataclasses.asdict(value), **ranges}
        elif field.name != "name" and value is not None:
            fields[field.name] = dict(value) if isinstance(value, Mapping) else value
    return fields


class _Place:
    """A node of the file, and where it stands."""

    def __init__(self, path: Path, key: str, node: yaml.Node) -> None:
        self.path = path
        self.key = key
        """Names from the top of the file, with dots."""
        self._node = node

    def fail(self, text: str) -> NoReturn:
        line = self._node.start_mark.line + 1
        raise HardwareFileError(f"{self.path}:{line}: {self.key + ': ' if self.key else ''}{text}")

    def items(self) -> Iterator[tuple[str, _Place]]:
        """Keys and what is below them."""
        if not isinstance(self._node, yaml.MappingNode):
            self.fail(f"{self._shown()} is no mapping; write keys and values below it")
        seen = set()
        for key_node, node in self._node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                _Place(self.path, self.key, key_node).fail("a key is no text; write a name")
            key = key_node.value
            if key in seen:
                _Place(self.path, self.key, key_node).fail(f"{key} is written twice; keep one of them")
            seen.add(key)
            yield key, _Place(self.path, f"{self.key}.{key}" if self.key else key, node)

    def elements(self) -> list[_Place]:
        """What a list holds; fails where there is none."""
        if not isinstance(self._node, yaml.SequenceNode):
            self.fail(f"{self._shown()} is no list; write one in brackets")
        return [_Place(self.path, self.key, node) for node in self._node.value]

    def is_list(self) -> bool:
        return isinstance(self._node, yaml.SequenceNode)

    def is_null(self) -> bool:
        return isinstance(self._node, yaml.ScalarNode) and self._node.tag == "tag:yaml.org,2002:null"

    def text(self) -> str:
        if not isinstance(self._node, yaml.ScalarNode):
            self.fail(f"{self._shown()} is no text; write one word or line")
        return str(self._node.value)

    def number(self) -> float:
        # YAML takes 24e9, without a sign in its exponent, for text.
        try:
            number = float(self._node.value) if isinstance(self._node, yaml.ScalarNode) else float("nan")
        except ValueError:
            number = float("nan")
        if not isfinite(number):
            self.fail(f"{self._shown()} is no number; write one, such as 0.8 or 24e9")
        return number

    def count(self) -> int:
        number = self.number()
        if number < 0 or number != int(number):
            self.fail(f"{self._shown()} is no count; write a whole number")
        return int(number)

    def _shown(self) -> str:
        return repr(self._node.value) if isinstance(self._node, yaml.ScalarNode) else "this"


def _read_device(name: str, place: _Place, above: Mapping[str, Hardware]) -> Hardware:
    given = dict(place.items())
    for key, below in given.items():
        if key not in _KEYS:
            below.fail(f"unknown key{_suggest(key, _KEYS)}")
    base = _read_base(name, given, above)
    figures: dict[str, Any] = {key: _READERS[key](below) for key, below in given.items() if key in _READERS}
    sources = dict.fromkeys((key for key in figures if key not in ("sources", "measured")), place.path.name)
    sources |= figures.pop("sources", {})
    if base is not None:
        return dataclasses.replace(base, name=name, **figures, sources={**base.sources, **sources})
    missing = [key for key in _REQUIRED if key not in figures]
    if missing:
        place.fail(f"{', '.join(missing)} are missing; give them, or a base such as base: h100")
    return Hardware(name=name, sources=sources, **figures)


def _read_base(name: str, given: Mapping[str, _Place], above: Mapping[str, Hardware]) -> Hardware | None:
    """What a device's other figures come from: its base, or the device of the catalogue that it changes."""
    base_name = given["base"].text() if "base" in given else name
    num_cores = given["num_cores"].count() if "num_cores" in given else 1
    if "num_cores" in given and (base_name.lower() != "cpu" or num_cores < 1):
        given["num_cores"].fail("it is a number of cores, at least 1, of base: cpu; leave it out for other devices")
    try:
        return hardware(base_name, num_cores=num_cores, added=above)
    except ValueError as error:
        if "base" in given:
            given["base"].fail(str(error))
        return None


def _positive(place: _Place) -> float:
    number = place.number()
    if number <= 0:
        place.fail(f"{number:g} is not above 0; write a positive number")
    return number


def _positive_count(place: _Place) -> int:
    count = place.count()
    if count == 0:
        place.fail("0 is not above 0; write a positive number")
    return count


def _depth(place: _Place) -> int:
    count = place.count()
    if count not in (1, 2):
        place.fail(f"{count} is no pipeline depth; write 1 or 2")
    return count


def _not_negative(place: _Place) -> float:
    number = place.number()
    if number < 0:
        place.fail(f"{number:g} is below 0; write 0 or more")
    return number


def _share(place: _Place) -> float:
    number = place.number()
    if not 0 < number <= 1:
        place.fail(f"{number:g} is no share; write a number above 0 and up to 1")
    return number


def _curve(place: _Place) -> Curve:
    if not place.is_list():
        return Curve.constant(_share(place))
    points = []
    for point in place.elements():
        pair = point.elements() if point.is_list() else []
        if len(pair) != 2:
            point.fail("a point is [tokens, share]; write, for example, [[1, 0.2], [512, 0.8]]")
        points.append((pair[0].count(), pair[1].number()))
    try:
        return Curve(tuple(points))
    except ValueError as error:
        place.fail(str(error))


def _rates(place: _Place) -> dict[str, float]:
    return {dtype: _positive(below) for dtype, below in place.items()}


def _texts(place: _Place) -> dict[str, str]:
    sources = {}
    for key, below in place.items():
        if key not in _FIELDS:
            below.fail(f"unknown key{_suggest(key, _FIELDS)}")
        sources[key] = below.text()
    return sources


def _range(place: _Place) -> tuple[int, int]:
    ends = [element.count() for element in place.elements()]
    if len(ends) != 2 or ends[0] > ends[1]:
        place.fail("it is a range; write the fewest and the most, as in [1, 512]")
    return ends[0], ends[1]


_RANGES = ("step_tokens", "batch_size", "context_tokens")


def _measured(place: _Place) -> Measured | None:
    if place.is_null():
        return None
    given = dict(place.items())
    keys = [field.name for field in dataclasses.fields(Measured)]
    for key, below in given.items():
        if key not in keys:
            below.fail(f"unknown key{_suggest(key, keys)}")
    missing = [key for key in ("date", "model", *_RANGES) if key not in given]
    if missing:
        place.fail(f"{', '.join(missing)} are missing; give them, or leave measured out")
    errors = {kind: _not_negative(below) for kind, below in given["errors"].items()} if "errors" in given else {}
    ranges = {key: _range(given[key]) for key in _RANGES}
    return Measured(date=given["date"].text(), model=given["model"].text(), errors=errors, **ranges)


def _price(place: _Place) -> float | None:
    return None if place.is_null() else _positive(place)


_READERS: dict[str, Callable[[_Place], Any]] = {
    "peak_flops": _rates,
    "compute_efficiency": _curve,
    "prefill_attention_efficiency": _curve,
    "memory_bytes": _positive_count,
    "memory_reserve_bytes": _Place.count,
    "memory_bandwidth": _positive,
    "memory_efficiency": _share,
    "decode_attention_efficiency": _share,
    "link_bandwidth": _positive,
    "link_latency_s": _not_negative,
    "link_efficiency": _share,
    "network_bandwidth": _positive,
    "network_latency_s": _not_negative,
    "host_bandwidth": _positive,
    "devices_per_host": _positive_count,
    "step_overhead_s": _not_negative,
    "layer_overhead_s": _not_negative,
    "row_overhead_s": _not_negative,
    "pipeline_depth": _depth,
    "price_per_hour_usd": _price,
    "measured": _measured,
    "sources": _texts,
}
_FIELDS = [field.name for field in dataclasses.fields(Hardware) if field.name not in ("name", "sources", "measured")]
_KEYS = ["base", "num_cores", *_READERS]
_REQUIRED = [
    field.name
    for field in dataclasses.fields(Hardware)
    if field.name in _FIELDS and field.default is dataclasses.MISSING
]


def _suggest(key: str, valid: list[str]) -> str:
    nearest = difflib.get_close_matches(key, valid, n=1, cutoff=0.0)
    return f"; did you mean {nearest[0]}? (valid: {', '.join(valid)})"
