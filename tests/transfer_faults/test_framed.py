"""The relay that parses frames: it repeats and reorders some, passes the rest, and loses none."""

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
    """A worker's control port that only receives."""

    def __init__(self) -> None:
        self.received: list[Message] = []
        self.changed = asyncio.Condition()

    async def receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameBuffer(65536)
        with suppress(OSError):
            while chunk := await reader.read(65536):
                async with self.changed:
                    self.received += [decode_message(frame) for frame in frames.feed(chunk)]
                    self.changed.notify_all()
        writer.transport.abort()


@asynccontextmanager
async def relayed(*tricks: Trick) -> AsyncIterator[tuple[FramedPort, Listener, asyncio.StreamWriter]]:
    listener, number = Listener(), free_port(WORKER_HOST)
    server = await asyncio.start_server(listener.receive, WORKER_HOST, number)
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


async def relayed_messages(tricks: list[Trick], sent: list[Message], num_received: int) -> list[Message]:
    """Return the output of a relay with these tricks for this input."""
    async with relayed(*tricks) as (_, listener, writer), asyncio.timeout(30):
        for message in sent:
            writer.write(encode_frame(message, 65536))
        async with listener.changed:
            await listener.changed.wait_for(lambda: len(listener.received) >= num_received)
        return listener.received


async def test_frames_pass_unchanged_without_tricks() -> None:
    assert await relayed_messages([], [FETCH, Ping(), CANCEL], 3) == [FETCH, Ping(), CANCEL]


async def test_a_frame_is_repeated_at_once_or_later() -> None:
    assert await relayed_messages([Trick("repeat", "fetch")], [FETCH, CANCEL], 3) == [FETCH, FETCH, CANCEL]
    late = await relayed_messages([Trick("repeat", "fetch", after=2)], [FETCH, CANCEL, RELEASE], 4)
    assert late == [FETCH, CANCEL, RELEASE, FETCH]


async def test_a_frame_is_swapped_with_the_next_one_and_pings_do_not_count() -> None:
    assert await relayed_messages([Trick("swap")], [FETCH, Ping(), CANCEL], 3) == [Ping(), CANCEL, FETCH]


async def test_a_delayed_frame_without_successor_is_sent_after_two_pings() -> None:
    """A relay whose stream is up loses no frame."""
    assert await relayed_messages([Trick("swap")], [FETCH, Ping(), Ping()], 3) == [Ping(), Ping(), FETCH]


async def test_the_handshake_is_not_changed_and_a_trick_waits_for_its_kind() -> None:
    sent: list[Message] = [Refused("internal", "no"), FETCH, CANCEL]
    tricks = [Trick("repeat", "cancel"), Trick("repeat", "refused")]
    assert await relayed_messages(tricks, sent, 4) == [*sent, CANCEL]


async def test_a_test_can_wait_for_a_frame_before_it_passes() -> None:
    async with relayed() as (port, listener, writer), asyncio.timeout(30):
        port.hold()
        waiting = asyncio.create_task(port.until_frame("fetch"))
        await asyncio.sleep(0)
        writer.write(encode_frame(FETCH, 65536))
        await waiting
        assert listener.received == []
        port.release()
        async with listener.changed:
            await listener.changed.wait_for(lambda: listener.received == [FETCH])
