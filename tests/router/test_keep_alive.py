"""A stream that is silent gets its headers and comments, whatever the request waits for, and is whole in the end."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from contract.identity import Role
from protos import worker_pb2 as pb
from router.migration.migration import MigrationState
from tests.fakes.router.script import Script
from tests.router.cluster import PAIR, Cluster, running_cluster
from tests.router.moves import SOURCE, TARGET, Moves, stalling
from tests.router.test_ends import CHAT, TEXT, TOKENS, nothing_is_left
from tests.router.test_replay import ANSWER, add_twins, at_first

MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
HI: list[Any] = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "x"},
    CHAT: {"messages": HI},
    MESSAGES: {"messages": HI, "max_tokens": 64},
    RESPONSES: {"input": "hi"},
}
QUIET: dict[str, Any] = {"stream_keep_alive_seconds": 0.1}
SLOW = Script(tokens=TOKENS, token_delay_seconds=0.2)
PING = {"type": "ping"}


@dataclass
class Reading:
    """A stream that is read line by line. num_silences: comments, and pings of /v1/messages."""

    response: aiohttp.ClientResponse
    events: list[Any] = field(default_factory=list)
    num_silences: int = 0
    is_done: bool = False

    async def until_silent(self) -> None:
        """Read until two more silences are seen: one alone may belong to an earlier wait."""
        target = self.num_silences + 2
        while self.num_silences < target:
            assert await self.read_line(), "the stream ended"

    async def to_the_end(self) -> None:
        while await self.read_line():
            pass

    async def read_line(self) -> bool:
        """Read a line; return False at the end."""
        async with asyncio.timeout(20):
            line = (await self.response.content.readline()).decode()
        if line.startswith(":"):
            assert line == ": keep-alive\n"
            self.num_silences += 1
        elif line == "data: [DONE]\n":
            self.is_done = True
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if event == PING:
                self.num_silences += 1
            else:
                self.events.append(event)
        return bool(line)

    @property
    def text(self) -> str:
        return "".join(event["choices"][0]["text"] for event in self.events)

    async def is_whole(self, answer: str = ANSWER) -> None:
        """Read the rest of a text completion, which has nothing but this answer."""
        await self.to_the_end()
        assert (self.text, self.is_done) == (answer, True)


@asynccontextmanager
async def reading(cluster: Cluster, path: str = TEXT, **fields: Any) -> AsyncIterator[Reading]:
    body = {**BODIES[path], **fields, "stream": True}
    timeout = aiohttp.ClientTimeout(sock_read=20)
    async with cluster.session.post(cluster.url(path), json=body, timeout=timeout) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        yield Reading(response)


async def test_while_it_waits_in_the_queue() -> None:
    """The one place is taken by a longer prompt, whose answer stalls."""

    def script(task: pb.Task) -> Script:
        return Script(tokens=TOKENS, stall_at=1 if len(task.prompt_token_ids) > 9 else None)

    async with running_cluster(script, (Role.AGGREGATED,), **QUIET) as cluster:
        (worker,) = cluster.workers.values()
        worker.stream.grant(pb.Credit(max_requests=1, max_tokens=4096))
        await cluster.until(lambda state: state["workers"][0]["max_requests"] == 1)
        async with reading(cluster, prompt="x" * 20), reading(cluster) as stream:
            await stream.until_silent()
            assert len(worker.received.decodes) == 1
            worker.stream.grant(pb.Credit(max_requests=8, max_tokens=4096))
            await stream.is_whole()


async def test_while_a_worker_starts() -> None:
    async with running_cluster(Script(tokens=TOKENS), **QUIET, worker_wait_seconds=60) as cluster:
        await cluster.workers["decode-0"].stop()
        await cluster.until(lambda state: len(state["workers"]) == 1)
        async with reading(cluster) as stream:
            await stream.until_silent()
            await cluster.add(Role.DECODE, "decode-1")
            await stream.is_whole()


@pytest.mark.parametrize("stall_at", [0, 1, 3])
async def test_while_a_token_is_awaited_and_across_a_workers_death(stall_at: int) -> None:
    """Index 0: the prompt is computed; 1: its KV is handed over; 3: between tokens. Then the answer is replayed."""
    async with running_cluster(at_first(stall_at=stall_at), **QUIET) as cluster:
        await add_twins(cluster, *PAIR)
        async with reading(cluster) as stream:
            await stream.until_silent()
            assert stream.text == ANSWER[:stall_at]
            for worker in list(cluster.workers.values()):
                if worker.received.decodes or worker.received.prefills:
                    await worker.die()
            await stream.is_whole()
        await nothing_is_left(cluster)


async def test_while_an_answer_moves() -> None:
    async with running_cluster(stalling(), PAIR, **QUIET, max_replays=0) as cluster:
        made = Moves(cluster)
        async with reading(cluster) as stream:
            await stream.until_silent()
            await cluster.add(Role.DECODE, TARGET)
            made.source.player.may_hand_off.clear()
            (run,) = made.runs
            moving = asyncio.create_task(made.migrator.move(run, made.attached(SOURCE)))
            await made.source.received.wait_for(lambda each: len(each.hand_offs) == 1)
            await stream.until_silent()
            made.source.player.may_hand_off.set()
            assert await moving is MigrationState.MOVED
            await stream.is_whole("abcdefghijklmnop")


@pytest.mark.parametrize("path", BODIES)
async def test_an_error_after_the_headers_is_the_last_event(path: str) -> None:
    async with running_cluster(Script(tokens=TOKENS, stall_at=0), **QUIET, max_replays=0) as cluster:
        async with reading(cluster, path) as stream:
            await stream.until_silent()
            assert stream.events == []
            await cluster.workers["prefill-0"].die()
            await stream.to_the_end()
        assert not stream.is_done
        if path == RESPONSES:
            assert [event["type"] for event in stream.events] == ["error", "response.failed"]
        else:
            (event,) = stream.events
            assert event["error"]["message"]
            assert event.get("type") == ("error" if path == MESSAGES else None)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_the_comments_are_framed_as_all_events(version: str) -> None:
    """Comments before the first event are written by aiohttp, those after it are not."""
    async with running_cluster(SLOW, **QUIET) as cluster:
        host, port = cluster.service.addresses.http.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"prompt": "x", "stream": True})
        head = f"POST {TEXT} HTTP/{version}\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        async with asyncio.timeout(20):
            _, _, answer = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    payload = answer if version == "1.0" else unchunked(answer)
    assert payload.startswith(b": keep-alive\n\n") and payload.endswith(b"data: [DONE]\n\n")
    blocks = payload.removesuffix(b"\n\n").split(b"\n\n")
    events = [number for number, block in enumerate(blocks) if block.startswith(b"data: ")]
    assert set(blocks) - {blocks[number] for number in events} == {b": keep-alive"}
    assert b": keep-alive" in blocks[events[0] :]


def unchunked(answer: bytes) -> bytes:
    found = b""
    while answer:
        size, _, rest = answer.partition(b"\r\n")
        length = int(size, 16)
        assert rest[length : length + 2] == b"\r\n"
        found += rest[:length]
        answer = rest[length + 2 :]
    return found


async def test_none_if_the_setting_is_zero() -> None:
    async with running_cluster(SLOW, stream_keep_alive_seconds=0) as cluster, reading(cluster) as stream:
        await stream.is_whole()
        assert stream.num_silences == 0


async def test_the_sdks_read_past_them() -> None:
    """Every token comes after a longer silence."""
    async with (
        running_cluster(SLOW, **QUIET) as cluster,
        AsyncOpenAI(base_url=cluster.url("/v1"), api_key="none", max_retries=0) as openai,
        AsyncAnthropic(base_url=cluster.url(""), api_key="none", max_retries=0) as anthropic,
    ):

        async def chat() -> str:
            chunks = await openai.chat.completions.create(model="tiny", messages=HI, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

        async def response() -> str:
            events = await openai.responses.create(model="tiny", input="hi", stream=True)
            return "".join(
                [event.delta async for event in events if event.type == "response.output_text.delta"]
            )

        async def message() -> str:
            async with anthropic.messages.stream(model="tiny", max_tokens=64, messages=HI) as stream:
                return await stream.get_final_text()

        told, heard, written = await asyncio.gather(chat(), response(), message())
    assert told == heard == written == ANSWER
