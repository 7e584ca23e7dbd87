"""Answers of a real dispatcher: what one of them does when its tokens arrive touches no other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

import pytest

from pdserve.contracts.events import RequestKey, TokenEvent
from pdserve.contracts.request import FinishReason, Outcome, SamplingParams
from pdserve.proto.codec import pack_tokens
from pdserve.proto.v1 import worker_pb2
from pdserve.router.requests.request import RequestSpec
from pdserve.router.text.answer import WRITE_TURN_S, Answer, Choice, Generation, Outbox, TextDelta
from pdserve.router.text.answer_text import ByteDetokenizer, StopStrings
from tests.patience import HANG_S
from tests.router.rig import Rig, running_rig, with_workers
from tests.router.scripted_worker import ScriptedWorker, until


def byte_of(token: int) -> bytes:
    if token == ord("!"):
        raise LookupError("a token that cannot be read")
    return bytes([token])


def answer_of(*, stop: str = "", num_choices: int = 1, is_whole: bool = False) -> Answer:
    """Each of its tokens is a character."""
    return Answer(
        RequestSpec(
            prompt_tokens=(1, 2, 3),
            sampling=SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True),
            arrived_s=time.monotonic(),
            num_choices=num_choices,
        ),
        [
            Choice(index, ByteDetokenizer(byte_of, (), ()), StopStrings((stop,) if stop else ()), is_whole=is_whole)
            for index in range(num_choices)
        ],
    )


def generation_of(rig: Rig, *answers: Answer, outbox: Outbox | None = None) -> Generation:
    return Generation(rig.dispatcher, answers, outbox or Outbox())


def send_frame(worker: ScriptedWorker, *said: tuple[worker_pb2.Request, int, str], is_last: bool = False) -> None:
    """Send one frame with the text of each request from an index on, one token of each in turn."""
    length = max(len(text) for _, _, text in said)
    events = [
        TokenEvent(
            RequestKey(0, request.request_id, request.attempt),
            0,
            first + index,
            ord(text[index]),
            None,
            FinishReason.LENGTH if is_last and index == len(text) - 1 else FinishReason.NONE,
        )
        for index in range(length)
        for request, first, text in said
        if index < len(text)
    ]
    worker.send(worker_pb2.StepFrame(tokens=pack_tokens(events)))


async def taken(generation: Generation) -> list[TextDelta]:
    return await asyncio.wait_for(generation.next(), HANG_S)


@with_workers("mixed-0")
async def test_tokens_of_all_prompts_that_come_together_are_taken_together(m: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(m)
        with generation_of(rig, answer_of(), answer_of()) as generation:
            first, second = await m.next_submit(), await m.next_submit()
            send_frame(m, (first, 0, "ab"), (second, 0, "xy"))
            assert [delta.text for delta in await taken(generation)] == ["a", "x", "b", "y"]
            send_frame(m, (first, 2, "c"))
            assert [delta.text for delta in await taken(generation)] == ["c"]
            send_frame(m, (first, 3, "d"), (second, 2, "zz"), is_last=True)
            assert [(delta.text, delta.end) for delta in await taken(generation)] == [
                ("d", "length"),
                ("z", None),
                ("z", "length"),
            ]
            assert await taken(generation) == []


@with_workers("mixed-0")
async def test_a_token_that_cannot_be_read_fails_its_client_alone(m: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(m)
        broken, beside, other = answer_of(), answer_of(), answer_of()
        with generation_of(rig, other) as whole:
            with generation_of(rig, broken, beside) as generation:
                requests = [await m.next_submit() for _ in range(3)]
                send_frame(m, (requests[1], 0, "a!b"), (requests[2], 0, "def"), (requests[0], 0, "abc"))
                assert "".join(delta.text for delta in await taken(whole)) == "abc"
                assert [delta.text for delta in await taken(generation)] == ["a", "d"]
                with pytest.raises(LookupError):
                    await taken(generation)
            assert (broken.outcome, beside.outcome, other.outcome) == (Outcome.CANCELLED, Outcome.CANCELLED, None)
            cancels = [(await m.next_command("cancel")).cancel.request_id for _ in range(2)]
            assert cancels == [requests[1].request_id, requests[2].request_id]
            send_frame(m, (requests[0], 3, "d"), is_last=True)
            assert [delta.end for delta in await taken(whole)] == ["length"]
        assert rig.cluster.workers["mixed-0"].is_up
        assert other.outcome is Outcome.FINISHED


@with_workers("mixed-0")
async def test_workers_end_a_choice_at_its_stop_string_though_nobody_reads(m: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(m)
        answer = answer_of(stop="bc", num_choices=2)
        with generation_of(rig, answer) as generation:
            first = await m.next_submit()
            send_frame(m, (first, 0, "a"))
            second = await m.next_submit()
            send_frame(m, (first, 1, "bcdef"), (second, 0, "xy"))
            assert (await m.next_command("cancel")).cancel.request_id == first.request_id
            send_frame(m, (second, 2, "z"), is_last=True)
            await until(lambda: answer.outcome is Outcome.FINISHED)
            texts = ["".join(delta.text for delta in await taken(generation) if delta.choice == 0)]
        assert texts == ["a"]
        assert answer.num_completion_tokens == len("abc") + len("xyz")


@pytest.mark.parametrize("is_waiting", [False, True])
def test_a_reader_who_is_done_before_workers_know_finishes_the_request(is_waiting: bool) -> None:
    @with_workers("mixed-0")
    async def run(m: ScriptedWorker) -> None:
        async with running_rig() as rig:
            await rig.up(m)
            answer = answer_of(stop="b", num_choices=2)

            async def read() -> None:
                with generation_of(rig, answer) as generation:
                    while not is_waiting and not all(choice.is_over for choice in answer.choices):  # noqa: ASYNC110  # hooks send none
                        await asyncio.sleep(0)
                    while await generation.next():
                        pass

            reading = asyncio.create_task(read())
            first = await m.next_submit()
            send_frame(m, (first, 0, "a"))
            second = await m.next_submit()
            send_frame(m, (first, 1, "b"), (second, 0, "b"))
            await asyncio.wait_for(reading, HANG_S)
            assert answer.outcome is Outcome.FINISHED

    run()


@with_workers("mixed-0")
async def test_whole_answers_have_the_text_of_streams_in_few_pieces(m: ScriptedWorker) -> None:
    text = "".join(chr(ord("a") + index % 26) for index in range(1000)) + "|" + "never"
    async with running_rig() as rig:
        await rig.up(m)
        pieces = {}
        for is_whole in (False, True):
            arrived: list[int] = []
            answer = answer_of(stop="|", is_whole=is_whole)
            with Generation(rig.dispatcher, [answer], Outbox(), arrived.append) as generation:
                request = await m.next_submit()
                for first in range(0, len(text), 10):
                    send_frame(m, (request, first, text[first : first + 10]))
                pieces[is_whole] = list[str]()
                while batch := await taken(generation):
                    pieces[is_whole] += [delta.text for delta in batch]
            assert arrived == [0] * 1001
            await m.next_command("cancel")
        assert "".join(pieces[False]) == "".join(pieces[True]) == text[:1000]
        assert len(pieces[False]) == 1001
        assert len(pieces[True]) <= 5


@with_workers("mixed-0")
async def test_text_is_written_as_it_arrives_while_the_writer_takes_it_and_is_returned_else(m: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(m)
        written: list[str] = []

        def write(batch: Sequence[TextDelta]) -> bool:
            written.append("".join(delta.text for delta in batch))
            if "?" in written[-1]:
                raise LookupError("a text that cannot be written")
            return "|" not in written[-1]

        async def rest(generation: Generation) -> str:
            return "".join(delta.text for delta in await asyncio.wait_for(generation.next(write), HANG_S))

        outbox = Outbox()
        with (
            generation_of(rig, answer_of(), outbox=outbox) as generation,
            generation_of(rig, answer_of(), outbox=outbox) as other,
        ):
            requests = [await m.next_submit() for _ in range(2)]
            reading, beside = asyncio.create_task(rest(generation)), asyncio.create_task(rest(other))
            await asyncio.sleep(0)
            send_frame(m, (requests[0], 0, "ab"))
            await until(lambda: written == ["ab"])
            send_frame(m, (requests[0], 2, "c|"))
            assert await reading == "c|"
            send_frame(m, (requests[0], 4, "d?"), (requests[1], 0, "xy"))
            with pytest.raises(LookupError):
                await rest(generation)
            await until(lambda: written == ["ab", "c|", "d?", "xy"])
            send_frame(m, (requests[1], 2, "|"))
            assert await beside == "|"
        with generation_of(rig, answer_of()) as generation:
            last = await m.next_submit()
            reading = asyncio.create_task(rest(generation))
            await asyncio.sleep(0)
            send_frame(m, (last, 0, "yz"), is_last=True)
            assert await reading == "yz"
            assert await taken(generation) == []


@with_workers("mixed-0")
async def test_the_event_loop_has_other_turns_between_writes_of_a_frame(m: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(m)
        said: list[str] = []

        def write(batch: Sequence[TextDelta]) -> bool:
            said.append("write")
            asyncio.get_running_loop().call_soon(said.append, "turn")
            time.sleep(WRITE_TURN_S)
            return True

        both = partial(generation_of, rig, outbox=Outbox())
        with both(answer_of()) as one, both(answer_of()) as two:
            requests = [await m.next_submit() for _ in range(2)]
            readings = [asyncio.create_task(each.next(write)) for each in (one, two)]
            await asyncio.sleep(0)
            send_frame(m, (requests[0], 0, "a"), (requests[1], 0, "b"))
            await until(lambda: len(said) == 4)
            assert said == ["write", "turn", "write", "turn"]
            for reading in readings:
                reading.cancel()
