"""Readers of traces with one request per line: Mooncake, Azure, BurstGPT, and a plain format of this project.

Called by `pdserve.planner.workload.trace_reading`. Reads files line by line. A line that cannot be read raises an error
that names it or, in lenient mode, is skipped and counted.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from math import isfinite, nan
from pathlib import Path
from typing import Any, Literal

from pdserve.planner.workload.requests import Segment
from pdserve.planner.workload.trace import MAX_TOKENS, Trace, TraceBuilder, TraceRow

Record = Mapping[str, Any]
Fields = tuple[str, str, str]
"""Names of the time, the prompt tokens and the answer tokens."""

MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length")
AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_FIELDS = ("Timestamp", "Request tokens", "Response tokens")
PLAIN_FIELDS = ("arrived_s", "prompt_tokens", "output_tokens")

MOONCAKE_BLOCK_TOKENS = 512
TimeUnit = Literal["auto", "s", "ms"]


class FormatError(ValueError):
    """A problem of the whole file, which no skipped line would solve."""


def read_mooncake(
    path: Path, *, lenient: bool = False, time_unit: TimeUnit = "auto", tokenizer: Path | None = None
) -> Trace:
    """JSON lines of ``timestamp``, ``input_length`` or ``text_input``, ``output_length`` and ``hash_ids``.

    - A hash id names a block of tokens and all tokens before it: prompts with the same first ids share these blocks. A
      prompt's last block may be partly filled, or have no id. Blocks have ``block_size`` tokens, or 512.
    - Lines with one ``session_id`` are the turns of a conversation, which begins at ``timestamp``. Another turn is sent
      ``delay`` after the answer before it. Its prompt is that conversation and ``input_length`` tokens, or, if its hash
      ids begin as those of the first turn, these tokens alone.
    - Lines with a ``chat_id`` are Bailian's: times are in seconds, blocks have 16 tokens, and each is a whole prompt.

    Sources: kvcache-ai/Mooncake, FAST25-release/README.md; ai-dynamo/aiperf, docs/benchmark-modes/trace-replay.md;
    alibaba-edu/qwen-bailian-usagetraces-anon, README.md.

    Args:
        time_unit: ``s`` or ``ms``, of ``timestamp`` and ``delay``; ``auto``: the format's, if the times look like it.
        tokenizer: the model's tokenizer.json, for ``text_input``.

    Raises:
        ValueError: a line is malformed, there is no request, or the file mixes formats or needs an argument.
    """
    lines = _MooncakeLines(time_unit, tokenizer)
    trace = _read(_json_records(path), lines.row, TraceBuilder(path, lenient=lenient))
    return trace if lines.has_times else replace(trace, arrived_s=None)


class _MooncakeLines:
    """Tracks the blocks that earlier lines named, and their conversations."""

    def __init__(self, time_unit: TimeUnit, tokenizer: Path | None) -> None:
        self.has_times = True
        self._unit_s = {"auto": 0.0, "s": 1.0, "ms": 1e-3}[time_unit]
        self._tokenizer = tokenizer
        self._contents: dict[object, int] = {}
        """Number of each hash id, which may have 64 bits."""
        self._blocks: dict[tuple[int, int], Segment] = {}
        self._sessions: dict[str, tuple[int, int]] = {}
        """Tokens of each conversation so far, and the content of its first block, or -1."""
        self._is_bailian: bool | None = None

    def row(self, record: Record) -> TraceRow:
        is_bailian = "chat_id" in record
        if self._is_bailian is None:
            self._is_bailian, self.has_times = is_bailian, record.get("timestamp") is not None
        elif is_bailian is not self._is_bailian:
            raise FormatError("some lines have a chat_id, with times in s, and others have none: use a file for each")
        session, think_s = "" if record.get("session_id") is None else str(record["session_id"]), 0.0
        num_before, first = self._sessions.get(session, (0, -1))
        arrived_s = self._seconds(record, "timestamp") if self.has_times and not num_before else 0.0
        num_tokens, num_output_tokens = self._prompt_tokens(record), _count(record, "output_length")
        segments = self._segments(record, num_tokens)
        if num_before:
            think_s = self._seconds(record, "delay")
            if first < 0 or not segments or segments[0].content != first:
                num_tokens += num_before
            if num_tokens <= num_before or think_s < 0:
                raise ValueError(f"the turn begins before its session's last one ends, with {num_before} tokens")
        elif segments:
            first = segments[0].content
        if session and num_tokens and num_output_tokens:
            self._sessions[session] = num_tokens + num_output_tokens, first
        return TraceRow(arrived_s, num_tokens, num_output_tokens, segments, session, think_s)

    def _seconds(self, record: Record, name: str) -> float:
        value = _number(record, name)
        if not self._unit_s and not self._is_bailian and isinstance(record[name], float):
            raise FormatError(f"{name} is {value}, but Mooncake's are whole ms: say --trace-time-unit s or ms")
        return value * (self._unit_s or (1.0 if self._is_bailian else 1e-3))

    def _prompt_tokens(self, record: Record) -> int:
        text = record.get("text_input")
        return len(self._encode(text).ids) if isinstance(text, str) else _count(record, "input_length")

    @cached_property
    def _encode(self) -> Callable[[str], Any]:
        from tokenizers import Tokenizer

        try:
            encode: Callable[[str], Any] = Tokenizer.from_file(str(self._tokenizer)).encode
        except Exception as error:  # the library raises bare Exceptions
            raise FormatError(
                f"text_input needs the model's tokenizer.json ({error}): give --model its folder, or write input_length"
            ) from error
        return encode

    def _segments(self, record: Record, num_prompt_tokens: int) -> tuple[Segment, ...]:
        if not (hash_ids := record.get("hash_ids")):
            return ()
        usual = 16 if self._is_bailian else MOONCAKE_BLOCK_TOKENS
        block_tokens = max(1, _count(record, "block_size")) if "block_size" in record else usual
        if not isinstance(hash_ids, list) or not all(type(each) is int for each in hash_ids):
            raise ValueError("hash_ids are not a list of whole numbers")
        num_full, num_left = divmod(num_prompt_tokens, block_tokens)
        if len(hash_ids) not in (num_full, num_full + (num_left > 0)):
            raise ValueError(
                f"{len(hash_ids)} hash_ids of {block_tokens} tokens do not name {num_prompt_tokens} prompt tokens: "
                "write the block_size, if it is another"
            )
        segments = [self._block(each, block_tokens) for each in hash_ids[:num_full]]
        if num_left:
            last = hash_ids[num_full] if len(hash_ids) > num_full else object()
            segments.append(self._block(last, num_left))
        return tuple(segments)

    def _block(self, hash_id: object, num_tokens: int) -> Segment:
        content = self._contents.setdefault(hash_id, len(self._contents))
        return self._blocks.setdefault((content, num_tokens), Segment(content, num_tokens))


def read_azure(path: Path, *, lenient: bool = False) -> Trace:
    """CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens; times with or without an offset from UTC.

    Source: Azure/AzurePublicDataset, AzureLLMInferenceDataset2023.md and AzureLLMInferenceDataset2024.md.

    Raises:
        ValueError: a line is malformed, or there is no request.
    """

    def row(record: Record) -> TraceRow:
        text = record["TIMESTAMP"]
        try:
            time = datetime.fromisoformat(text.removesuffix(" UTC"))
        except ValueError:
            raise ValueError(f"TIMESTAMP is {text!r}, expected a time such as 2023-11-16 18:15:46.6805900") from None
        arrived_s = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
        return TraceRow(arrived_s, _count(record, "ContextTokens"), _count(record, "GeneratedTokens"))

    return _read(_csv_records(path, AZURE_FIELDS), row, TraceBuilder(path, lenient=lenient))


def read_burstgpt(path: Path, *, lenient: bool = False) -> Trace:
    """CSV with the columns Timestamp (s), Request tokens, Response tokens, and others that are ignored.

    Failed requests, with 0 response tokens, are left out and counted. Session ids of newer files are ignored: the trace
    does not record how much of a prompt is its session's history.

    Source: HPMLL/BurstGPT, README.md.

    Raises:
        ValueError: a line is malformed, or there is no request.
    """
    return _read(_csv_records(path, BURSTGPT_FIELDS), _row_of(BURSTGPT_FIELDS), TraceBuilder(path, lenient=lenient))


def read_plain(path: Path, *, lenient: bool = False) -> Trace:
    """pdserve's own: ``arrived_s``, ``prompt_tokens`` and ``output_tokens`` as JSON lines or as columns of a CSV file.

    Raises:
        ValueError: a line is malformed, or there is no request.
    """
    with _opened(path) as file:
        is_json = _first_line(file).startswith(("{", "["))
    records = _json_records(path) if is_json else _csv_records(path, PLAIN_FIELDS)
    return _read(records, _row_of(PLAIN_FIELDS), TraceBuilder(path, lenient=lenient))


def _row_of(fields: Fields) -> Callable[[Record], TraceRow]:
    arrived_s, prompt, output = fields
    return lambda record: TraceRow(_number(record, arrived_s), _count(record, prompt), _count(record, output))


def _read(
    records: Iterator[tuple[int, Record | ValueError]], row: Callable[[Record], TraceRow], builder: TraceBuilder
) -> Trace:
    for line, record in records:
        try:
            if isinstance(record, ValueError):
                raise record
            builder.add(row(record))
        except FormatError as problem:
            raise ValueError(f"{builder.path}:{line}: {problem}") from problem
        except ValueError as problem:
            builder.refuse(line, problem)
    return builder.build()


def _opened(path: Path) -> Any:
    # Invalid UTF-8 is not a number either, and is reported with its line.
    return path.open(encoding="utf-8-sig", errors="replace", newline="")


def _first_line(file: Any) -> str:
    """The first line that is not blank, without what is blank before it; the file is at its start again."""
    line: str = next((line for line in file if line.strip()), "").lstrip()
    file.seek(0)
    return line


def _json_records(path: Path) -> Iterator[tuple[int, Record | ValueError]]:
    """Objects, one in each line, or those of an array: then their numbers, not lines."""
    with _opened(path) as file:
        if _first_line(file).startswith("["):
            try:
                items = json.load(file)
            except (ValueError, RecursionError) as problem:
                raise ValueError(f"{path} is not JSON, or truncated: {problem}") from None
            for number, item in enumerate(items, 1):
                yield number, item if isinstance(item, dict) else ValueError("not a JSON object")
            return
        for line, text in enumerate(file, 1):
            if text.strip():
                yield line, _json_record(text)


def _json_record(text: str) -> Record | ValueError:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as problem:
        return ValueError(f"not JSON ({problem})")
    return record if isinstance(record, dict) else ValueError("not a JSON object")


def _csv_records(path: Path, fields: tuple[str, ...]) -> Iterator[tuple[int, Record | ValueError]]:
    with _opened(path) as file:
        lines = csv.reader(file, delimiter=delimiter_of(_first_line(file)))
        header = [name.strip() for name in next((cells for cells in lines if cells), [])]
        missing = [name for name in fields if name not in header]
        if missing:
            raise ValueError(
                f"{path}:{max(lines.line_num, 1)}: no column {missing[0]!r} in the header {', '.join(header)!r}"
            )
        while True:
            try:
                cells = next(lines, None)
            except csv.Error as problem:
                yield lines.line_num, ValueError(str(problem))
                continue
            if cells is None:
                return
            del cells[len(header) + (any(cells[len(header) :]) and len(cells)) :]  # commas at the end of a line
            if len(cells) == len(header):
                yield lines.line_num, dict(zip(header, cells, strict=True))
            elif cells:
                yield lines.line_num, ValueError(f"{len(cells)} cells for {len(header)} columns")


def delimiter_of(header: str) -> str:
    """What separates cells: a comma, or what spreadsheets of other languages write."""
    return max(",;\t", key=header.count)


def _number(record: Record, name: str) -> float:
    """A finite number, from JSON or from a CSV cell."""
    value = record.get(name)
    try:
        number = nan if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = nan
    if not isfinite(number):
        raise ValueError(f"{name} is missing" if value is None else f"{name} is {_shown(value)}, not a number")
    return number


def _count(record: Record, name: str) -> int:
    """A whole number of tokens, from JSON or from a CSV cell."""
    number = _number(record, name)
    if number != int(number) or not 0 <= number <= MAX_TOKENS:
        raise ValueError(f"{name} is {_shown(record[name])}, not a whole number from 0 to {MAX_TOKENS}")
    return int(number)


def _shown(value: object) -> str:
    return repr(value)[:60]
