"""The attacks, one coroutine each. Each ends by itself, even if the service does not answer.

``python -m tests.chaos.attacks.weapons NAME TARGET`` attacks for at least ``attack_seconds``; TARGET is a Target as JSON.
An attacker is a process of its own, to be started with the lowest priority in a session of the lowest weight: it represents
another machine, whose work must not slow down the service.
"""

import asyncio
import gzip
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from itertools import cycle
from typing import Any

import aiohttp
import grpc.aio

from kv_transfer.links.framing import as_frame
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.chaos.attacks.target import MODEL, Target
from tests.http2 import ENDLESS, HELLO, endless, whole_call

_BODY_BYTES = 8 * 2**20 - 2**12
_PATIENCE_SECONDS = 60.0
_ADDRESS = ("127.0.0.66", 0)
"""The source address of attackers: the service may block an address, and other clients must not be affected."""

Weapon = Callable[[Target], Awaitable[None]]


async def exploding_regexes(target: Target) -> None:
    """Send 60 different regular expressions, each of which is large once it is unrolled."""
    bodies = [_question(guided_regex=f"(a{{{1000 + number}}}){{1000}}") for number in range(60)]
    await _post_all(target, "/v1/completions", bodies, at_once=8)


async def long_messages(target: Target) -> None:
    """Send six messages of 8 MiB at once, far too long for the model; three times."""
    text = "The old moose sat near the lake. " * (_BODY_BYTES // 33)
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}]}
    await _post_all(target, "/v1/chat/completions", [body] * 18, at_once=6)


async def unread_choices(target: Target) -> None:
    """Open two streams of 128 choices with log probabilities, and read nothing from them."""
    body = _question(n=128, logprobs=5, max_tokens=200, stream=True, ignore_eos=True)
    await _hold_unread(target, "/v1/completions", [body] * 2)


async def unread_long_choices(target: Target) -> None:
    """Open two streams of 128 choices of 300 tokens, more than a whole pool holds (64 MiB), and read nothing from them."""
    body = _question(n=128, max_tokens=300, stream=True, ignore_eos=True)
    await _hold_unread(target, "/v1/completions", [body] * 2)


async def unread_whole_answers(target: Target) -> None:
    """Request 40 large answers that are not streamed, and read none of them."""
    body = _question(n=16, logprobs=5, max_tokens=100, echo=True, ignore_eos=True)
    await _hold_unread(target, "/v1/completions", [body] * 40)


async def long_stop_strings(target: Target) -> None:
    """Stream 128 answers that repeat one token, with 60 stop strings of 64 characters that almost match them."""
    token, text = await _repeated_token(target)
    stops = [(text * 64)[: 63 - number % 8] + chr(1 + number) for number in range(60)]
    body = _question(
        stop=stops, allowed_token_ids=[token], max_tokens=200, ignore_eos=True, n=64, stream=True
    )
    await _post_all(target, "/v1/completions", [body] * 2, at_once=2)


