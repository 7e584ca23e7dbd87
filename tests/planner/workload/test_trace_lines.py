from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pdserve.planner.workload.requests import Segment
from pdserve.planner.workload.trace import Trace
from pdserve.planner.workload.trace_lines import read_azure, read_burstgpt, read_mooncake, read_plain

MOONCAKE = """\
{"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]}
{"timestamp": 30535, "input_length": 1024, "output_length": 26, "hash_ids": [46, 47]}
"""
AZURE_2023 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
AZURE_2024 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01.017335+00:00,2399,6
"""
BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,API log
"""
BURSTGPT_SESSIONS = """\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5.0,,3.2,ChatGPT,472,18,490,API log
7.0,9,4.1,GPT-4,10.0,20,30,Conversation log
"""
PLAIN_CSV = "prompt_tokens,arrived_s,output_tokens\n100,0.5,7\n200,1.25,8\n"
PLAIN_JSON = """\
{"arrived_s": 0.5, "prompt_tokens": 100, "output_tokens": 7, "user": "a"}

{"arrived_s": 1.25, "prompt_tokens": 200, "output_tokens": 8}
"""

Read = Callable[..., Trace]


def read(reader: Read, folder: Path, text: str, *, lenient: bool = False) -> Trace:
    path = folder / "trace"
    path.write_text(text)
    return reader(path, lenient=lenient)


def columns(trace: Trace) -> list[tuple[float, int, int]]:
    assert trace.arrived_s is not None
    return list(
        zip(
            np.round(trace.arrived_s, 6).tolist(),
            trace.num_prompt_tokens.tolist(),
            trace.num_output_tokens.tolist(),
            strict=True,
        )
    )


@pytest.mark.parametrize(
    ("reader", "text", "expected"),
    [
        (read_mooncake, MOONCAKE, [(0.0, 1100, 52), (3.053, 1024, 26)]),
        (read_azure, AZURE_2023, [(0.0, 374, 44), (4.314579, 396, 109)]),
        (read_azure, AZURE_2024, [(0.0, 2162, 5), (1.007405, 2399, 6)]),
        (read_burstgpt, BURSTGPT, [(0.0, 472, 18), (113.0, 417, 276)]),
        (read_burstgpt, BURSTGPT_SESSIONS, [(0.0, 472, 18), (2.0, 10, 20)]),
        (read_plain, PLAIN_CSV, [(0.0, 100, 7), (0.75, 200, 8)]),
        (read_plain, PLAIN_JSON, [(0.0, 100, 7), (0.75, 200, 8)]),
        (read_plain, "\ufeff" + PLAIN_CSV.replace("\n", "\r\n"), [(0.0, 100, 7), (0.75, 200, 8)]),
    ],
    ids=[
        "mooncake",
        "azure-2023",
        "azure-2024",
        "burstgpt",
        "burstgpt-sessions",
        "plain-csv",
        "plain-json",
        "windows",
    ],
)
def test_each_format_is_read(reader: Read, text: str, expected: list[tuple[float, int, int]], tmp_path: Path) -> None:
    trace = read(reader, tmp_path, text)
    assert columns(trace) == expected
    assert not any("malformed" in note for note in trace.notes)


def test_failed_requests_are_left_out_and_told(tmp_path: Path) -> None:
    trace = read(read_burstgpt, tmp_path, BURSTGPT)
    assert trace.notes == ("1 without a prompt or an answer left out",)
    assert read(read_burstgpt, tmp_path, BURSTGPT_SESSIONS).notes == ()


def test_mooncake_s_blocks_are_segments(tmp_path: Path) -> None:
    trace = read(read_mooncake, tmp_path, MOONCAKE)
    assert trace.segments == [
        (Segment(0, 512), Segment(1, 512), Segment(2, 76)),
        (Segment(0, 512), Segment(1, 512)),
    ]


def test_a_last_block_without_an_id_is_shared_with_nobody(tmp_path: Path) -> None:
    line = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7]}\n'
    first, second = read(read_mooncake, tmp_path, 2 * line).segments
    assert first[0] == second[0] == Segment(0, 512)
    assert first[1].num_tokens == second[1].num_tokens == 88
    assert first[1].content != second[1].content


