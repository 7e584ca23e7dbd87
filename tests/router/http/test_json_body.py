"""Bodies are bounded in structure before anything is built."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.bench.edge import large_bodies
from pdserve.router.http import json_body
from pdserve.router.http.errors import ApiError
from pdserve.router.http.json_body import Structure, read_body
from pdserve.router.http.responses import ResponsesBody
from pdserve.router.http.schema import Body, ChatBody, CompletionBody, TokenizeBody

MODELS: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/tokenize": TokenizeBody,
}
KINDS = large_bodies()
TEXTS = {"a long text", "an escaped text", "a text to tokenize"}


def read(data: bytes, model: type[Body]) -> Body:
    count(data, 2**18)
    body = read_body(data, model)
    assert isinstance(body, Body)
    return body


def count(data: bytes, piece_bytes: int) -> None:
    structure = Structure()
    for start in range(0, len(data), piece_bytes):
        structure.add(data[start : start + piece_bytes])


@pytest.mark.parametrize("kind", KINDS)
def test_large_bodies_of_many_parts_are_refused_unread(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, body = KINDS[kind]
    if kind in TEXTS:
        assert read(body, MODELS[path])
        return
    if kind != "no JSON at the end":
        monkeypatch.setattr(json_body, "_decode", None)
    with pytest.raises(ApiError) as raised:
        read(body, MODELS[path])
    assert raised.value.status_code == 400


def counts(value: object) -> tuple[int, int, int]:
    """Strings, containers, and values inside containers."""
    inner: list[Any] = []
    if isinstance(value, dict):
        inner = [*value.values()]
    elif isinstance(value, list):
        inner = value
    below = [counts(each) for each in inner]
    num_strings = isinstance(value, str) + (len(value) if isinstance(value, dict) else 0)
    return (
        num_strings + sum(each[0] for each in below),
        isinstance(value, dict | list) + sum(each[1] for each in below),
        max(len(inner) - 1, 0) + sum(each[2] for each in below),
    )


TEXT = st.text(st.sampled_from('ab"\\{}[],:\n\u00e9'), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
)


@given(JSON, st.booleans(), st.integers(1, 20))
def test_what_is_counted_is_what_would_be_built(value: object, ensure_ascii: bool, piece_bytes: int) -> None:
    data = json.dumps({"x": value}, ensure_ascii=ensure_ascii).encode()
    num_strings, num_containers, num_others = counts({"x": value})
    limits = {"MAX_STRINGS": num_strings, "MAX_CONTAINERS": num_containers, "MAX_VALUES": num_others + 1}
    with pytest.MonkeyPatch.context() as patch:
        for name, number in limits.items():
            patch.setattr(json_body, name, number)
        count(data, piece_bytes)
        for name, number in limits.items():
            patch.setattr(json_body, name, number - 1)
            with pytest.raises(ApiError):
                count(data, piece_bytes)
            patch.setattr(json_body, name, number)
