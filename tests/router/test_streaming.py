"""A client that stops reading is disconnected at any point of the stream, also at its end."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from contract.errors import CancelledError
from router.http.streaming import EventStream
from serving.http_server import start_http

End = Callable[[EventStream], Awaitable[None]]


async def done(stream: EventStream) -> None:
    with pytest.raises(CancelledError, match="has read nothing"):
        await stream.end()


async def fail(stream: EventStream) -> None:
    await stream.fail({"error": {}})


@pytest.mark.parametrize("end", [done, fail])
async def test_the_end_of_a_stream_does_not_wait_for_a_client_that_reads_nothing(end: End) -> None:
    """The last bytes are too few for aiohttp to wait for the client when they are written: the end itself waits."""
    ended = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        stream = EventStream(request, {}, 0.2)
        await stream.send([{"text": "x" * 66_000}])
        await stream.send([{"text": "x" * 60_000}])
        await end(stream)
        ended.set()
        return stream.response

    app = web.Application()
    app.router.add_get("/", answer)
    server = await start_http(app, "127.0.0.1:0", shutdown_timeout_seconds=0.1)
    host, port = server.address.split(":")
    try:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            async with asyncio.timeout(20):
                await ended.wait()
            await asyncio.to_thread(_read_to_the_end, client)
    finally:
        await server.close()


def _read_to_the_end(client: socket.socket) -> None:
    """Return when the server has closed the connection, in order or not."""
    client.settimeout(20)
    try:
        while client.recv(65536):
            pass
    except ConnectionResetError:
        return


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_events_that_pass_aiohttps_writer_are_framed_as_its_own(version: str) -> None:
    """The first event is written by aiohttp; those that find room are not."""

    async def answer(request: web.Request) -> web.StreamResponse:
        stream = EventStream(request, {}, 20.0)
        await stream.send([{"n": 0}])
        async with asyncio.timeout(20):
            while not stream.has_room:
                await asyncio.sleep(0)
        stream.send_now([{"n": 1}, {"n": 2}])
        await stream.end()
        return stream.response

    app = web.Application()
    app.router.add_get("/", answer)
    server = await start_http(app, "127.0.0.1:0")
    try:
        reader, writer = await asyncio.open_connection(*server.address.split(":"))
        writer.write(f"GET / HTTP/{version}\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        async with asyncio.timeout(20):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    finally:
        await server.close()
    assert b" 200 " in head
    events = [b'data: {"n":0}\n\n', b'data: {"n":1}\n\ndata: {"n":2}\n\n', b"data: [DONE]\n\n"]
    chunks = [*(b"%x\r\n%b\r\n" % (len(event), event) for event in events), b"0\r\n\r\n"]
    assert body == b"".join(chunks if version == "1.1" else events)
