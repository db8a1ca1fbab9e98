"""The orders to one worker: their sequence, their numbers, and the time for a worker to carry them out."""

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from contract.errors import DeadlineError, KvbatonError
from protos import worker_pb2 as pb
from router.workers import order_stream
from router.workers.order_stream import OrderStream

SECONDS = 0.02


def a_start(name: str) -> pb.Order:
    return pb.Order(decode=pb.DecodeRequest(task=pb.Task(request_id=name)))


def name_of(write: Callable[[pb.Order], object]) -> str:
    order = pb.Order()
    write(order)
    return order.decode.task.request_id


def nothing() -> None:
    """Do nothing."""


class Stream(OrderStream):
    """An order stream to a worker that is played by the test. rejected: names of the starts that were rejected."""

    def __init__(self, seconds: float = 60.0) -> None:
        super().__init__("w", seconds)
        self.rejected: list[str] = []
        self.errors: list[KvbatonError] = []

    def begin(self, name: str, on_sent: Callable[[], None] = nothing) -> None:
        def reject(error: KvbatonError) -> None:
            self.rejected.append(name)
            self.errors.append(error)

        self.start(lambda order: order.CopyFrom(a_start(name)), reject, on_sent)

    def stop(self, name: str) -> None:
        self.cancel(pb.CancelRequest(request_id=name))

    def sent(self) -> list[str]:
        """Return what the next message orders: names of starts, and of cancels behind a minus sign."""
        taken = self.next_message()
        orders = taken[0].orders.orders if taken else []
        return [
            f"-{order.cancel.request_id}" if order.HasField("cancel") else order.decode.task.request_id
            for order in orders
        ]


async def test_the_orders_of_one_moment_are_one_message() -> None:
    stream = Stream()
    stream.begin("a")
    stream.stop("a")
    stream.begin("b")
    assert stream.sent() == ["a", "b", "-a"]
    assert stream.next_message() is None
    stream.close()


async def test_cancels_of_many_answers_leave_room_for_starts() -> None:
    stream = Stream()
    for number in range(40):
        stream.stop(f"r{number}")
    assert len(stream.sent()) == order_stream._MAX_CANCELS
    stream.begin("other")
    assert stream.sent()[:2] == ["other", f"-r{order_stream._MAX_CANCELS}"]
    assert len(stream.sent()) == 40 - 2 * order_stream._MAX_CANCELS
    stream.close()


async def test_long_prompts_are_sent_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancel waits until all starts before it were sent."""
    monkeypatch.setattr(order_stream, "_MAX_BYTES", 1)
    stream = Stream()
    stream.begin("a")
    stream.begin("b")
    stream.stop("b")
    assert [stream.sent(), stream.sent()] == [["a"], ["b", "-b"]]
    stream.close()


async def test_messages_about_the_worker_go_first() -> None:
    stream = Stream()
    stream.begin("a")
    stream.send(pb.RouterMessage(undrain=pb.Undrain()))
    taken = stream.next_message()
    assert taken and taken[0].HasField("undrain")
    assert stream.sent() == ["a"]
    stream.close()


async def test_an_order_counts_as_sent_when_the_next_message_is_asked_for() -> None:
    stream = Stream()
    sent: list[str] = []
    stream.begin("a", lambda: sent.append("a"))
    messages = stream.messages()
    await anext(messages)
    assert not sent
    stream.close()
    with pytest.raises(StopAsyncIteration):
        await anext(messages)
    assert sent == ["a"]


async def test_starts_that_follow_each_other_closely_are_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one is sent at once, and those of a moment after it together."""
    monkeypatch.setattr(order_stream, "_GATHER_SECONDS", 0.05)
    stream = Stream()
    messages = stream.messages()
    stream.begin("a")
    first = await anext(messages)

    async def read() -> pb.RouterMessage:
        return await anext(messages)

    sending = asyncio.create_task(read())
    for name in "bc":
        await asyncio.sleep(0)
        stream.begin(name)
    names = [[each.decode.task.request_id for each in one.orders.orders] for one in (first, await sending)]
    assert names == [["a"], ["b", "c"]]
    stream.close()
    await messages.aclose()


@pytest.mark.parametrize("is_sent", [True, False])
async def test_a_start_that_is_not_carried_out_in_time_is_rejected(is_sent: bool) -> None:
    """The worker does not read its stream, or reads and does nothing."""
    stream = Stream(SECONDS)
    stream.begin("a")
    if is_sent:
        stream.sent()
    async with asyncio.timeout(5):
        while not stream.rejected:
            await asyncio.sleep(SECONDS)
    assert isinstance(stream.errors[0], DeadlineError)
    assert "worker w has not accepted" in stream.errors[0].message
    stream.begin("b")
    stream.begin("c")
    stream._awaited[-1].since += SECONDS  # it is ordered later, and not due together with the one before
    async with asyncio.timeout(5):
        while stream.rejected != ["a", "b", "c"]:
            await asyncio.sleep(SECONDS)
    stream.close()


async def test_nothing_is_rejected_after_the_end_of_the_stream() -> None:
    """The legs of a lost worker receive that it is lost."""
    stream = Stream(SECONDS)
    stream.begin("a")
    stream.close()
    await asyncio.sleep(3 * SECONDS)
    assert not stream.rejected


@given(st.lists(st.one_of(st.sampled_from(["start", "cancel", "send"]), st.integers(0, 4)), max_size=40))
@example(["cancel", "send", "start", "send", 1])
def test_exactly_the_starts_that_were_not_carried_out_are_awaited(steps: list[str | int]) -> None:
    """Numbers count starts and cancels in the sequence in which they are sent. A number carries that many orders out."""

    async def run() -> None:
        stream = Stream()
        known: list[str] = []
        carried_out = 0
        num_starts = 0
        for step in steps:
            if step == "start":
                stream.begin(f"r{num_starts}")
                num_starts += 1
            elif step == "cancel":
                stream.stop("x")
            elif step == "send":
                known += stream.sent()
            else:
                carried_out = min(carried_out + int(step), len(known))
                stream.on_carried_out(carried_out)
        done = {name for name in known[:carried_out] if not name.startswith("-")}
        awaited = [name_of(start.write) for start in stream._awaited]
        assert awaited == [f"r{number}" for number in range(num_starts) if f"r{number}" not in done]
        stream.close()

    asyncio.run(run())
