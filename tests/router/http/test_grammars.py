"""Requests for JSON, texts of a choice, of a regular expression or of a grammar."""

from __future__ import annotations

import json
import random
import re
from copy import deepcopy
from typing import Any

import jsonschema
import numpy as np
import pytest
import xgrammar

from pdserve.contracts.request import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from pdserve.router.http import json_schema as json_schema_module
from pdserve.router.http.errors import ApiError
from pdserve.router.http.grammars import ANY_OBJECT, after_reasoning, grammar_of
from pdserve.router.http.json_schema import SchemaError, check_json_schema, enforceable
from pdserve.router.http.schema import ChatBody
from tests.vocabulary import LIMITS, compiled, demo_tokenizer

ODD: list[Any] = [None, True, 3, "x", [], {}, ["a"], {"a": 1}, [{}], {"type": "string"}]
KEYWORDS = [
    "$defs", "$ref", "additionalProperties", "allOf", "anyOf", "const", "enum", "format", "if", "items", "maxLength",
    "minimum", "multipleOf", "not", "oneOf", "pattern", "patternProperties", "prefixItems", "properties",
    "propertyNames", "required", "type", "uniqueItems",
]  # fmt: skip
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
DEEP: dict[str, list[Any]] = {"enum": [[]]}
for _ in range(2000):
    DEEP["enum"] = [DEEP["enum"]]
CITY_TEXT = json.dumps(CITY, separators=(",", ":"))


def chat(**fields: object) -> ChatBody:
    return ChatBody.model_validate({"messages": [{"role": "user", "content": "hi"}], **fields})


def json_schema(schema: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar(GrammarKind.JSON_SCHEMA, ANY_OBJECT)),
        ({"response_format": json_schema(CITY)}, Grammar(GrammarKind.JSON_SCHEMA, CITY_TEXT)),
        ({"structured_outputs": {"json": CITY}}, Grammar(GrammarKind.JSON_SCHEMA, CITY_TEXT)),
        ({"structured_outputs": {"json": json.dumps(CITY)}}, Grammar(GrammarKind.JSON_SCHEMA, CITY_TEXT)),
        ({"structured_outputs": {"json_object": True}}, Grammar(GrammarKind.JSON_SCHEMA, ANY_OBJECT)),
        ({"structured_outputs": {"regex": "a+", "json": None}}, Grammar(GrammarKind.REGEX, "a+")),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Grammar(GrammarKind.EBNF, 'root ::= "a"')),
        ({"structured_outputs": {"choice": ['"a"\n', "é"]}}, Grammar(GrammarKind.EBNF, r'root ::= "\"a\"\n" | "é"')),
    ],
)
def test_a_request_has_the_grammar_that_it_names(fields: dict[str, object], grammar: Grammar | None) -> None:
    assert grammar_of(chat(**fields)) == grammar


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "text, json_object and json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema to be"),
        ({"response_format": json_schema([])}, "response_format.json_schema.schema", "should be a schema"),
        ({"response_format": json_schema({"not": CITY})}, "response_format.json_schema.schema", "# has not"),
        (
            {"response_format": json_schema(DEEP)},
            "response_format.json_schema.schema",
            "nested too deeply",
        ),
        ({"structured_outputs": {"regex": "a", "json": CITY}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"lark": "a"}}, "structured_outputs", "'lark'; supported are"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "is not JSON"),
        ({"structured_outputs": {"json": "[" * 100_000}}, "structured_outputs.json", "is not JSON"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex", "should be a text"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice", "list of texts"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "list of texts"),
        ({"structured_outputs": {"json": '{"const": "\\ud800"}'}}, "structured_outputs.json", "is not JSON"),
        ({"structured_outputs": {"regex": "\ud800"}}, "structured_outputs", "surrogate"),
        ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs", f"{MAX_GRAMMAR_BYTES} are supported"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "contradicts response_format",
        ),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "contradicts structured_outputs"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(fields: dict[str, object], param: str, message: str) -> None:
    with pytest.raises(ApiError, match=re.escape(message)) as caught:
        grammar_of(chat(**fields))
    assert (caught.value.status_code, caught.value.param) == (400, param)


@pytest.mark.parametrize("choice", ['a"b\\c', "new\nline\ttab", "é😀", "\x01x", "[0-9]", "#no comment"])
def test_a_choice_is_its_text(choice: str) -> None:
    grammar = grammar_of(chat(structured_outputs={"choice": [choice, "other"]}))
    assert grammar is not None
    matcher = xgrammar.GrammarMatcher(compiled(grammar), terminate_without_stop_token=True)
    assert matcher.accept_string(choice)
    assert matcher.is_terminated()


