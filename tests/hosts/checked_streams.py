"""Streams whose every token is known in advance: load for the scripts that break a cluster.

    python -m tests.hosts.checked_streams http://127.0.0.1:8000 [--clients 64] [--tokens 300]

The cluster must emulate (`pdserve up --emulate`): its tokens are then a hash chain, in which a lost, repeated or
misplaced token or block changes all later ones. Each client sends one request after the other until standard input
ends. A line on standard output tells that the streams are under way, another has all answers. Times are on the clock of
`time.monotonic`, which hosts in namespaces of one machine share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from pdserve.contracts.request import SamplingParams
from pdserve.loadgen.client import StreamClient, StreamedAnswer
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.weights.demo_model import DEMO_MODEL
from tests.expected_tokens import expected_tokens

TIMEOUT_S = 150.0
_PAUSE_S = 0.2
"""Pause of a client whose request failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedAnswer:
    sent_s: float
    ended_s: float
    num_tokens: int
    gap_s: float
    """Longest time without a token, after the first."""
    error: str
    """Why it is not whole; empty if it is."""
    is_wrong: bool
    """True if a token that arrived is not the one expected."""


class ChainChecker:
    """Knows the answers of an emulated cluster that serves ``model``."""

    def __init__(self, model: Path) -> None:
        limits = DecoderConfig.from_folder(model).limits(0)
        self.vocab_size, self._eos_token_ids = limits.vocab_size, limits.eos_token_ids

    def answer(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Tokens that no end of sequence cuts short."""
        sampling = SamplingParams(temperature=0, ignore_eos=True)
        return expected_tokens(
            prompt, num_tokens, self.vocab_size, sampling=sampling, eos_token_ids=self._eos_token_ids
        )

    def check(self, prompt: Sequence[int], num_tokens: int, answer: StreamedAnswer, ended_s: float) -> CheckedAnswer:
        expected = self.answer(prompt, num_tokens)
        error = answer.error
        if not error and len(answer.token_ids) != num_tokens:
            error = f"{len(answer.token_ids)} of {num_tokens} tokens, and no error"
        times = [*answer.token_s, ended_s] if answer.token_s else []
        return CheckedAnswer(
            sent_s=answer.sent_s,
            ended_s=ended_s,
            num_tokens=len(answer.token_ids),
            gap_s=max((later - sooner for sooner, later in pairwise(times)), default=0.0),
            error=error,
            is_wrong=answer.token_ids != expected[: len(answer.token_ids)],
        )


class Streams:
    """The load as a child process, for instance on another host."""

    def __init__(self, url: str, *options: object, on: Sequence[str] = ()) -> None:
        """
        Args:
            options: of this module's command line.
            on: command that runs another one elsewhere.
        """
        command = [*on, sys.executable, "-m", __spec__.name, url, *map(str, options)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError(f"no stream came from {url}")

    def end(self) -> list[CheckedAnswer]:
        """Let the requests in flight end, and no others begin; returns all answers."""
        out, _ = self._process.communicate(timeout=2 * TIMEOUT_S)
        return [CheckedAnswer(**each) for each in json.loads(out)]


def summary(answers: Sequence[CheckedAnswer]) -> dict[str, Any]:
    """What a fault has done to the streams."""
    errors = Counter(_kind(each.error) for each in answers if each.error)
    return {
        "streams": len(answers),
        "whole": sum(not each.error and not each.is_wrong for each in answers),
        "wrong": sum(each.is_wrong for each in answers),
        "failed": dict(errors.most_common()),
        "longest_gap_s": round(max((each.gap_s for each in answers), default=0.0), 2),
        "longest_s": round(max((each.ended_s - each.sent_s for each in answers), default=0.0), 2),
    }


def _kind(error: str) -> str:
    """An error without the text that differs between requests."""
    try:
        return str(json.loads(error)["error"]["message"])[:120]
    except (ValueError, KeyError, TypeError):
        return error[:120]


async def _client(client: StreamClient, checker: ChainChecker, seed: int, num_tokens: int, load: _Load) -> None:
    rng = random.Random(seed)
    while not load.is_over.is_set():
        prompt = [rng.randrange(checker.vocab_size) for _ in range(rng.randrange(20, 200))]
        body = {
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        answer = StreamedAnswer()
        await client.complete(msgspec.json.encode(body), answer, TIMEOUT_S)
        load.answers.append(checker.check(prompt, num_tokens, answer, time.monotonic()))
        if answer.error:
            await asyncio.sleep(_PAUSE_S)


class _Load:
    def __init__(self) -> None:
        self.is_over = asyncio.Event()
        self.answers: list[CheckedAnswer] = []


async def _run(arguments: argparse.Namespace) -> list[CheckedAnswer]:
    load, checker = _Load(), ChainChecker(arguments.model)
    client = StreamClient(arguments.url)
    tasks = [
        asyncio.create_task(_client(client, checker, arguments.seed + number, arguments.tokens, load))
        for number in range(arguments.clients)
    ]
    await asyncio.sleep(arguments.lead_s)
    sys.stdout.write('"streams are under way"\n')
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    load.is_over.set()
    await asyncio.gather(*tasks)
    client.close()
    return load.answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=300, help="tokens of each answer")
    parser.add_argument("--lead-s", type=float, default=2.0, help="seconds until the streams count as under way")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    answers = asyncio.run(_run(parser.parse_args()))
    sys.stdout.write(json.dumps(msgspec.to_builtins(answers)) + "\n")


if __name__ == "__main__":
    main()
