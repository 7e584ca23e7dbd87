"""Values of options, as YAML on one line."""

from __future__ import annotations

import pytest

from pdserve.planner.yaml_file import parse_value


@pytest.mark.parametrize(
    ("text", "value"),
    [("::", "::"), ("::1", "::1"), ("a: b", "a: b"), ("{a: b}", {"a": "b"}), ("[1, 2]", [1, 2]), ("0.5", 0.5)],
)
def test_a_value_is_an_object_in_braces_alone(text: str, value: object) -> None:
    assert parse_value(text) == value
