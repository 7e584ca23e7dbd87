"""Structured output of a whole cluster: does every answer keep its schema, and does a hard grammar hold others up?

    python -m pdserve.bench.structures [--schemas 200] [--regexes 50] [--seed 1] [--json FILE]

The demo model answers random schemas and regular expressions at temperatures 0 and 1, three choices each. Each answer
that is complete is validated by `jsonschema` or `re`, which share nothing with xgrammar. Then 20 grammars are sent that
take long to compile or to follow, or that cannot be compiled, one after the other beside 16 plain streams: the time to
each answer or refusal, and the gaps between tokens of the streams, with the bombs and without.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import jsonschema
import numpy as np
from rich.console import Console

from pdserve.bench.cluster import running_cluster
from pdserve.bench.script import publish, script_parser
from pdserve.bench.stream_client import StreamClient, StreamedAnswer

NUM_CHOICES = 3
MAX_TOKENS = 400
NUM_AT_ONCE = 8
NUM_STREAMS = 16
Json = dict[str, Any]

PATTERNS = ("^[a-z]{2,6}$", "^[A-Z][0-9]{3}$", "^(a|bc)+d$", r"^\d{3}-\d{4}$", "^x?y*z{1,4}$", "^[^a-y ]{1,5}$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "duration")


def random_schema(rng: random.Random, depth: int = 0) -> Json:
    kinds: list[Callable[[random.Random, int], Json]] = [_string, _number, _constant, _nullable]
    if depth < 3:
        kinds += [_object, _object, _array, _any_of]
    schema = _object(rng, 0) if depth == 0 else rng.choice(kinds)(rng, depth)
    if depth == 0 and rng.random() < 0.3:
        schema["$defs"] = {"part": random_schema(rng, 2)}
        schema["properties"]["of"] = {"$ref": "#/$defs/part"}
    return schema


def _string(rng: random.Random, depth: int) -> Json:
    return rng.choice([
        {"type": "string", "maxLength": rng.randrange(1, 12)},
        {"type": "string", "minLength": 2, "maxLength": 2 + rng.randrange(6)},
        {"type": "string", "pattern": rng.choice(PATTERNS)},
        {"type": "string", "format": rng.choice(FORMATS)},
        {"type": "string"},
    ])  # fmt: skip


def _number(rng: random.Random, depth: int) -> Json:
    low = rng.randrange(-1000, 1000)
    return rng.choice([
        {"type": "integer", "minimum": low, "maximum": low + rng.randrange(1, 500)},
        {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + rng.randrange(3, 500)},
        {"type": "number", "minimum": low, "maximum": low + 10},
        {"type": "integer"},
        {"type": "boolean"},
    ])  # fmt: skip


def _constant(rng: random.Random, depth: int) -> Json:
    values = ["a", 'say "hi"', "é\n", 1, -2.5, True, None, [1, "b"], {"k": 1}]
    return rng.choice([{"enum": rng.sample(values, 3)}, {"const": rng.choice(values)}])


def _nullable(rng: random.Random, depth: int) -> Json:
    return {"type": [rng.choice(["integer", "boolean"]), "null"]}


def _object(rng: random.Random, depth: int) -> Json:
    names = rng.sample(["name", "age", "city", "tags", "ok", "value", "größe", "a b"], rng.randrange(1, 5))
    schema: Json = {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
    }
    if rng.random() < 0.5:
        schema["additionalProperties"] = False
    return schema


def _array(rng: random.Random, depth: int) -> Json:
    schema: Json = {"type": "array", "items": random_schema(rng, depth + 1), "maxItems": rng.randrange(1, 4)}
    return {**schema, "minItems": 1} if rng.random() < 0.5 else schema


def _any_of(rng: random.Random, depth: int) -> Json:
    return {"anyOf": [{"type": "null"}, random_schema(rng, depth + 1)]}


def random_regex(rng: random.Random) -> str:
    parts = [
        "[a-z]{1,8}", r"\d{2,4}", "(yes|no|maybe)", "[A-F0-9]{4}", "(ab)*c", "x+", "[^0-9]{3}", r"\w+@\w+\.com", "é?ü",
        r"\(\d\)", "(a|(b|c){2}){1,3}", "[.,;]", r"\s", "(0|1)*2",
    ]  # fmt: skip
    return "".join(rng.choices(parts, k=rng.randrange(1, 5)))


def bombs() -> dict[str, Json]:
    """Fields of requests, by kind."""

    def schema(value: object) -> Json:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}

    def regex(text: str) -> Json:
        return {"structured_outputs": {"regex": text}}

    def ebnf(text: str) -> Json:
        return {"structured_outputs": {"grammar": text}}

    part_a = {"$ref": "#/$defs/a"}
    rules = ["root ::= r0", *(f'r{n} ::= "a" r{n + 1} | r{n + 1} "b"' for n in range(1500)), 'r1500 ::= "c"']
    deep = '{"items":' * 2000 + "{}" + "}" * 2000
    many = {f"p{n}": {"type": "integer"} for n in range(400)}
    nested: Json = {"type": "string"}
    for _ in range(60):
        nested = {"type": "object", "properties": {"a": nested, "b": nested if len(str(nested)) < 20_000 else {}}}
    return {
        "2,000 deep": {"structured_outputs": {"json": deep}},
        "doubled properties": schema(nested),
        "100,000 enums": schema({"enum": [f"v{n}" for n in range(100_000)]}),
        "5,000 enums": schema({"enum": [f"v{n}" for n in range(5_000)]}),
        "2,000 properties": schema({"type": "object", "properties": {f"p{n}": {} for n in range(2_000)}}),
        "200 required of 400": schema({"type": "object", "required": [*many][::2], "properties": many}),
        "endless $ref": schema({"$ref": "#"}),
        "a ring of $ref": schema({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, **part_a}),
        "long strings": schema({"type": "string", "minLength": 50_000, "maxLength": 100_000}),
        "long arrays": schema({"type": "array", "minItems": 20_000, "items": {"type": "array", "minItems": 20_000}}),
        "a wide integer": schema({"type": "integer", "minimum": -(10**17), "maximum": 10**17}),
        "a long pattern": schema({"type": "string", "pattern": "^(" + "|".join(f"a{n}b*" for n in range(3000)) + ")$"}),
        "repeats of repeats": regex("(((((a{1,900}){1,900}){1,900}){1,900}){1,900}){1,900}"),
        "alternatives of repeats": regex(f"({'|'.join(f'(a|b|c){{{n}}}' for n in range(1, 400))})*"),
        "nested stars": regex("(((((a*)*)*b*)*)*c*)*" * 40),
        "a million": regex("a{1000000}"),
        "open groups": regex("(" * 5000),
        "left recursion": ebnf('root ::= root "a" | root root | ""'),
        "many rules": ebnf("\n".join(rules)),
        "many choices": {"structured_outputs": {"choice": [f"choice {n}" for n in range(4000)]}},
    }


async def validate(
    client: httpx.AsyncClient, kind: str, text: object, temperature: int
) -> tuple[Counter[str], list[str]]:
    """Ask once; return what came of the choices, and those that do not keep their structure."""
    structure = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": text}}}
    body = {
        "messages": [{"role": "user", "content": "What is the weather?"}], "temperature": temperature, "seed": 7,
        "n": NUM_CHOICES, "max_tokens": MAX_TOKENS,
        **(structure if kind == "schemas" else {"structured_outputs": {"regex": text}}),
    }  # fmt: skip
    answer = await client.post("/v1/chat/completions", json=body)
    if answer.status_code != 200:
        return Counter({f"{kind} refused": 1}), [f"{answer.text[:300]} for {json.dumps(text)[:500]}"]
    seen, wrong = Counter[str](), []
    for choice in answer.json()["choices"]:
        content = choice["message"]["content"]
        if choice["finish_reason"] != "stop":
            seen[f"{kind} cut"] += 1
            continue
        seen[f"{kind} complete"] += 1
        try:
            if kind == "schemas":
                jsonschema.validate(json.loads(content), text)
            elif re.fullmatch(str(text), content) is None:
                raise ValueError("no match")
        except (ValueError, jsonschema.ValidationError) as error:
            wrong.append(f"{str(error)[:200]}: {content[:300]!r} for {json.dumps(text)[:500]}")
    return seen, wrong


async def validate_all(url: str, num_schemas: int, num_regexes: int, seed: int) -> tuple[Counter[str], list[str]]:
    rng = random.Random(seed)
    cases: list[tuple[str, object]] = [("schemas", random_schema(rng)) for _ in range(num_schemas)]
    cases += [("regexes", random_regex(rng)) for _ in range(num_regexes)]
    gate = asyncio.Semaphore(NUM_AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def one(kind: str, text: object, temperature: int) -> tuple[Counter[str], list[str]]:
            async with gate:
                return await validate(client, kind, text, temperature)

        results = await asyncio.gather(*(one(*case, temperature) for case in cases for temperature in (0, 1)))
    return sum((seen for seen, _ in results), Counter[str]()), [each for _, wrong in results for each in wrong]


async def explode(url: str) -> dict[str, Any]:
    """Send the bombs beside plain streams."""
    client = StreamClient(url)
    body = json.dumps({"prompt": "The time", "max_tokens": 2000, "ignore_eos": True, "stream": True}).encode()

    async def gaps_during(work: Any) -> float:
        answers = [StreamedAnswer() for _ in range(NUM_STREAMS)]
        began_s = time.monotonic()
        streams = [asyncio.create_task(client.complete(body, answer, 600)) for answer in answers]
        await asyncio.sleep(0.5)
        await work
        ended_s = time.monotonic()
        for stream in streams:
            stream.cancel()
        gaps = [np.diff([at for at in answer.token_s if began_s + 0.5 < at < ended_s]) for answer in answers]
        return float(np.percentile(1e3 * np.concatenate(gaps), 99))

    took: dict[str, list[Any]] = {}

    async def send_all() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as bomber:
            for kind, fields in bombs().items():
                start_s = time.monotonic()
                answer = await bomber.post(
                    "/v1/chat/completions",
                    json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 16, **fields},
                )
                took[kind] = [answer.status_code, round(time.monotonic() - start_s, 2)]

    await client.open(NUM_STREAMS)
    before_ms = await gaps_during(asyncio.sleep(4))
    with_ms = await gaps_during(send_all())
    client.close()
    return {
        "bombs": took,
        "slowest_s": max(seconds for _, seconds in took.values()),
        "itl_p99_ms": {"without": round(before_ms, 1), "with": round(with_ms, 1)},
    }


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--regexes", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    console = Console(stderr=True)
    with running_cluster({}) as cluster:
        seen, wrong = asyncio.run(validate_all(cluster.url, arguments.schemas, arguments.regexes, arguments.seed))
        console.print(dict(seen), f"{len(wrong)} wrong")
        for each in wrong[:20]:
            console.print(each, markup=False)
        result = asyncio.run(explode(cluster.url))
    publish({"answers": dict(sorted(seen.items())), "wrong": wrong, **result}, arguments.json)


if __name__ == "__main__":
    main()
