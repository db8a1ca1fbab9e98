"""The unchanged ``openai`` package with a real service."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, Field

from tests.service import Service

pytestmark = [pytest.mark.slow, pytest.mark.e2e]
MODEL = "kvbaton-demo"
QUESTION: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": 'lamp: fox\ncomet: ginger\nWhat is "comet"?'}
]
ANSWER = "comet: ginger"


@pytest.fixture
def client(service: Service) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://{service.http}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def test_models_are_listed_and_found(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_chat_is_answered(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, logprobs=True, top_logprobs=2
    )
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", ANSWER)
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    assert all(len(one.top_logprobs) == 2 for one in choice.logprobs.content)


def test_a_stream_is_the_whole_answer_in_pieces(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    pieces = list(
        client.chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(choice.delta.content or "" for piece in pieces for choice in piece.choices)
    assert text == whole.choices[0].message.content
    assert pieces[-1].usage is not None
    assert whole.usage is not None
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [c.finish_reason for piece in pieces for c in piece.choices if c.finish_reason] == ["stop"]


def test_the_sdks_own_reading_of_a_stream_gives_the_same(client: OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=QUESTION, temperature=0) as stream:
        events = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.content == ANSWER
    assert {"chunk", "content.delta", "content.done"} <= events


class Creature(BaseModel):
    """The required form of an answer."""

    kind: Literal["moose", "fox"]
    name: str = Field(max_length=12)
    age: int = Field(ge=1, le=30)


def test_an_answer_is_parsed_into_a_model(client: OpenAI) -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=QUESTION, seed=3, response_format=Creature)
    parsed = answer.choices[0].message.parsed
    assert parsed == Creature.model_validate_json(answer.choices[0].message.content or "")
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "seed": 3, "response_format": Creature}
    with client.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed


def test_completions_take_texts_and_token_ids(client: OpenAI) -> None:
    several = client.completions.create(model=MODEL, prompt=["Hello", "Hello"], temperature=0, max_tokens=4)
    assert [choice.index for choice in several.choices] == [0, 1]
    by_ids = client.completions.create(model=MODEL, prompt=[450], temperature=0, max_tokens=4, logprobs=1)
    assert by_ids.choices[0].text == several.choices[0].text
    assert by_ids.choices[0].logprobs is not None
    assert by_ids.choices[0].logprobs.tokens is not None
    assert len(by_ids.choices[0].logprobs.tokens) == 4


def test_embeddings_come_as_the_sdk_asks_for_them(client: OpenAI) -> None:
    """The package requests base64 by default."""
    texts = ["Hello", "comet: ginger"]
    packed = client.embeddings.create(model=MODEL, input=texts)
    plain = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-4)
        assert sum(number**2 for number in one.embedding) == pytest.approx(1.0, abs=1e-4)
    assert packed.data[0].embedding != pytest.approx(packed.data[1].embedding, abs=1e-2)
    assert packed.usage.total_tokens == packed.usage.prompt_tokens > 2
    own = len(packed.data[0].embedding)
    assert client.embeddings.create(model=MODEL, input="a", dimensions=own).data[0].embedding
    with pytest.raises(openai.BadRequestError) as bad:
        client.embeddings.create(model=MODEL, input="a", dimensions=own - 1)
    assert bad.value.param == "dimensions"


def test_a_batch_is_uploaded_answered_and_read(client: OpenAI) -> None:
    body = {"model": MODEL, "messages": QUESTION, "temperature": 0}
    lines = [
        {"custom_id": f"q{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number in range(20)
    ]
    lines.append({**lines[0], "custom_id": "hot", "body": {**body, "temperature": 9}})
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("questions.jsonl", content), purpose="batch")
    assert client.files.content(file.id).read() == content
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    patience = time.monotonic() + 60
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < patience, batch
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed", batch
    assert batch.output_file_id and batch.error_file_id and batch.request_counts
    assert (batch.request_counts.completed, batch.request_counts.failed) == (20, 1)
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert {answer["custom_id"] for answer in answers} == {f"q{number}" for number in range(20)}
    texts = {answer["response"]["body"]["choices"][0]["message"]["content"] for answer in answers}
    assert texts == {ANSWER}
    [error] = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
    assert error["response"]["body"]["error"]["param"] == "temperature"
    assert client.batches.list(limit=1).data[0].id == batch.id
    with pytest.raises(openai.BadRequestError, match="Cannot cancel"):
        client.batches.cancel(batch.id)
    for one in client.files.list():
        assert client.files.delete(one.id).deleted


def test_errors_are_the_sdks_own(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=9)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="other", messages=QUESTION)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="x" * 10_000)
    assert long.value.code == "context_length_exceeded"


async def test_many_at_once_and_a_stream_that_is_left(service: Service) -> None:
    async with AsyncOpenAI(base_url=f"http://{service.http}/v1", api_key="none", max_retries=0) as client:
        asked = [
            client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0) for _ in range(16)
        ]
        answers = await asyncio.gather(*asked)
        assert {answer.choices[0].message.content for answer in answers} == {ANSWER}
        stream = await client.completions.create(
            model=MODEL, prompt="Hello", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        async with stream:
            await anext(aiter(stream))
        async with asyncio.timeout(30):
            while any((await service.debug_states())["router"]["requests"].values()):
                await asyncio.sleep(0.05)
