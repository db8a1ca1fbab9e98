"""Clients of ``benchmarks.router``: each request has a connection of its own, and little work beside the router's."""

import asyncio
import json
from typing import Any

import grpc.aio

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc

COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"
_PROMPT = "Once upon a time there was a router that"
_DONE = b"data: [DONE]"


class ClientError(Exception):
    """The router answered with an error, or not completely."""


class OpenStream:
    """A stream whose headers have arrived."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read_event(self) -> bytes:
        """Return the line of the next event. Raises ClientError at the end of the stream."""
        while line := await self._reader.readline():
            if line.startswith(b"data:"):
                return line
        raise ClientError("the stream ended without [DONE]")

    async def read_to_end(self) -> int:
        """Return the number of events before [DONE], and close the connection."""
        count = 0
        try:
            while not (await self.read_event()).startswith(_DONE):
                count += 1
        finally:
            self._writer.close()
        return count


async def open_stream(address: str, path: str, num_tokens: int) -> OpenStream:
    """Request a stream of ``num_tokens`` tokens. Raises ClientError."""
    reader, writer = await _send(address, path, {**_body(path, num_tokens), "stream": True})
    if b" 200 " not in (status := await reader.readline()):
        raise ClientError(f"{status!r}: {(await reader.read(1000))!r}")
    while (await reader.readline()).strip():
        pass
    return OpenStream(reader, writer)


async def stream(address: str, path: str, num_tokens: int) -> None:
    """Read a whole stream. Raises ClientError."""
    await (await open_stream(address, path, num_tokens)).read_to_end()


async def complete(address: str, path: str, num_tokens: int) -> None:
    """Request an answer that is not streamed. Raises ClientError."""
    reader, writer = await _send(address, path, _body(path, num_tokens), "Connection: close\r\n")
    answer = await reader.read()
    writer.close()
    if b" 200 " not in answer[:20]:
        raise ClientError(repr(answer[:1000]))


async def stream_grpc(address: str, num_tokens: int) -> None:
    """Read a whole stream of the gRPC API. Raises grpc.aio.AioRpcError."""
    request = pb.GenerateRequest(
        text=_PROMPT, sampling=pb.SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    )
    async with grpc.aio.insecure_channel(address) as channel:
        async for _ in inference_pb2_grpc.InferenceStub(channel).Generate(request):
            pass


async def _send(
    address: str, path: str, body: dict[str, Any], headers: str = ""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n{headers}"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return reader, writer


def _body(path: str, num_tokens: int) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": _PROMPT}]} if path == CHATS else {"prompt": _PROMPT}
    return {"model": "m", "max_tokens": num_tokens, "ignore_eos": True, **prompt}
