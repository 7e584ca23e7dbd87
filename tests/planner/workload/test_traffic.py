from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.contracts.deployment import SloConfig
from pdserve.planner.workload.presets import PRESETS
from pdserve.planner.workload.traffic import Traffic, fixed_traffic, named_traffic


def a_trace(folder: Path, *lines: str) -> Path:
    file = folder / "calls.csv"
    file.write_text("\n".join(("arrived_s,prompt_tokens,output_tokens", *lines)) + "\n")
    return file


def test_a_preset_is_found_by_its_name() -> None:
    traffic = named_traffic("chat", max_model_len=4096)
    assert traffic.workload is PRESETS["chat"]
    assert (traffic.max_requests, traffic.recorded_rate(5, 0), traffic.at_most(10**6)) == (None, None, 10**6)
    assert traffic.usual_slo == PRESETS["chat"].slo
    longest = max(each.num_prompt_tokens + each.num_output_tokens for each in traffic.draw(500, 0).conversations)
    assert longest == 4096


def test_a_trace_is_found_by_its_path(tmp_path: Path) -> None:
    file = a_trace(tmp_path, "0,100,10", "1,200,20", "2.5,300,30")
    traffic = named_traffic(str(file), max_model_len=4096)
    drawn = traffic.draw(3, 0).at_rate(traffic.recorded_rate(3, 0) or 0)
    assert [each.arrived_s for each in drawn] == pytest.approx([0, 1, 2.5])
    assert (traffic.max_requests, traffic.at_most(10), traffic.at_most(2)) == (3, 3, 2)
    assert traffic.usual_slo == SloConfig()


def test_a_trace_without_times_arrives_at_random(tmp_path: Path) -> None:
    traffic = named_traffic(str(a_trace(tmp_path, "5,100,10")), max_model_len=4096)
    assert (traffic.recorded_rate(1, 0), traffic.max_requests) == (None, 1)
    assert "Poisson arrivals" in traffic.described()[0]


def test_a_name_that_is_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no preset 'chatt': use chat"):
        named_traffic("chatt", max_model_len=4096)
    with pytest.raises(ValueError, match=f"cannot read {tmp_path}/absent.csv: No such file"):
        named_traffic(f"{tmp_path}/absent.csv", max_model_len=4096)
    with pytest.raises(ValueError, match=f"cannot read {tmp_path}: Is a directory"):
        named_traffic(str(tmp_path), max_model_len=4096)


def test_a_malformed_line_is_named_or_skipped_and_counted(tmp_path: Path) -> None:
    file = a_trace(tmp_path, "0,100,10", "1,many,20", "2,300,30")
    with pytest.raises(ValueError, match=rf"{file}:3: .*\(--lenient\)"):
        named_traffic(str(file), max_model_len=4096)
    traffic = named_traffic(str(file), max_model_len=4096, lenient=True)
    _, (_, note) = traffic.described()
    assert note.startswith(f"Trace: 1 malformed skipped, the first is {file}:3:")


def test_words_tell_lengths_arrivals_and_caches(tmp_path: Path) -> None:
    file = a_trace(tmp_path, "0,100,10", "1,200,20", "2.5,300,30")
    words, notes = named_traffic(str(file), max_model_len=4096).described()
    assert words == ("calls: prompts of 200 tokens and answers of 20 on average, in the pattern of the trace")
    assert notes == ("Trace: 3 requests, 0.8 requests/s over 2.5 s.",)
    words, _ = named_traffic("agent", max_model_len=65536).described()
    assert "Poisson arrivals; up to 9" in words
    assert words.endswith("% of prompt tokens could come from a cache")


def test_what_the_model_cuts_off_is_told() -> None:
    _, notes = named_traffic("chat", max_model_len=1000).described()
    assert notes[0].startswith("Shortened to 1000 tokens: ")
    assert " prompts shortened" in notes[0]


@pytest.mark.parametrize(("variation", "said"), [(0.0, "evenly spaced"), (2.0, "gaps with a burstiness of 0.25")])
def test_arrivals_can_be_of_another_kind(variation: float, said: str) -> None:
    steady: Traffic = fixed_traffic(100, 10, max_model_len=4096)
    other = steady.bursty(variation)
    assert said in other.described()[0]
    sample, again = steady.draw(50, 0), other.draw(50, 0)
    assert sample.conversations == again.conversations
    assert (sample.unit_times != again.unit_times).all()


def test_clients_limit_every_turn(tmp_path: Path) -> None:
    traffic = named_traffic("agent", max_model_len=65536).limited(5000)
    assert traffic.described()[0].endswith("; clients limit answers to 5000 tokens")
    requests = traffic.draw(100, 0).at_rate(3.0)
    assert {turn.max_tokens for request in requests for turn in request.turns()} == {5000}
    unlimited = named_traffic("agent", max_model_len=65536).draw(100, 0).at_rate(3.0)
    assert [request.limited(0) for request in requests] == unlimited
    short = named_traffic(str(a_trace(tmp_path, "0,100,10")), max_model_len=4096).limited(50)
    assert short.with_at_least(2).draw(2, 0).conversations[1].max_tokens == 50


def test_lengths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="4000 prompt tokens and 97 answer tokens exceed max_model_len 4096"):
        fixed_traffic(4000, 97, max_model_len=4096)
    assert fixed_traffic(4000, 96, max_model_len=4096).draw(1, 0).num_requests == 1


def test_a_short_trace_lends_its_lengths(tmp_path: Path) -> None:
    traffic = named_traffic(str(a_trace(tmp_path, "0,100,10", "1,200,20", "2.5,300,30")), max_model_len=4096)
    assert traffic.with_at_least(3) is traffic
    many = traffic.with_at_least(100)
    lengths = {(each.num_prompt_tokens, each.num_output_tokens) for each in many.draw(100, 0).conversations}
    assert lengths == {(100, 10), (200, 20), (300, 30)}
    words, (read, note) = many.described()
    assert read == "Trace: 3 requests, 0.8 requests/s over 2.5 s."
    assert "Poisson arrivals" in words
    assert note.startswith("The trace has 3 requests, too few to plan by")
