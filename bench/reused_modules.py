"""How much of prompts repeats, and where: at the head, as prefix caches need it, or in modules anywhere.

    python -m pdserve.bench.reused_modules [--data FOLDER] [--commits N] [--json FILE]

Prompt Cache (Gim et al. 2024, MLSys) reuses the KV of named modules at any place of a prompt. What that could gain is
counted here, with a cache that forgets nothing:

- ``commits``: the newest commits of this repository as work of a coder, who reads the files that a commit changes, as
  they were before. As a session, each file is one more turn; at once, all are one prompt, as documents that were
  searched. Texts are known, so a module is seen wherever it is: a whole file or, finer than engines name modules, what
  stands between two blank lines. A block is 64 bytes, about 16 tokens.
- ``mooncake``: conversations of ``--data`` in blocks of 512 tokens. Their ids name a block and all before it, so what
  repeats behind something new has other ids, and no public trace of this kind can show it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from pdserve.bench.policies import MOONCAKE
from pdserve.bench.script import publish, script_parser

BLOCK_BYTES = 64
_MOST_BYTES = 256_000
"""Of a prompt: about 64,000 tokens."""


class Reuse(NamedTuple):
    """Shares of all blocks of all prompts."""

    prompts: int
    blocks: int
    at_head: float
    """Of the longest beginning that an earlier prompt has."""
    elsewhere: float
    """Behind that, in modules that an earlier prompt has somewhere: the bound of what reuse of modules adds."""


def reuse(prompts: Iterable[Sequence[Sequence[int]]]) -> Reuse:
    """Count what repeats.

    Args:
        prompts: modules of each, of which each is a sequence of blocks.
    """
    beginnings: set[int] = set()
    modules: set[int] = set()
    num_prompts = num_blocks = num_at_head = num_elsewhere = 0
    for prompt in prompts:
        num_prompts += 1
        chain, is_head = 0, True
        for module in prompt:
            name = hash(tuple(module))
            is_known = name in modules
            modules.add(name)
            for block in module:
                chain = hash((chain, block))
                is_head = is_head and chain in beginnings
                beginnings.add(chain)
                num_blocks += 1
                num_at_head += is_head
                num_elsewhere += is_known and not is_head
    most = max(num_blocks, 1)
    return Reuse(num_prompts, num_blocks, num_at_head / most, num_elsewhere / most)


def commits(folder: Path, number: int) -> list[dict[str, bytes]]:
    """The files that each of the newest commits changes, as they were before it, by path; the oldest commit first."""
    log = _git(
        folder, "log", f"-{number}", "--no-merges", "--reverse", "--diff-filter=M", "--name-only", "--format=%x00%H"
    )
    wanted = [
        (commit, name)
        for commit, *names in (entry.split("\n") for entry in log.decode().split("\0")[1:])
        for name in sorted(filter(None, names))
    ]
    answers = _git(folder, "cat-file", "--batch", given="".join(f"{commit}^:{name}\n" for commit, name in wanted))
    found: dict[str, dict[str, bytes]] = {}
    at = 0
    for commit, name in wanted:
        header_end = answers.index(b"\n", at)
        kind, size = answers[at:header_end].split()[-2:]
        if kind != b"blob":
            at = header_end + 1
            continue
        at = header_end + 2 + int(size)
        files = found.setdefault(commit, {})
        if sum(map(len, files.values())) + int(size) <= _MOST_BYTES:
            files[name] = answers[header_end + 1 : at - 1]
    return list(found.values())


def _git(folder: Path, *arguments: str, given: str = "") -> bytes:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments], input=given.encode(), capture_output=True, check=True
    ).stdout


def prompts(sessions: Iterable[dict[str, bytes]], separator: bytes, *, at_once: bool) -> Iterator[list[list[int]]]:
    """Each session's prompts in modules: its files so far, or their parts."""
    for files in sessions:
        modules: list[list[int]] = []
        for text in files.values():
            modules += map(blocks, text.split(separator) if separator else [text])
            if not at_once:
                yield modules
        if at_once:
            yield modules


def blocks(text: bytes, size: int = BLOCK_BYTES) -> list[int]:
    return [hash(text[at : at + size]) for at in range(0, len(text), size)]


def _conversations(file: Path) -> Iterator[list[list[int]]]:
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            yield [[block] for block in json.loads(line)["hash_ids"]]


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--data", type=Path, help="folder with the Mooncake trace")
    parser.add_argument("--commits", type=int, default=400)
    arguments = parser.parse_args()
    changes = commits(Path(__file__).parent, arguments.commits)
    found = {
        f"commits, {sent}, {what}": reuse(prompts(changes, separator, at_once=sent == "at once"))
        for sent in ("sessions", "at once")
        for what, separator in (("files", b""), ("parts of files", b"\n\n"))
    }
    if arguments.data:
        found["mooncake"] = reuse(_conversations(arguments.data / MOONCAKE))
    console, result = Console(stderr=True), dict[str, Any]()
    for name, each in found.items():
        result[name] = each._asdict()
        shares = f"{each.at_head:.1%} repeat at the head, {each.elsewhere:.1%} elsewhere"
        console.print(f"{name}: {each.prompts:,} prompts, {each.blocks:,} blocks: {shares}")
    publish({"reuse": result}, arguments.json)


if __name__ == "__main__":
    main()
