"""A TCP relay between two hosts whose connections can be cut, held, slowed down and garbled."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

_CHUNK_BYTES = 65536
_NO_LINGER = struct.pack("ii", 1, 0)

Which = Callable[[int], bool]
"""Selects connections by the port of their client."""


def every(_: int) -> bool:
    """Select all connections."""
    return True


def none(_: int) -> bool:
    """Select no connection."""
    return False


async def until_one_ends(*ways: Coroutine[Any, Any, None]) -> None:
    """Run the directions of a connection until one of them has ended, and end the others."""
    tasks = [asyncio.create_task(way) for way in ways]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class FaultyPort:
    """Forwards one port. Its switches affect every connection, open ones included.

    is_open: bytes pass; while cleared, they wait in both directions (a black hole).
    lets_answers_pass: the same for the answers' direction only.
    refuses: which new connections are closed at once.
    delay_seconds: before each chunk. flip_after_bytes: one byte of the answers after this many is garbled, once.
    """

    def __init__(self, listen_host: str, target_host: str, port: int) -> None:
        self._listen_host, self._target_host, self.port = listen_host, target_host, port
        self.is_open = asyncio.Event()
        self.is_open.set()
        self._num_holds = 0
        self.lets_answers_pass = asyncio.Event()
        self.lets_answers_pass.set()
        self.refuses: Which = none
        self.delay_seconds = 0.0
        self.flip_after_bytes: int | None = None
        self.num_flips = 0
        self.num_bytes_back = 0
        self._writers: dict[asyncio.StreamWriter, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.moved = asyncio.Event()

    async def start(self) -> None:
        """Start to listen."""
        self._server = await asyncio.start_server(self._relay, self._listen_host, self.port)

    async def stop(self) -> None:
        """Close every connection and the port."""
        if self._server:
            self._server.close()
        self.cut()
        for task in set(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def hold(self) -> None:
        """Let no byte pass until ``release`` was called as many times."""
        self._num_holds += 1
        self.is_open.clear()

    def release(self) -> None:
        """End one hold."""
        self._num_holds -= 1
        if not self._num_holds:
            self.is_open.set()

    def cut(self, which: Which = every) -> None:
        """Reset open connections."""
        for writer in [
            writer for writer, port in self._writers.items() if which(port) and not writer.is_closing()
        ]:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        this = asyncio.current_task()
        assert this is not None
        self._tasks.add(this)
        try:
            with suppress(OSError):
                await self._join(reader, writer)
        except asyncio.CancelledError:
            if self._server and self._server.is_serving():
                raise
        finally:
            self._tasks.discard(this)
            writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = writer.get_extra_info("peername")[1]
        if self.refuses(client):
            return
        there, back = await asyncio.open_connection(self._target_host, self.port)
        self._writers |= {writer: client, back: client}
        try:
            await until_one_ends(
                self._pump(reader, back, is_answer=False), self._pump(there, writer, is_answer=True)
            )
        finally:
            del self._writers[writer], self._writers[back]
            back.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool
    ) -> None:
        while chunk := await reader.read(_CHUNK_BYTES):
            if self.delay_seconds:
                await asyncio.sleep(self.delay_seconds)
            if is_answer:
                self.num_bytes_back += len(chunk)
                self.moved.set()
                chunk = self._garble(chunk)
            if is_answer:
                await self.lets_answers_pass.wait()
            await self.is_open.wait()
            writer.write(chunk)
            await writer.drain()

    def _garble(self, chunk: bytes) -> bytes:
        place = self.flip_after_bytes
        if place is None:
            return chunk
        if place >= len(chunk):
            self.flip_after_bytes = place - len(chunk)
            return chunk
        self.flip_after_bytes = None
        self.num_flips += 1
        return chunk[:place] + bytes([chunk[place] ^ 0x10]) + chunk[place + 1 :]


class FaultyLink:
    """The ports of one worker, as others reach them."""

    def __init__(self, grpc: FaultyPort, control: FaultyPort, data: FaultyPort) -> None:
        self.grpc, self.control, self.data = grpc, control, data

    @property
    def kv_ports(self) -> Sequence[FaultyPort]:
        """The ports that other workers dial."""
        return self.control, self.data

    def hold(self) -> None:
        """Hold all messages between the workers until ``release``."""
        for port in self.kv_ports:
            port.hold()

    def release(self) -> None:
        """Let all messages pass again."""
        for port in self.kv_ports:
            port.release()

    def cut(self) -> None:
        """Reset the connections between the workers."""
        for port in self.kv_ports:
            port.cut()


@asynccontextmanager
async def faulty_link(
    listen_host: str, target_host: str, grpc: int, control: int, data: int
) -> AsyncIterator[FaultyLink]:
    """Forward the three ports of a worker that binds to ``target_host`` and advertises ``listen_host``."""
    ports = [FaultyPort(listen_host, target_host, port) for port in (grpc, control, data)]
    try:
        for port in ports:
            await port.start()
        yield FaultyLink(*ports)
    finally:
        for port in ports:
            await port.stop()