def takes(grammar: Grammar, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(compiled(grammar), terminate_without_stop_token=True)
    return bool(matcher.accept_string(text) and matcher.is_terminated())


@pytest.mark.parametrize(
    ("wanted", "answer"),
    [
        ({"response_format": json_schema(CITY)}, '{"city": "Oslo"}'),
        ({"response_format": json_schema({"type": "string", "maxLength": 4})}, '"Oslo"'),
        ({"structured_outputs": {"regex": "[0-9]+"}}, "42"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "no"),
    ],
)
def test_a_structure_begins_after_the_reasoning(wanted: dict[str, object], answer: str) -> None:
    grammar = grammar_of(chat(**wanted))
    assert grammar is not None
    may_reason, reasons = (after_reasoning(grammar, is_open=is_open) for is_open in (False, True))
    thought = "hm, <b> {not} it\n</think>\n\n"
    for text in (answer, f"<think>{thought}{answer}", f"<think></think>{answer}"):
        assert takes(may_reason, text), text
    assert takes(reasons, thought + answer)
    for text in (thought, f"<think>{answer}", f"hm {answer}", f"<think>{thought}x"):
        assert not takes(may_reason, text), text
    assert not takes(reasons, answer)


# Schemas


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (3, "# should be a schema"),
        ({"type": "strin"}, "#/type should be one of string"),
        ({"type": []}, "#/type should be one of string"),
        ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, "#/items has uniqueItems"),
        ({"anyOf": [{"type": "integer"}, {"if": {}, "then": {}}]}, "#/anyOf/1 has if"),
        ({"properties": {"a": {"contains": {}}}}, "#/properties/a has contains"),
        ({"$defs": {"a": {"not": {}}}, "$ref": "#/$defs/a"}, "#/$defs/a has not"),
        ({"additionalProperties": {"dependentRequired": {}}}, "#/additionalProperties has dependentRequired"),
        ({"minimum": 3}, "# has minimum and no type; add the type"),
        ({"type": "number", "multipleOf": 0.5}, "multipleOf, which is supported for the type integer only"),
        ({"type": "string", "enum": ["a", 1]}, "the value '1', which is not of its type"),
        ({"type": "integer", "const": True}, "the value 'True'"),
        ({"anyOf": [{"type": "integer"}], "type": "integer"}, "# has type beside anyOf"),
        ({"allOf": [{"type": "integer"}, {}]}, "#/allOf has several schemas"),
        ({"$ref": "http://example.com/a.json"}, "#/$ref should refer to a part of this schema"),
        ({"type": "string", "enum": ["a"], "minLength": 3}, "# has minLength beside enum"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "# has maxLength, pattern together"),
        ({"properties": {}, "patternProperties": {}}, "patternProperties beside properties"),
        ({"type": "object", "required": ["a"]}, "#/required has 'a', which is not among the properties"),
        ({"type": "object", "required": [["a"]]}, "#/required has \"['a']\", which is not among the properties"),
        ({"type": "object", "required": "a"}, "#/required should be a list"),
        ({"properties": []}, "#/properties should be an object"),
    ],
)
def test_a_schema_that_would_not_be_enforced_is_refused(schema: object, message: str) -> None:
    with pytest.raises(SchemaError, match=re.escape(message)):
        check_json_schema(schema)
    check_json_schema(enforceable(schema))


