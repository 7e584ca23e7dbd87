from __future__ import annotations

from pdserve.planner.agenda import Agenda


def test_calls_are_made_in_order_of_time_and_then_of_entry() -> None:
    agenda, made = Agenda(), list[str]()
    for instant_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        agenda.at(instant_s, lambda name=name: made.append(name))  # type: ignore[misc]
    agenda.run()
    assert made == ["a", "b", "c"]
    assert agenda.now_s == 2.0


def test_what_lies_in_the_past_happens_now() -> None:
    agenda, seen_s = Agenda(), list[float]()
    agenda.at(2.0, lambda: agenda.at(1.0, lambda: seen_s.append(agenda.now_s)))
    agenda.run()
    assert seen_s == [2.0]


def test_nothing_happens_after_a_stop() -> None:
    agenda, made = Agenda(), list[int]()

    def stop() -> None:
        agenda.stop()
        agenda.at(3.0, lambda: made.append(3))

    agenda.at(1.0, stop)
    agenda.at(2.0, lambda: made.append(2))
    agenda.run()
    assert made == []
