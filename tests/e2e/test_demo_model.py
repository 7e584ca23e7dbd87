"""Without a model named, the demo model answers, and identically through every way of serving."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pdserve.demo.corpus import Examined, examine
from pdserve.model.weights.demo_model import DEMO_MODEL, DRAFT_MODEL
from tests.e2e.cluster import running_cluster
from tests.e2e.demo_accuracy import MIXED, ask_all

PROMISED = {
    "What is 17 + 25?": "42",
    "How many times does the letter e appear in between?": "3",
    "Reverse the word planet.": "tenalp",
}
SURE = ("reversing words", "facts")
NUM_QUESTIONS = 20


def test_the_demo_model_keeps_its_promises_however_it_is_served(tmp_path: Path) -> None:
    questions = [Examined([{"role": "user", "content": question}], answer) for question, answer in PROMISED.items()]
    questions += [examine(task, index) for task in SURE for index in range(NUM_QUESTIONS)]
    answers = []
    for name, deployment in {"apart": {}, "mixed": MIXED}.items():
        memory = {role: {"kv_memory": "64MiB", **deployment.get(role, {})} for role in ("prefill", "decode", "mixed")}
        (tmp_path / name).mkdir()
        with running_cluster(tmp_path / name, memory) as cluster:
            answers.append(asyncio.run(ask_all(cluster.url, questions)))
    assert answers[0] == answers[1]
    assert answers[0][: len(PROMISED)] == list(PROMISED.values())
    right = [answer == question.answer for answer, question in zip(answers[0], questions, strict=True)]
    assert sum(right) / len(right) > 0.9


def test_both_checkpoints_are_small_and_of_one_tokenizer() -> None:
    files = [path for folder in (DEMO_MODEL, DRAFT_MODEL) for path in folder.iterdir()]
    assert sum(path.stat().st_size for path in files) < 16_000_000
    assert (DEMO_MODEL / "tokenizer.json").read_bytes() == (DRAFT_MODEL / "tokenizer.json").read_bytes()