def test_a_deep_schema_is_refused() -> None:
    schema: dict[str, object] = {}
    for _ in range(1000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(SchemaError, match="nested more than 64 schemas deep"):
        check_json_schema(schema)
    check_json_schema(enforceable(schema))


@pytest.mark.parametrize(
    ("schema", "rest"),
    [
        ({"type": "string", "pattern": "a", "format": "date", "maxLength": 3}, {"type": "string", "pattern": "a"}),
        ({"type": "string", "format": "date", "maxLength": 3}, {"type": "string", "format": "date"}),
        ({"type": "array", "items": {"not": {}}, "uniqueItems": True}, {"type": "array", "items": {}}),
        ({"type": ["string", "null"], "anyOf": [{"if": {}}, {"minimum": 3}]}, {"anyOf": [{}, {}]}),
        ({"type": "object", "properties": {"a": {"contains": 1}}, "anyOf": [{"required": ["a"]}]},
         {"type": "object", "properties": {"a": {}}}),
        ({"enum": ["a", None], "type": "string", "minLength": 1}, {"enum": ["a", None]}),
        ({"propertyNames": {"pattern": "a"}}, {"propertyNames": {"type": "string", "pattern": "a"}}),
        ({"$ref": "#/$defs/a", "nullable": True, "$defs": {"a": [3]}}, {"$ref": "#/$defs/a", "$defs": {"a": True}}),
    ],
)  # fmt: skip
def test_what_is_left_of_a_schema_is_enforced(schema: object, rest: object) -> None:
    assert enforceable(schema) == rest


def test_what_is_left_of_any_schema_can_be_enforced() -> None:
    rng = random.Random(7)
    odd: list[Any] = [*ODD, *({name: value} for name in ("not", "if", "minimum", "$ref", "enum") for value in ODD)]
    for _ in range(300):
        schema = a_schema(rng)
        for _ in range(rng.randrange(1, 4)):
            at = schema
            while inner := [value for value in at.values() if isinstance(value, dict) and value]:
                if rng.random() < 0.4:
                    break
                at = rng.choice(inner)
            at[rng.choice(KEYWORDS)] = deepcopy(rng.choice(odd))
        check_json_schema(enforceable(schema))


def a_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A random schema of those that are supported."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format"]
    if depth < 3:
        kinds += 2 * ["object", "array", "tuple", "anyOf", "map"]
    low = rng.randrange(-20, 20)
    match kind := rng.choice(kinds):
        case "string":
            return {"type": kind, "minLength": (least := rng.randrange(4)), "maxLength": least + rng.randrange(9)}
        case "integer":
            return {"type": kind, "minimum": low, "exclusiveMaximum": low + rng.randrange(1, 300)}
        case "number":
            return {"type": kind, "minimum": low, "maximum": low + rng.randrange(300)}
        case "enum":
            return {"enum": rng.sample(["a", "b c", 'd"', 1, 2.5, None, True, [1, "x"], {"k": "v"}], 3)}
        case "const":
            return {"const": rng.choice(["é\n", -7, {"a": [1, {"b": None}]}])}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(["^[a-f]{2,4}$", "^(ab|c)+[0-9]$", "^x?y*z$"])}
        case "format":
            return {"type": "string", "format": rng.choice(["date", "time", "ipv4", "uuid", "email", "bogus"])}
        case "object":
            properties = {
                f"{rng.choice('kß')}{index}": a_schema(rng, depth + 1) for index in range(rng.randrange(1, 5))
            }
            required = rng.sample(sorted(properties), rng.randrange(len(properties) + 1))
            return {
                "type": kind,
                "properties": properties,
                "required": required,
                "additionalProperties": rng.random() < 0.3,
            }
        case "array":
            least = rng.randrange(3)
            return {"type": kind, "items": a_schema(rng, depth + 1), "minItems": least, "maxItems": least + 2}
        case "tuple":
            items = [a_schema(rng, depth + 1) for _ in range(2)]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}
        case "anyOf":
            name = rng.choice(["anyOf", "allOf"])
            return {name: [a_schema(rng, depth + 1) for _ in range(1 if name == "allOf" else 2)]}
        case "map":
            names = {"propertyNames": {"pattern": "^[a-z]{1,3}$"}} if rng.random() < 0.5 else {}
            return {"type": "object", "additionalProperties": a_schema(rng, depth + 1), **names}
        case _:
            return {"type": kind}


def a_regex(rng: random.Random, depth: int = 0) -> str:
    def inner() -> str:
        return a_regex(rng, depth + 1)

    if depth == 3 or rng.random() < 0.2:
        return rng.choice(["a", "[a-z]", r"\d", "é", r"\.", "[!-~]", r"\w", "x{2,3}"])
    return rng.choice(
        [f"{inner()}{inner()}", f"({inner()}|{inner()})", f"({inner()})?", f"({inner()}){{1,3}}", f"(?:{inner()})+"]
    )


def a_text(grammar: Grammar, rng: random.Random, max_tokens: int = 400) -> str | None:
    """A random text of tokens that follow a grammar; ``None`` if it does not end."""
    matcher = xgrammar.GrammarMatcher(compiled(grammar))
    mask = np.zeros((1, -(-LIMITS.vocab_size // 32)), np.int32)
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        matcher.fill_next_token_bitmask(mask)
        choices = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: LIMITS.vocab_size])
        token = int(rng.choice(choices))
        ends = set(choices.tolist()) & set(LIMITS.eos_token_ids)
        if token in ends or (ends and len(tokens) > 20):
            text: str = demo_tokenizer().decode(tokens)
            return text
        assert matcher.accept_token(token)
        tokens.append(token)
    return None


def test_answers_follow_their_schema_by_an_independent_validator() -> None:
    rng = random.Random(5)
    num_complete = 0
    for _ in range(200):
        schema = a_schema(rng)
        grammar = grammar_of(chat(response_format=json_schema(schema)))
        assert grammar is not None
        text = a_text(grammar, rng)
        if text is not None:
            jsonschema.validate(json.loads(text), schema)
            num_complete += 1
    assert num_complete >= 150


def test_answers_match_their_regular_expression() -> None:
    rng = random.Random(5)
    num_complete = 0
    for _ in range(50):
        regex = a_regex(rng)
        text = a_text(Grammar(GrammarKind.REGEX, regex), rng)
        if text is not None:
            assert re.fullmatch(regex, text), (regex, text)
            num_complete += 1
    assert num_complete >= 45


def test_a_type_that_is_named_often_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, has_type = list[str](), json_schema_module._has_type

    def look(value: object, name: str) -> bool:
        looks.append(name)
        return has_type(value, name)

    monkeypatch.setattr(json_schema_module, "_has_type", look)
    check_json_schema({"type": ["integer"] * 100 + ["string"], "enum": ["a"] * 10})
    assert len(looks) == 20
