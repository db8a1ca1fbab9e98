"""Tokens that reach a waiting client in the turn of the event loop in which they arrive, without waking its task."""

import asyncio
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from contract.errors import InternalError
from protos import worker_pb2 as pb
from router.answers.answer import Delta
from router.intake.request import GenerationRequest
from router.tokens.inbox import Inbox, UnreadAccount, UnreadBytes
from tests.fakes.router.script import Script
from tests.router.cluster import PAIR, Cluster, running_cluster
from tests.router.test_ends import TEXT, nothing_is_left
from tests.text.tiny_model import END, byte_ids

ANSWER = "the quick brown fox jumps over the lazy dog"
LONG = [*byte_ids(ANSWER.encode()), END]


class SometimesFull:
    """A sink that has room for about half of the deltas, at random. order: shared with the reader of the stream."""

    def __init__(self, order: list[Delta], random: Random | None) -> None:
        self._order = order
        self._random = random
        self.num_put = 0

    @property
    def has_room(self) -> bool:
        return self._random is None or self._random.random() < 0.5

    def put(self, delta: Delta) -> None:
        self.num_put += 1
        self._order.append(delta)


async def answered(
    cluster: Cluster, random: Random | None, is_slow: bool = False, **fields: object
) -> tuple[list[Delta], int]:
    """Return the deltas of one answer in the order in which sink and reader got them, and how many the sink got."""
    order: list[Delta] = []
    sink = SometimesFull(order, random)
    request = GenerationRequest(request_id=f"r{Random().random()}", prompt="x", max_tokens=100, **fields)  # type: ignore[arg-type]
    async with cluster.service._path.pipeline.generate(request, sink=sink) as deltas:
        async for delta in deltas:
            order.append(delta)
            if is_slow:
                await asyncio.sleep(0.003)
    return order, sink.num_put


def is_whole(order: list[Delta]) -> None:
    tokens = [token for delta in order for token in delta.tokens]
    assert [token.index for token in tokens] == list(range(len(tokens)))
    assert "".join(delta.text for delta in order) == ANSWER
    assert [bool(delta.prompt) for delta in order] == [True, *[False] * (len(order) - 1)]
    assert [delta for delta in order if delta.finish_reason] == order[-1:]
    assert order[-1].usage
    assert order[-1].usage.num_completion_tokens == len(LONG)


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize("seed", range(4))
async def test_tokens_come_in_order_whether_the_sink_has_room_or_not(seed: int, is_slow: bool) -> None:
    """The sink gets some of them and the reader the others; also if another worker continues the answer."""
    random = Random(seed)

    def script(task: pb.Task) -> Script:
        die_at = 20 if task.attempt == 0 else None
        return Script(
            tokens=LONG, token_delay_seconds=0.001, die_at=die_at, tokens_per_step=random.choice((1, 3))
        )

    async with running_cluster(script, PAIR) as cluster:
        await cluster.add(PAIR[1], "decode-1")
        order, num_put = await answered(cluster, random, is_slow)
        is_whole(order)
        assert 0 < num_put < len(order)
        await nothing_is_left(cluster)


async def test_the_sink_gets_all_but_the_end_while_the_reader_waits() -> None:
    async with running_cluster(Script(tokens=LONG, token_delay_seconds=0.001), PAIR) as cluster:
        order, num_put = await answered(cluster, None)
        is_whole(order)
        assert num_put == len(order) - 1


async def test_a_stop_string_ends_an_answer_through_its_reader() -> None:
    async with running_cluster(Script(tokens=LONG, token_delay_seconds=0.001), PAIR) as cluster:
        order, num_put = await answered(cluster, None, stop=("fox",))
        assert num_put == 0
        assert "".join(delta.text for delta in order) == "the quick brown "
        await nothing_is_left(cluster)


async def test_a_sink_that_fails_ends_its_own_request_only() -> None:
    """The error reaches the reader, and the worker's stream goes on."""

    class Broken(SometimesFull):
        def put(self, delta: Delta) -> None:
            raise InternalError("this sink is broken")

    async with running_cluster(Script(tokens=LONG, token_delay_seconds=0.001), PAIR) as cluster:
        request = GenerationRequest(request_id="r", prompt="x", max_tokens=100)
        with pytest.raises(InternalError, match="this sink is broken"):
            async with cluster.service._path.pipeline.generate(request, sink=Broken([], None)) as deltas:
                async for _ in deltas:
                    pass
        status, answer = await cluster.post(TEXT, {"prompt": "x", "max_tokens": 100})
        assert (status, answer["choices"][0]["text"]) == (200, ANSWER)
        await nothing_is_left(cluster)


async def test_a_streamed_answer_is_the_same_with_and_without_stop_strings() -> None:
    """With a stop string every token wakes the request's task; without one nearly none does."""
    async with running_cluster(Script(tokens=LONG, token_delay_seconds=0.001), PAIR) as cluster:
        body = {"prompt": "x", "max_tokens": 100}
        found = [await cluster.stream(TEXT, {**body, **stop}) for stop in ({}, {"stop": ["never"]})]
        texts = ["".join(event["choices"][0]["text"] for event in events[:-1]) for events in found]
        assert texts == [ANSWER, ANSWER]


class Reader:
    """Reads an inbox now and then. got: the items in the order in which they reached the sink or the reader."""

    def __init__(self) -> None:
        self.inbox: Inbox[int] = Inbox(_account(), 1000, lambda: None)
        self.got: list[int] = []
        self.has_room = True
        self.num_items = 0
        self._reading: asyncio.Task[int] | None = None

    def put(self) -> None:
        if not self.inbox.offer(self.num_items):
            self.inbox.put(self.num_items, 1)
        self.num_items += 1

    def read(self) -> None:
        self._reading = self._reading or asyncio.create_task(self.inbox.get(self._take))

    def put_while_full(self) -> None:
        self.has_room = False
        self.put()
        self.has_room = True

    def collect(self) -> None:
        if self._reading and self._reading.done():
            self.got.append(self._reading.result())
            self._reading = None

    async def read_all(self) -> None:
        while len(self.got) < self.num_items:
            self.read()
            assert self._reading
            await asyncio.wait({self._reading})
            self.collect()
        if self._reading:
            self._reading.cancel()

    def _take(self, item: int) -> bool:
        if self.has_room:
            self.got.append(item)
        return self.has_room


@given(st.lists(st.sampled_from(["put", "put_while_full", "read", "turn"]), max_size=40))
@example(["read", "turn", "put_while_full", "put"])
def test_nothing_overtakes_an_unread_item(events: list[str]) -> None:
    """Items reach sink and reader together in the order in which they came, each once."""

    async def run() -> None:
        reader = Reader()
        for event in events:
            reader.collect()
            if event == "turn":
                await asyncio.sleep(0)
            else:
                getattr(reader, event)()
        reader.collect()
        await reader.read_all()
        assert reader.got == list(range(reader.num_items))

    asyncio.run(run())


async def test_a_cancelled_reader_takes_nothing() -> None:
    inbox: Inbox[int] = Inbox(_account(), 1000, lambda: None)
    got: list[int] = []

    def consume(item: int) -> bool:
        got.append(item)
        return True

    reading = asyncio.create_task(inbox.get(consume))
    await asyncio.sleep(0)
    reading.cancel()
    assert not inbox.offer(1)
    await asyncio.wait({reading})
    assert not inbox.offer(2)
    assert got == []


def _account() -> UnreadAccount:
    unread = UnreadBytes(1000, 10_000)
    return unread.open("t")
