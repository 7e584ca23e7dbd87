from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.bench.transfer import layout_of, measure, report, result_lines


def test_every_case_moves_its_blocks() -> None:
    layout = replace(layout_of(3), num_layers=1)
    seconds = measure(layout, [1, 3], 1)
    assert sorted(seconds) == ["memcpy", "memfd", "socket", "tcp"]
    assert all(list(of_case) == [1, 3] for of_case in seconds.values())
    assert all(0 < taken_s < 60 for of_case in seconds.values() for taken_s in of_case.values())


def test_shares_are_of_the_limits() -> None:
    seconds = {"memcpy": {2: 0.1}, "socket": {2: 0.2}, "memfd": {2: 0.125}, "tcp": {2: 0.25}}
    result = report(seconds, 10**9)
    assert result["memfd"] == {"2": {"ms": 125.0, "gbytes_per_s": 16.0, "share_of_limit": 0.8}}
    assert result["tcp"] == {"2": {"ms": 250.0, "gbytes_per_s": 8.0, "share_of_limit": 0.8}}
    lines = result_lines(result)
    assert lines[2].split() == ["tcp", "2", "250.0", "8.00", "80%", "of", "socket"]
    assert lines[-1].split() == ["socket", "2", "200.0", "10.00"]


def test_a_block_is_two_mebibytes() -> None:
    assert layout_of(1).block_bytes == 2 << 20


@pytest.mark.parametrize("blocks", ["", "1,x", "0"])
def test_numbers_of_blocks_are_checked(blocks: str, capsys: pytest.CaptureFixture[str]) -> None:
    from pdserve.deploy.cli import run

    assert run(["bench", "transfer", "--blocks", blocks]) == 2
    assert "--blocks" in capsys.readouterr().err
