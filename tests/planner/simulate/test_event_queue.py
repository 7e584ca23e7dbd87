from __future__ import annotations

from pdserve.planner.simulate.event_queue import EventQueue


def test_calls_are_made_in_order_of_time_and_then_of_entry() -> None:
    queue, made = EventQueue(), list[str]()
    for instant_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        queue.at(instant_s, lambda name=name: made.append(name))  # type: ignore[misc]
    queue.run()
    assert made == ["a", "b", "c"]
    assert queue.now_s == 2.0


def test_what_lies_in_the_past_happens_now() -> None:
    queue, seen_s = EventQueue(), list[float]()
    queue.at(2.0, lambda: queue.at(1.0, lambda: seen_s.append(queue.now_s)))
    queue.run()
    assert seen_s == [2.0]
