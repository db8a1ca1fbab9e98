"""One question asked of every API has one answer: accepted or refused, and with the same meaning for the worker."""

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from contract.identity import Role
from protos import inference_pb2 as pb
from tests.fakes.router.script import Script
from tests.router.cluster import Cluster, running_cluster
from tests.text.tiny_model import END, byte_ids

LENGTH = 128
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
APIS = (CHAT, TEXT, RESPONSES, MESSAGES)
_LIMITS = {
    CHAT: "max_completion_tokens",
    TEXT: "max_tokens",
    RESPONSES: "max_output_tokens",
    MESSAGES: "max_tokens",
}
_STOPS = {CHAT: "stop", TEXT: "stop", RESPONSES: "stop", MESSAGES: "stop_sequences"}


def body_of(path: str, text: str = "hi", **asked: Any) -> dict[str, Any]:
    """Return the body of one question in the words of an API. asked: limit, stop, and fields of all APIs."""
    turns = [{"role": "user", "content": text}]
    bodies: dict[str, dict[str, Any]] = {TEXT: {"prompt": text}, RESPONSES: {"input": turns}}
    body = bodies.get(path, {"messages": turns})
    names = {"limit": _LIMITS[path], "stop": _STOPS[path]}
    limit = {_LIMITS[path]: 8} if "limit" not in asked else {}
    return {**body, **limit, **{names.get(name, name): value for name, value in asked.items()}}


def call_of(text: str = "hi", model: str = "", limit: int = 8, **asked: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, model=model, sampling=pb.SamplingParams(max_tokens=limit, **asked))


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    script = Script(tokens=[*byte_ids(b"abc"), END])
    async with running_cluster(script, (Role.AGGREGATED,)) as running:
        yield running


async def statuses(cluster: Cluster, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the status of each API; of gRPC, 200, or the HTTP status that its code stands for."""
    found: dict[str, Any] = {}
    for path in APIS:
        found[path], _ = await cluster.post(path, body_of(path, **asked))
    async with cluster.channel() as channel:
        codes = {grpc.StatusCode.INVALID_ARGUMENT: 400, grpc.StatusCode.NOT_FOUND: 404}
        given: dict[str, Any] = {
            name: [value] if name == "stop" and isinstance(value, str) else value
            for name, value in asked.items()
        }
        try:
            await cluster.inference(channel).GenerateOnce(call_of(**given))
            found["gRPC"] = 200
        except grpc.aio.AioRpcError as error:
            found["gRPC"] = codes.get(error.code(), error.code())
    return found


QUESTIONS: list[tuple[dict[str, Any], int]] = [
    ({}, 200),
    ({"limit": 1}, 200),
    ({"limit": LENGTH}, 200),
    ({"limit": 2**31 - 1}, 200),
    ({"limit": 0}, 400),
    ({"temperature": 0.0}, 200),
    ({"temperature": 2.5}, 400),
    ({"temperature": -1.0}, 400),
    ({"top_p": 1.5}, 400),
    ({"stop": ["x"]}, 200),
    ({"stop": [""]}, 400),
    ({"stop": ["x"] * 65}, 400),
    ({"min_tokens": 9}, 400),
    ({"seed": 7}, 200),
    ({"model": "another"}, 404),
    ({"text": "x" * (LENGTH - 20)}, 200),
    ({"text": "x" * (LENGTH + 1)}, 400),
]


async def test_every_api_accepts_and_refuses_the_same(cluster: Cluster) -> None:
    """C5: a limit above the room left was an error in chats, and shortened in messages."""
    for asked, status in QUESTIONS:
        found = await statuses(cluster, asked)
        assert found == dict.fromkeys(found, status), asked


async def test_a_limit_beyond_the_room_left_is_that_room_on_every_api(cluster: Cluster) -> None:
    for path in APIS:
        status, _ = await cluster.post(path, body_of(path, limit=100_000, temperature=0.5, stop=["x"]))
        assert status == 200
    async with cluster.channel() as channel:
        await cluster.inference(channel).GenerateOnce(call_of(limit=100_000, temperature=0.5, stop=["x"]))
    for decode in cluster.workers["both-0"].received.decodes:
        task = decode.task
        assert task.sampling.max_tokens == LENGTH - len(task.prompt_token_ids)
        assert task.sampling.temperature == 0.5
    assert len(cluster.workers["both-0"].received.decodes) == len(APIS) + 1


async def test_strict_api_refuses_such_a_limit_on_every_api() -> None:
    script = Script(tokens=[*byte_ids(b"abc"), END])
    async with running_cluster(script, (Role.AGGREGATED,), strict_api=True) as cluster:
        found = await statuses(cluster, {"limit": LENGTH})
        assert found == dict.fromkeys(found, 400)
        found = await statuses(cluster, {"limit": 8})
        assert found == dict.fromkeys(found, 200)


async def test_empty_questions_and_several_answers_are_refused_alike(cluster: Cluster) -> None:
    """An empty conversation is refused everywhere; an answer count only where an API has one."""
    for path, name in ((CHAT, "messages"), (RESPONSES, "input"), (MESSAGES, "messages"), (TEXT, "prompt")):
        status, _ = await cluster.post(path, {**body_of(path), name: []})
        assert status == 400, path
    for path in APIS:
        status, _ = await cluster.post(path, body_of(path, n=0))
        assert status == 400, path
        status, _ = await cluster.post(path, body_of(path, n=1))
        assert status == 200, path
