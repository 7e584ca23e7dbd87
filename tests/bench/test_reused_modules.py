from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pdserve.bench.reused_modules import commits, prompts, reuse


def test_what_repeats_at_the_head_and_elsewhere() -> None:
    a, b, c = [1, 2], [3], [4, 5, 6]
    found = reuse([[a, b], [a, c], [c, b], [a, c, b]])
    assert (found.prompts, found.blocks) == (4, 18)
    # The second prompt repeats a; the third, c and b, neither of them first; the fourth begins as the second.
    assert found.at_head == pytest.approx((2 + 0 + 5) / 18)
    assert found.elsewhere == pytest.approx((0 + 4 + 1) / 18)


def test_a_module_that_repeats_in_part_counts_at_the_head_alone() -> None:
    found = reuse([[[1, 2, 3]], [[1, 2, 9]], [[7], [1, 2, 8]]])
    assert found.at_head == pytest.approx(2 / 10)
    assert found.elsewhere == 0.0


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init", "-q")
    for texts in ({"b": "old b", "a": "old a"}, {"b": "new b", "a": "new a", "c": "c"}, {"b": "newer b"}):
        for name, text in texts.items():
            (tmp_path / name).write_text(text)
        git("add", ".")
        git("commit", "-qm", "change")
    return tmp_path


def test_commits_are_the_files_that_they_change_as_they_were_before(repository: Path) -> None:
    assert commits(repository, 10) == [{"a": b"old a", "b": b"old b"}, {"b": b"new b"}]
    assert commits(repository, 1) == [{"b": b"new b"}]


def test_sessions_send_all_again_with_each_file() -> None:
    files = [{"a": b"1\n\n2", "b": b"3"}]
    assert [len(prompt) for prompt in prompts(files, b"", at_once=False)] == [1, 2]
    assert [len(prompt) for prompt in prompts(files, b"\n\n", at_once=False)] == [2, 3]
    assert [len(prompt) for prompt in prompts(files, b"\n\n", at_once=True)] == [3]
