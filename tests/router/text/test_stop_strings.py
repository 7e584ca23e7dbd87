"""Stop strings are found however the text is split, and no part of one is returned before it is decided."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from pdserve.router.text.answer_text import StopStrings

TEXT = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    """Read character by character until the text ends in a stop string; cut the longest that it ends in."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@given(parts=st.lists(TEXT, max_size=8), stops=STOPS)
@example(parts=["abcb"], stops=["abcc", "cb", "bcb"])
@example(parts=["a", "a", "b"], stops=["aab", "b"])
def test_agrees_with_a_search_of_the_whole_text(parts: list[str], stops: list[str]) -> None:
    scanner = StopStrings(stops)
    text = ""
    for part in parts:
        text += scanner.push(part)
        if scanner.is_found:
            break
    if not scanner.is_found:
        text += scanner.flush()
    assert (text, scanner.is_found) == naive("".join(parts), stops)


@given(text=TEXT, stops=STOPS)
def test_holds_back_no_more_than_could_become_a_stop_string(text: str, stops: list[str]) -> None:
    scanner = StopStrings(stops)
    certain = scanner.push(text)
    held = scanner.flush()
    assert scanner.is_found or certain + held == text
    assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def pushed(scanner: StopStrings, text: str) -> tuple[str, bool]:
    return scanner.push(text), scanner.is_found


def test_without_stop_strings_text_passes() -> None:
    assert pushed(StopStrings([]), "anything") == ("anything", False)


def test_a_stop_string_in_three_pieces() -> None:
    scanner = StopStrings(["\n\nUser:"])
    assert pushed(scanner, "yes\n") == ("yes", False)
    assert pushed(scanner, "\nUs") == ("", False)
    assert pushed(scanner, "er: no") == ("", True)


def test_a_false_alarm_is_given_back() -> None:
    scanner = StopStrings(["STOP"])
    assert pushed(scanner, "go ST") == ("go ", False)
    assert pushed(scanner, "ATE") == ("STATE", False)
