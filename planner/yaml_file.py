"""Reads YAML as plain values with the line of every key: the only reader of files that users write.

Unlike in YAML 1.1, numbers such as 24e9 and 1e-2 are numbers and dates are text. Rejects duplicate keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from pdserve.contracts.errors import ConfigError


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own
        first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("+-.0123456789")
)


@dataclass(frozen=True, slots=True)
class YamlFile:
    path: Path
    value: object
    """Plain values; ``None`` if the file is empty."""
    lines: Mapping[str, int]
    """Line of each key, by its dotted path."""

    def error(self, error: ConfigError) -> ConfigError:
        """``error`` with the file, and with the line if a key is at fault."""
        key = re.split(r"\[\d", error.key)[0]
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        place = f"{self.path}:{self.lines[key]}" if key else str(self.path)
        return ConfigError(f"{place}: {error}", error.key)


def read_yaml(path: Path) -> YamlFile:
    """Raises ConfigError if the file cannot be read, is not YAML, or repeats a key."""
    lines: dict[str, int] = {}
    try:
        text = path.read_text(encoding="utf-8")
        loader = _Loader(text.replace("\t", " ") if text.lstrip().startswith("{") else text)  # JSON may have tabs
        node = loader.get_single_node()
        if node is not None:
            _index(node, "", lines, set())
        return YamlFile(path, None if node is None else loader.construct_document(node), lines)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text in UTF-8; save it as UTF-8") from error
    except (yaml.YAMLError, ValueError) as error:  # PyYAML passes on what int() and the like raise
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply; expected sections with keys") from None


def parse_value(text: str) -> object:
    """Value of YAML on one line, such as an option's; an object is in braces, so that ``::`` is text.

    Raises:
        ConfigError: it is not YAML.
    """
    try:
        value: object = yaml.load(text, _Loader)
        return text if isinstance(value, dict) and not text.lstrip().startswith("{") else value
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{text!r} is not valid YAML: {' '.join(str(error).split())}") from error


def _index(node: yaml.Node, key: str, lines: dict[str, int], seen: set[int]) -> None:
    """Record the lines of all keys below ``node``."""
    if id(node) in seen:
        return  # an alias
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _index(item, key, lines, seen)
    elif isinstance(node, yaml.MappingNode):
        names = set()
        for key_node, value in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(None, None, "a key is not text; write a name", key_node.start_mark)
            if key_node.value in names:
                problem = f"key {key_node.value!r} is written twice; keep one of them"
                raise yaml.MarkedYAMLError(None, None, problem, key_node.start_mark)
            names.add(key_node.value)
            below = f"{key}.{key_node.value}" if key else key_node.value
            lines.setdefault(below, key_node.start_mark.line + 1)
            _index(value, below, lines, seen)
