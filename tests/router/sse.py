"""A strict reader of the streams of completions: what it accepts, every client can read."""

from __future__ import annotations

import json


def data_of(stream: bytes) -> list[str]:
    """Data of each event. Events are comments or one line of data; nothing of a choice follows its end; the last data
    are ``[DONE]``, once all choices have ended, or an error."""
    text = stream.decode()
    assert text.endswith("\n\n")
    lines = text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith(("data: ", ": ")) and not {"\r", "\n"} & {*line} for line in lines), lines
    events = [line.removeprefix("data: ") for line in lines if not line.startswith(":")]
    *chunks, last = events
    open_choices, ended = set[int](), set[int]()
    for chunk in map(json.loads, chunks):
        for choice in chunk["choices"]:
            assert choice["index"] not in ended, chunk
            (open_choices if choice["finish_reason"] is None else ended).add(choice["index"])
    if last == "[DONE]":
        assert open_choices <= ended
    else:
        assert set(json.loads(last)) == {"error"}
    return events
