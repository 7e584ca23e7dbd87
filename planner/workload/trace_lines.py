"""Readers of traces with one request per line: Mooncake, Azure, BurstGPT, and a plain format of this project.

Called by `pdserve.planner.workload.trace_reading`. Reads files line by line. A line that cannot be read raises an error
that names it or, in lenient mode, is skipped and counted.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any

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
_MAX_CONTENT = 2**31 - 1


def read_mooncake(path: Path, *, lenient: bool = False) -> Trace:
    """JSON lines of ``timestamp`` (ms), ``input_length``, ``output_length`` and ``hash_ids``.

    A hash id names a block of 512 tokens and all tokens before it: prompts with the same first ids share these blocks.
    A prompt's last block may be partly filled, or have no id.

    Source: kvcache-ai/Mooncake, FAST25-release/README.md.

    Raises:
        ValueError: a line is malformed, or there is no request.
    """
    return _read(_json_records(path), _MooncakeLines().row, TraceBuilder(path, lenient=lenient))


class _MooncakeLines:
    """Tracks the blocks that earlier lines named."""

    def __init__(self) -> None:
        self._blocks: dict[int, Segment] = {}
        self._num_unnamed = 0

    def row(self, record: Record) -> TraceRow:
        num_prompt_tokens = _count(record, "input_length")
        return TraceRow(
            _number(record, "timestamp") / 1e3,
            num_prompt_tokens,
            _count(record, "output_length"),
            self._segments(record.get("hash_ids", ()), num_prompt_tokens),
        )

    def _segments(self, hash_ids: object, num_prompt_tokens: int) -> tuple[Segment, ...]:
        if not hash_ids:
            return ()
        if not isinstance(hash_ids, list) or not all(
            type(each) is int and 0 <= each <= _MAX_CONTENT for each in hash_ids
        ):
            raise ValueError(f"hash_ids are not a list of whole numbers from 0 to {_MAX_CONTENT}")
        num_full, num_left = divmod(num_prompt_tokens, MOONCAKE_BLOCK_TOKENS)
        if len(hash_ids) not in (num_full, num_full + (num_left > 0)):
            raise ValueError(f"{len(hash_ids)} hash_ids of 512 tokens do not name {num_prompt_tokens} prompt tokens")
        segments = [self._block(each) for each in hash_ids[:num_full]]
        if len(hash_ids) > num_full:
            segments.append(Segment(hash_ids[num_full], num_left))
        elif num_left:
            self._num_unnamed += 1
            segments.append(Segment(_MAX_CONTENT - self._num_unnamed, num_left))
        return tuple(segments)

    def _block(self, hash_id: int) -> Segment:
        block = self._blocks.get(hash_id)
        if block is None:
            block = self._blocks[hash_id] = Segment(hash_id, MOONCAKE_BLOCK_TOKENS)
        return block


def read_azure(path: Path, *, lenient: bool = False) -> Trace:
    """CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens; times with or without an offset from UTC.

    Source: Azure/AzurePublicDataset, AzureLLMInferenceDataset2023.md and AzureLLMInferenceDataset2024.md.

    Raises:
        ValueError: a line is malformed, or there is no request.
    """

    def row(record: Record) -> TraceRow:
        text = record["TIMESTAMP"]
        try:
            time = datetime.fromisoformat(text)
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
        is_json = next((line for line in file if line.strip()), "").startswith("{")
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
        except ValueError as problem:
            builder.refuse(line, problem)
    return builder.build()


def _opened(path: Path) -> Any:
    # Invalid UTF-8 is not a number either, and is reported with its line.
    return path.open(encoding="utf-8-sig", errors="replace", newline="")


def _json_records(path: Path) -> Iterator[tuple[int, Record | ValueError]]:
    with _opened(path) as file:
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
        lines = csv.reader(file)
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
            if len(cells) == len(header):
                yield lines.line_num, dict(zip(header, cells, strict=True))
            elif cells:
                yield lines.line_num, ValueError(f"{len(cells)} cells for {len(header)} columns")


def _number(record: Record, name: str) -> float:
    """A finite number, from JSON or from a CSV cell."""
    value = _value(record, name)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} is {_shown(value)}, not a number") from None
    if not isfinite(number):
        raise ValueError(f"{name} is {_shown(value)}, not a number")
    return number


def _count(record: Record, name: str) -> int:
    """A whole number of tokens, from JSON or from a CSV cell."""
    number = _number(record, name)
    if number != int(number) or not 0 <= number <= MAX_TOKENS:
        raise ValueError(f"{name} is {_shown(record[name])}, not a whole number from 0 to {MAX_TOKENS}")
    return int(number)


def _value(record: Record, name: str) -> Any:
    value = record.get(name)
    if value is None or isinstance(value, bool):
        raise ValueError(f"{name} is missing" if value is None else f"{name} is {value}, not a number")
    return value


def _shown(value: object) -> str:
    return repr(value)[:60]
