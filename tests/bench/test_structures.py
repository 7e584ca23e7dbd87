from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter

import httpx
import jsonschema
import pytest

from pdserve.bench.structures import bombs, random_regex, random_schema, validate


def validated(kind: str, structure: object, *answers: tuple[str, str], status: int = 200) -> tuple[Counter[str], int]:
    """What is counted of a server's answers, each with its finish reason, and how many are wrong."""
    choices = [{"finish_reason": reason, "message": {"content": text}} for reason, text in answers]
    server = httpx.MockTransport(lambda request: httpx.Response(status, json={"choices": choices}))

    async def ask() -> tuple[Counter[str], list[str]]:
        async with httpx.AsyncClient(base_url="http://server", transport=server) as client:
            return await validate(client, kind, structure, temperature=0)

    seen, wrong = asyncio.run(ask())
    return seen, len(wrong)


def test_random_structures_are_ones() -> None:
    rng = random.Random(0)
    schemas = [random_schema(rng) for _ in range(200)]
    for schema in schemas:
        jsonschema.Draft202012Validator.check_schema(schema)
    words = json.dumps(schemas)
    assert all(f'"{word}"' in words for word in ("$ref", "anyOf", "pattern", "format", "enum", "items", "const"))
    assert len({re.compile(random_regex(rng)).pattern for _ in range(50)}) > 40


@pytest.mark.parametrize(
    ("answers", "counts", "num_wrong"),
    [
        ([("stop", '{"a": 1}'), ("stop", '{"a": 2}')], {"schemas complete": 2}, 0),
        ([("stop", '{"a": "1"}'), ("stop", '{"a": 1')], {"schemas complete": 2}, 2),
        ([("length", '{"a": '), ("stop", '{"a": 1}')], {"schemas cut": 1, "schemas complete": 1}, 0),
    ],
)
def test_complete_answers_that_break_their_schema_are_wrong(
    answers: list[tuple[str, str]], counts: dict[str, int], num_wrong: int
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert validated("schemas", schema, *answers) == (Counter(counts), num_wrong)


def test_an_answer_matches_its_whole_regular_expression() -> None:
    assert validated("regexes", "[ab]+", ("stop", "abba"), ("stop", "abc")) == (Counter({"regexes complete": 2}), 1)


def test_a_structure_that_is_refused_is_wrong() -> None:
    assert validated("regexes", "a", status=400) == (Counter({"regexes refused": 1}), 1)


def test_grammars_that_are_hard_can_be_sent() -> None:
    kinds = bombs()
    assert len(kinds) == 20
    assert all(len(json.dumps(fields)) < 8 * 2**20 for fields in kinds.values())
    assert {name for fields in kinds.values() for name in fields} == {"response_format", "structured_outputs"}
