"""Accuracy of the demo model on held-out questions of each task, for every way of serving it.

    python -m tests.e2e.demo_accuracy [--model FOLDER] [--questions 200] [--json FILE]

Each way of serving is a cluster started by `pdserve up`. Questions go to it over the API with greedy sampling, half of
them at the end of a conversation. An answer counts only if it equals the expected one exactly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from rich.console import Console

from pdserve.bench.script import publish, script_parser
from pdserve.demo.corpus import EXAMINED, Examined, examine
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.weights.demo_model import DEMO_MODEL
from tests.e2e.cluster import running_cluster

MIXED = {"prefill": {"replicas": 0}, "decode": {"replicas": 0}, "mixed": {"replicas": 1}}
WAYS: dict[str, dict[str, Any]] = {
    "float32": {"model": {"dtype": "float32"}},
    "float32, mixed": {"model": {"dtype": "float32"}, **MIXED},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "bfloat16, mixed": {"model": {"dtype": "bfloat16"}, **MIXED},
    "bfloat16, int8 weights": {"model": {"dtype": "bfloat16", "quantization": "int8"}},
    "bfloat16, int4 weights": {"model": {"dtype": "bfloat16", "quantization": "int4"}},
    "bfloat16, int8 KV": {"model": {"dtype": "bfloat16", "kv_dtype": "int8"}},
    "bfloat16, float8 KV": {"model": {"dtype": "bfloat16", "kv_dtype": "float8_e4m3fn"}},
}
"""Deployments; prefill and decode on a worker each where nothing else is said."""
MAX_ANSWER_TOKENS = 64
NUM_CONNECTIONS = 16
KV_MEMORY = "64MiB"


async def ask_all(url: str, questions: Sequence[Examined]) -> list[str]:
    """The answers, in order."""
    limits = httpx.Limits(max_connections=NUM_CONNECTIONS)
    timeout = httpx.Timeout(600.0)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout, trust_env=False) as client:

        async def ask(question: Examined) -> str:
            body = {"messages": question.messages, "temperature": 0, "max_tokens": MAX_ANSWER_TOKENS}
            response = await client.post("/v1/chat/completions", json=body)
            return str(response.raise_for_status().json()["choices"][0]["message"]["content"])

        return list(await asyncio.gather(*(ask(question) for question in questions)))


def measure(folder: Path, num_questions: int, console: Console) -> dict[str, Any]:
    """Accuracy of each task under each way of serving, and how many answers differ from the first way's."""
    questions = {task: [examine(task, index) for index in range(num_questions)] for task in EXAMINED}
    flat = [question for asked in questions.values() for question in asked]
    table: dict[str, Any] = {}
    reference: list[str] = []
    for way, deployment in WAYS.items():
        model = {"path": str(folder), **deployment["model"]}
        workers = {
            role: {"kv_memory": KV_MEMORY, **deployment.get(role, {})} for role in ("prefill", "decode", "mixed")
        }
        with TemporaryDirectory() as work, running_cluster(Path(work), {**workers, "model": model}) as cluster:
            answers = asyncio.run(ask_all(cluster.url, flat))
        reference = reference or answers
        right = [answer == question.answer for answer, question in zip(answers, flat, strict=True)]
        table[way] = {
            "accuracy": {
                task: round(sum(right[first : first + num_questions]) / num_questions, 4)
                for task, first in zip(EXAMINED, range(0, len(flat), num_questions), strict=True)
            },
            "answers_that_differ": sum(a != b for a, b in zip(answers, reference, strict=True)),
        }
        console.print(way, table[way])
    return table


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument(
        "--model", type=Path, default=DEMO_MODEL, help="another checkpoint than the one that is shipped"
    )
    parser.add_argument("--questions", type=int, default=200, help="of each task")
    arguments = parser.parse_args()
    folder: Path = arguments.model
    result = {
        "model": {"name": folder.name, "parameters": DecoderConfig.from_folder(folder).shape.num_parameters},
        "questions_per_task": arguments.questions,
        "ways": measure(folder, arguments.questions, Console(stderr=True)),
    }
    publish(result, arguments.json)


if __name__ == "__main__":
    main()
