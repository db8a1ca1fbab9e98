"""The relay that parses frames: it repeats and reorders some, passes the rest, and loses nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from kv_transfer.links.framing import FrameBuffer, encode_frame
from kv_transfer.protocol.messages import (
    CancelFetch,
    FetchBlocks,
    Message,
    Ping,
    Refused,
    ReleaseLease,
    decode_message,
)
from tests.chaos.fleet import LINK_HOST, WORKER_HOST, free_port
from tests.transfer_faults.framed import FramedPort, Trick

FETCH, CANCEL, RELEASE = FetchBlocks("t", 0), CancelFetch("t", 0), ReleaseLease("t", 0)


class Listener:
    """A worker's control port that only listens."""

    def __init__(self) -> None:
        self.heard: list[Message] = []
        self.changed = asyncio.Condition()

    async def hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameBuffer(65536)
        with suppress(OSError):
            while chunk := await reader.read(65536):
                async with self.changed:
                    self.heard += [decode_message(frame) for frame in frames.feed(chunk)]
                    self.changed.notify_all()
        writer.transport.abort()


@asynccontextmanager
async def relayed(*tricks: Trick) -> AsyncIterator[tuple[FramedPort, Listener, asyncio.StreamWriter]]:
    listener, number = Listener(), free_port(WORKER_HOST)
    server = await asyncio.start_server(listener.hear, WORKER_HOST, number)
    port = FramedPort(LINK_HOST, WORKER_HOST, number)
    port.tricks.extend(tricks)
    await port.start()
    _, writer = await asyncio.open_connection(LINK_HOST, number)
    try:
        yield port, listener, writer
    finally:
        writer.transport.abort()
        await port.stop()
        server.close()


async def heard_of(tricks: list[Trick], said: list[Message], num_heard: int) -> list[Message]:
    """Return the output of a relay with these tricks for this input."""
    async with relayed(*tricks) as (_, listener, writer), asyncio.timeout(30):
        for message in said:
            writer.write(encode_frame(message, 65536))
        async with listener.changed:
            await listener.changed.wait_for(lambda: len(listener.heard) >= num_heard)
        return listener.heard


async def test_frames_pass_unchanged_where_no_trick_waits() -> None:
    assert await heard_of([], [FETCH, Ping(), CANCEL], 3) == [FETCH, Ping(), CANCEL]


async def test_a_frame_comes_twice_at_once_or_late() -> None:
    assert await heard_of([Trick("repeat", "fetch")], [FETCH, CANCEL], 3) == [FETCH, FETCH, CANCEL]
    late = await heard_of([Trick("repeat", "fetch", after=2)], [FETCH, CANCEL, RELEASE], 4)
    assert late == [FETCH, CANCEL, RELEASE, FETCH]


async def test_a_frame_comes_behind_the_next_one_and_pings_do_not_count() -> None:
    assert await heard_of([Trick("swap")], [FETCH, Ping(), CANCEL], 3) == [Ping(), CANCEL, FETCH]


async def test_a_frame_that_nobody_follows_comes_after_two_pings() -> None:
    """A stream that is up loses nothing."""
    assert await heard_of([Trick("swap")], [FETCH, Ping(), Ping()], 3) == [Ping(), Ping(), FETCH]


async def test_the_handshake_is_left_alone_and_a_trick_waits_for_its_kind() -> None:
    said: list[Message] = [Refused("internal", "no"), FETCH, CANCEL]
    tricks = [Trick("repeat", "cancel"), Trick("repeat", "refused")]
    assert await heard_of(tricks, said, 4) == [*said, CANCEL]


async def test_a_frame_can_be_waited_for_before_it_passes() -> None:
    async with relayed() as (port, listener, writer), asyncio.timeout(30):
        port.hold()
        waiting = asyncio.create_task(port.until_frame("fetch"))
        await asyncio.sleep(0)
        writer.write(encode_frame(FETCH, 65536))
        await waiting
        assert listener.heard == []
        port.release()
        async with listener.changed:
            await listener.changed.wait_for(lambda: listener.heard == [FETCH])