async def silent_connections(target: Target) -> None:
    """Open 1,500 HTTP connections: a third silent, a third with half a request line, a third with half of the headers."""
    beginnings = (b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-A: ")
    await _hold_connections([_host_port(target.http)] * 1500, beginnings, target.attack_seconds)


async def silent_grpc_connections(target: Target) -> None:
    """Open 1,500 gRPC connections that send nothing, or half of the preface."""
    beginnings = (b"", b"PRI * HTTP/2.0\r\n")
    await _hold_connections([_host_port(target.grpc)] * 1500, beginnings, target.attack_seconds)


async def slow_headers(target: Target) -> None:
    """Send the headers of 200 requests at one byte a second."""

    async def drip() -> None:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(target.attack_seconds):
                _, writer = await asyncio.open_connection(*_host_port(target.http), local_addr=_ADDRESS)
                for byte in b"POST /v1/completions HTTP/1.1\r\n" * 100:
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(1)

    await asyncio.gather(*(drip() for _ in range(200)))


async def tiny_values(target: Target) -> None:
    """Send bodies of 8 MiB that are millions of tiny values: prompts, allowed tokens, nested lists."""
    count = _BODY_BYTES // 4
    tokens, bias = ",".join(["1"] * (2 * count)), ",".join(f'"{token}":1' for token in range(count // 3))
    fields = [
        f'"prompt": [{",".join(["[1]"] * count)}]',
        f'"prompt": {"[" * count}1{"]" * count}',
        f'"prompt": "a", "allowed_token_ids": [{tokens}]',
        f'"prompt": "a", "logit_bias": {{{bias}}}',
    ]
    texts = [f'{{"model": "{MODEL}", {field}}}' for field in fields]
    await _post_all(target, "/v1/completions", [text.encode() for text in texts * 2], at_once=4)


async def priority_hog(target: Target) -> None:
    """Keep 64 requests of the highest priority running, and send one request with 1,024 prompts."""
    bodies = [_question(priority=2**31 - 1, max_tokens=64, ignore_eos=True) for _ in range(256)]
    batch = {**_question(max_tokens=16, ignore_eos=True), "prompt": ["moose"] * 1024}
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_post_all(target, "/v1/completions", bodies, at_once=64))
        tasks.create_task(_post_all(target, "/v1/completions", [batch], at_once=1))


async def grpc_without_a_key(target: Target) -> None:
    """Send 40 gRPC messages of 8 MiB at once without a key; three times."""
    options = [("grpc.max_send_message_length", -1)]
    request = pb.GenerateRequest(text="a" * _BODY_BYTES)

    async def one() -> None:
        async with grpc.aio.insecure_channel(
            target.grpc, options=[*options, ("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            with suppress(grpc.aio.AioRpcError):
                async for _ in stub.Generate(request, timeout=_PATIENCE_SECONDS):
                    pass

    for _ in range(3):
        await asyncio.gather(*(one() for _ in range(40)))


async def endless_frames(target: Target) -> None:
    """Send every kind of HTTP/2 frame without end to the gRPC port, without a key, over 64 connections."""
    until = time.monotonic() + target.attack_seconds

    async def one(kinds: Iterable[str]) -> None:
        for name in kinds:
            if time.monotonic() > until:
                return
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(2):
                    _, writer = await asyncio.open_connection(*_host_port(target.grpc), local_addr=_ADDRESS)
                    writer.write(HELLO)
                    for data in endless(name):
                        writer.write(data)
                        await writer.drain()
                        await asyncio.sleep(0)

    names = list(ENDLESS)
    await asyncio.gather(*(one(cycle(names[first % len(names) :] + names)) for first in range(64)))


async def refused_requests(target: Target) -> None:
    """Send what is refused because it has no key to both ports, over 64 connections that end and are opened again."""
    get = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    calls = b"".join(whole_call(stream, b"/kvbaton.v1.Inference/ListModels") for stream in range(1, 201, 2))
    kinds = [
        (target.http, b"\x16\x03\x01 not HTTP\r\n\r\n", 2**16),
        (target.http, get, 1),
        (target.http, get * 200, 2**16),
        (target.grpc, HELLO, 1),
        (target.grpc, HELLO + calls, 2**16),
    ]
    until = time.monotonic() + target.attack_seconds

    async def one(first: int) -> None:
        for address, data, size in cycle(kinds[first % len(kinds) :] + kinds):
            if time.monotonic() > until:
                return
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(1):
                    reader, writer = await asyncio.open_connection(*_host_port(address), local_addr=_ADDRESS)
                    try:
                        writer.write(data)
                        await reader.read(size)
                    finally:
                        writer.transport.abort()

    await asyncio.gather(*map(one, range(64)))


async def nested_frames(target: Target) -> None:
    """Send a frame of 30,000 nested arrays to every internal port and socket of the workers."""
    nested = b"\x91" * 30_000 + b"\xc0"
    frames = [as_frame(body) for body in (nested, b"\x81\xa1x" + nested, b"\x91" + nested)]
    for frame in frames:
        for host, port in target.internal_ports():
            await _send_and_close(asyncio.open_connection(host, port, local_addr=_ADDRESS), frame)
        for path in target.unix_sockets():
            await _send_and_close(asyncio.open_unix_connection(path), frame)


async def compressed_bodies(target: Target) -> None:
    """Send eight bodies of 1 MB that inflate to 1 GB."""
    bomb = gzip.compress(b" " * 2**30)
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    await _post_all(target, "/v1/completions", [bomb] * 8, at_once=4, headers=headers)


async def control_port_flood(target: Target) -> None:
    """Keep opening connections to the workers' internal ports that never authenticate."""
    ports = target.internal_ports()
    until = time.monotonic() + target.attack_seconds
    while time.monotonic() < until:
        await _hold_connections(ports * 60, (b"", b"\x00\x00\x00\x08kvbaton"), seconds=1.0)


async def long_names(target: Target) -> None:
    """Send model names of 8 MB, and paths and keys of 60 KB with control characters."""
    bodies: list[Any] = [{"model": "\x1b[2Jx" * (_BODY_BYTES // 10), "prompt": "a"} for _ in range(8)]
    await _post_all(target, "/v1/completions", bodies, at_once=4)
    for _ in range(200):
        line = (
            b"GET /"
            + b"\x1b[31m" * 1000
            + b"\x00" * 3000
            + b" HTTP/1.1\r\nAuthorization: Bearer secret\r\n\r\n"
        )
        await _send_and_close(asyncio.open_connection(*_host_port(target.http), local_addr=_ADDRESS), line)
    wrong = {"Authorization": "Bearer " + "k" * 4000}
    await _post_all(target, "/v1/completions", [_question()] * 500, at_once=20, headers=wrong)


WEAPONS: dict[str, Weapon] = {
    weapon.__name__: weapon
    for weapon in (
        exploding_regexes,
        long_messages,
        unread_choices,
        unread_long_choices,
        unread_whole_answers,
        long_stop_strings,
        silent_connections,
        silent_grpc_connections,
        slow_headers,
        tiny_values,
        priority_hog,
        grpc_without_a_key,
        endless_frames,
        refused_requests,
        nested_frames,
        compressed_bodies,
        control_port_flood,
        long_names,
    )
}
"""Every attack by its name."""


def _question(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "The old moose", "max_tokens": 8, **fields}


async def _repeated_token(target: Target) -> tuple[int, str]:
    """Return a token of the model and its text."""
    headers = {"Authorization": f"Bearer {target.attacker_key}"}
    async with aiohttp.ClientSession(f"http://{target.http}", headers=headers) as session:
        async with session.post("/tokenize", json={"model": MODEL, "prompt": "moose"}) as response:
            token: int = (await response.json())["tokens"][-1]
        async with session.post("/detokenize", json={"model": MODEL, "tokens": [token]}) as response:
            text: str = (await response.json())["prompt"]
    return token, text


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


async def _post_all(
    target: Target, path: str, bodies: Iterable[Any], *, at_once: int, headers: dict[str, str] | None = None
) -> None:
    """Post all bodies (JSON, or bytes as they are) with the attacker's key; responses and failures are dropped."""
    gate = asyncio.Semaphore(at_once)
    own = {
        "Authorization": f"Bearer {target.attacker_key}",
        "Content-Type": "application/json",
        **(headers or {}),
    }
    timeout = aiohttp.ClientTimeout(total=_PATIENCE_SECONDS)
    connector = aiohttp.TCPConnector(limit=0, local_addr=_ADDRESS)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def one(body: Any) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            async with gate:
                with suppress(aiohttp.ClientError, TimeoutError, OSError):
                    async with session.post(
                        f"http://{target.http}{path}", data=data, headers=own
                    ) as response:
                        await response.read()

        await asyncio.gather(*map(one, bodies))


async def _hold_unread(target: Target, path: str, bodies: list[dict[str, Any]]) -> None:
    """Send the requests over connections with small buffers, and read nothing until the attack ends."""
    writers = []
    for body in bodies:
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {target.attacker_key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        with suppress(OSError):
            _, writer = await asyncio.open_connection(
                *_host_port(target.http), limit=2**10, local_addr=_ADDRESS
            )
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(head.encode() + data)
            writers.append(writer)
    await asyncio.sleep(target.attack_seconds)
    for writer in writers:
        writer.transport.abort()


async def _hold_connections(
    addresses: Iterable[tuple[str, int]], beginnings: tuple[bytes, ...], seconds: float
) -> None:
    """Open a connection to each address, send one of the beginnings, and keep all connections open."""
    gate, writers = asyncio.Semaphore(100), list[asyncio.StreamWriter]()

    async def one(address: tuple[str, int], beginning: bytes) -> None:
        async with gate:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(1):
                    _, writer = await asyncio.open_connection(*address, local_addr=_ADDRESS)
                writer.write(beginning)
                writers.append(writer)

    await asyncio.gather(*map(one, addresses, cycle(beginnings)))
    await asyncio.sleep(seconds)
    for writer in writers:
        writer.transport.abort()


async def _send_and_close(
    opening: Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]], data: bytes
) -> None:
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(2):
            reader, writer = await opening
            writer.write(data)
            await writer.drain()
            await reader.read(2**16)
            writer.transport.abort()


async def _attack(name: str, target: Target) -> None:
    until = time.monotonic() + target.attack_seconds
    while time.monotonic() < until:
        await WEAPONS[name](target)


if __name__ == "__main__":
    asyncio.run(_attack(sys.argv[1], Target.from_json(sys.argv[2])))