def test_blocks_are_optional(tmp_path: Path) -> None:
    bare = '{"timestamp": 0, "input_length": 10, "output_length": 5}\n'
    assert read(read_mooncake, tmp_path, 2 * bare).segments == []
    named = '{"timestamp": 1, "input_length": 10, "output_length": 5, "hash_ids": [7]}\n'
    assert read(read_mooncake, tmp_path, bare + named + bare).segments == [(), (), (Segment(0, 10),)]


def test_requests_are_put_in_order_of_arrival(tmp_path: Path) -> None:
    text = "arrived_s,prompt_tokens,output_tokens\n30,3,1\n10,1,1\n20,2,1\n"
    assert columns(read(read_plain, tmp_path, text)) == [(0.0, 1, 1), (10.0, 2, 1), (20.0, 3, 1)]


@pytest.mark.parametrize(
    ("reader", "text", "line", "message"),
    [
        (read_mooncake, MOONCAKE + "{oops\n", 3, "not JSON"),
        (read_mooncake, "\n" + MOONCAKE + "[1]\n", 4, "not a JSON object"),
        (read_mooncake, MOONCAKE + "[" * 100_000, 3, "not JSON"),
        (read_mooncake, MOONCAKE.replace('"input_length": 1024, ', ""), 2, "input_length is missing"),
        (read_mooncake, MOONCAKE.replace("[46, 47]", "[46]"), 2, "1 hash_ids of 512 tokens do not name 1024"),
        (read_mooncake, MOONCAKE.replace("[46, 47]", '["a", 47]'), 2, "hash_ids are not a list"),
        (read_mooncake, MOONCAKE.replace("[46, 47]", "46"), 2, "hash_ids are not a list"),
        (read_mooncake, MOONCAKE.replace("30535", "NaN"), 2, "timestamp is nan, not a number"),
        (read_mooncake, MOONCAKE.replace("30535", "true"), 2, "timestamp is True, not a number"),
        (read_mooncake, MOONCAKE.replace("26", "1" + "0" * 400), 2, "output_length is 1000"),
        (read_azure, AZURE_2023 + "yesterday,1,1\n", 4, "TIMESTAMP is 'yesterday', expected a time such as"),
        (read_azure, AZURE_2023.replace("396", "-396"), 3, "ContextTokens is '-396', not a whole number"),
        (read_azure, AZURE_2023.replace("396", "396.5"), 3, "ContextTokens is '396.5', not a whole number"),
        (read_azure, AZURE_2023.replace("396", "1e9"), 3, "ContextTokens is '1e9', not a whole number"),
        (read_azure, AZURE_2023.replace(",109", ""), 3, "2 cells for 3 columns"),
        (read_burstgpt, BURSTGPT.replace("276", "many"), 4, "Response tokens is 'many', not a number"),
        (read_plain, PLAIN_CSV.replace("1.25", ""), 3, "arrived_s is '', not a number"),
    ],
)
def test_a_malformed_line_is_named_or_leniently_skipped(
    reader: Read, text: str, line: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="trace:") as caught:
        read(reader, tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 'trace'}:{line}: {message}")
    assert "--lenient" in str(caught.value)
    trace = read(reader, tmp_path, text, lenient=True)
    assert trace.num_requests >= 1
    assert f"1 malformed skipped, the first is {tmp_path / 'trace'}:{line}: {message}" in trace.notes[0]


def test_what_is_not_text_is_malformed(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(PLAIN_CSV.encode() + b"\xff\xfe,1,1\n\x00,2\n")
    with pytest.raises(ValueError, match="trace:4: prompt_tokens"):
        read_plain(path)
    assert read_plain(path, lenient=True).notes[0].startswith("2 malformed skipped")


def test_a_cell_without_an_end_is_malformed(tmp_path: Path) -> None:
    text = PLAIN_CSV + '"' + "9" * 200_000
    with pytest.raises(ValueError, match=r"trace:4: field larger than field limit"):
        read(read_plain, tmp_path, text)
    assert read(read_plain, tmp_path, text, lenient=True).num_requests == 2


def test_a_missing_column_is_named_even_leniently(tmp_path: Path) -> None:
    for text in ("", AZURE_2023.replace("GeneratedTokens", "Generated")):
        with pytest.raises(ValueError, match="trace:1: no column"):
            read(read_azure, tmp_path, text, lenient=True)


def test_a_file_without_a_request_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no request that can be used \(1 malformed, 1 without"):
        read(read_plain, tmp_path, "arrived_s,prompt_tokens,output_tokens\n1,1,0\n2\n", lenient=True)
