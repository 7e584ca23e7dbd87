"""Grammar of a request: ``response_format`` (OpenAI) or ``structured_outputs`` (vLLM).

Checks shape and size here; workers compile, and refuse what xgrammar cannot express.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import msgspec

from pdserve.contracts.request import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from pdserve.router.http.errors import MAX_NAME_CHARS, refusal
from pdserve.router.http.json_schema import SchemaError, check_json_schema, enforceable
from pdserve.router.http.schema import GenerationBody
from pdserve.router.text.harmony import Harmony
from pdserve.router.text.reasoning import CLOSING, OPENING

ANY_OBJECT = '{"type": "object", "additionalProperties": true}'
"""Schema of JSON mode: any object."""


def grammar_of(body: GenerationBody) -> Grammar | None:
    """Grammar that the body requests, if any.

    Raises:
        ApiError: the fields contradict each other, or one cannot be enforced.
    """
    grammar, field = None, "response_format"
    if body.response_format is not None:
        grammar = _of_response_format(body.response_format)
    if body.structured_outputs is not None:
        if grammar is not None:
            raise refusal("structured_outputs", "contradicts response_format; send one of them")
        grammar, field = _of_structured_outputs(body.structured_outputs), "structured_outputs"
    if grammar is None:
        return None
    if body.ignore_eos:
        raise refusal("ignore_eos", f"contradicts {field}, whose answer ends when it is complete; leave it out")
    try:
        num_bytes = len(grammar.text.encode())
    except UnicodeEncodeError as error:
        raise refusal(field, "has half a surrogate pair, which is not a character") from error
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise refusal(field, f"has {num_bytes} bytes; {MAX_GRAMMAR_BYTES} are supported; simplify it")
    return grammar


def after_reasoning(grammar: Grammar, *, is_open: bool) -> Grammar:
    """Grammar of an answer that may reason first.

    Args:
        is_open: the reasoning has begun in the prompt, so the answer begins inside it.
    """
    opening, closing = ({"type": "const_string", "value": tag} for tag in (OPENING, CLOSING))
    # No tag of this text and its end: one that begins with nothing compiles to nothing beside bounded strings.
    thought = {"type": "any_text", "excludes": [CLOSING]}
    space = {"type": "regex", "pattern": r"\n{0,2}"}
    begins = {"type": "sequence", "elements": [*([] if is_open else [opening]), thought, closing, space]}
    elements = [begins if is_open else {"type": "optional", "content": begins}, structure_of(grammar)]
    return structural({"type": "sequence", "elements": elements})


def in_harmony(grammar: Grammar, harmony: Harmony) -> Grammar:
    """Grammar of an answer in harmony's messages, whose last one it binds."""
    return structural(harmony.messages([harmony.final(structure_of(grammar))]))


def structural(layout: object) -> Grammar:
    """Grammar of the format of a structural tag."""
    tag = {"type": "structural_tag", "format": layout}
    return Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(tag, ensure_ascii=False))


def structure_of(grammar: Grammar) -> object:
    """The grammar as part of a structural tag."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return {"type": "json_schema", "json_schema": json.loads(grammar.text), "max_whitespace_cnt": 1}
        case GrammarKind.REGEX:
            return {"type": "regex", "pattern": grammar.text}
        case GrammarKind.EBNF:
            return {"type": "grammar", "grammar": grammar.text}
        case GrammarKind.STRUCTURAL_TAG:
            return json.loads(grammar.text)["format"]


def _of_response_format(wanted: Mapping[str, object]) -> Grammar | None:
    field = "response_format"
    match wanted.get("type"):
        case "text":
            return None
        case "json_object" if wanted.get("schema") is None:
            return Grammar(GrammarKind.JSON_SCHEMA, ANY_OBJECT)
        case "json_object":  # llama.cpp and others
            return _of_schema(wanted["schema"], f"{field}.schema")
        case "json_schema":
            named = wanted.get("json_schema") or wanted  # LM Studio, Together
            if not isinstance(named, dict) or "schema" not in named:
                raise refusal(field, 'needs json_schema to be {"name": "...", "schema": {...}}')
            schema = named["schema"]
            if named.get("strict") is False and isinstance(schema, dict):
                schema = enforceable(schema)
            return _of_schema(schema, f"{field}.json_schema.schema")
        case other:
            raise refusal(field, f"has the type {_short(other)}; supported are text, json_object and json_schema")


def _of_structured_outputs(wanted: Mapping[str, object]) -> Grammar:
    field = "structured_outputs"
    given = {name: value for name, value in wanted.items() if value is not None and value is not False}
    if len(given) != 1:
        raise refusal(field, "needs exactly one of json, json_object, regex, choice and grammar")
    [(name, value)] = given.items()
    match name, value:
        case "json", str():
            try:
                schema = msgspec.json.decode(value)
            except (ValueError, RecursionError) as error:
                raise refusal(f"{field}.json", f"is not JSON: {error}") from error
            return _of_schema(schema, f"{field}.json")
        case "json", _:
            return _of_schema(value, f"{field}.json")
        case "json_object", True:
            return Grammar(GrammarKind.JSON_SCHEMA, ANY_OBJECT)
        case "regex", str():
            return Grammar(GrammarKind.REGEX, value)
        case "grammar", str():
            return Grammar(GrammarKind.EBNF, value)
        case "choice", list() if value and all(isinstance(choice, str) and choice for choice in value):
            choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in value)
            return Grammar(GrammarKind.EBNF, f"root ::= {choices}")
        case (("json_object" | "regex" | "grammar" | "choice"), _):
            kinds = {"json_object": "true", "choice": "a list of texts, none of them empty"}
            raise refusal(f"{field}.{name}", f"should be {kinds.get(name, 'a text')}")
        case _:
            raise refusal(field, f"has {_short(name)}; supported are json, json_object, regex, choice and grammar")


def _of_schema(schema: object, field: str) -> Grammar:
    try:
        schema = check_json_schema(schema)
        # `json` would hold up other threads for several times as long.
        return Grammar(GrammarKind.JSON_SCHEMA, msgspec.json.encode(schema).decode())
    except SchemaError as error:
        raise refusal(field, f"cannot be enforced: {error}") from error
    except RecursionError:
        raise refusal(field, "is nested too deeply") from None


def _short(value: object) -> str:
    return repr(value)[:MAX_NAME_CHARS]
