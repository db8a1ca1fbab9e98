"""SDKs that stand on an ``openai`` package of their own version, in an environment of their own: `make test-sdk`."""

import pytest

from tests.sdk.environments import environment_with, lines_of
from tests.service import Service

pytestmark = [pytest.mark.sdk, pytest.mark.e2e, pytest.mark.timeout(600)]
ANSWER = "comet: ginger"

LANGCHAIN = """
import sys
from langchain_openai import ChatOpenAI
model = ChatOpenAI(model="kvbaton-demo", base_url=sys.argv[1], api_key="none", temperature=0)
asked = [("user", 'lamp: fox\\ncomet: ginger\\nWhat is "comet"?')]
answer = model.invoke(asked)
print(answer.content)
print("".join(piece.content for piece in model.stream(asked)))
print(answer.usage_metadata["total_tokens"] == sum(answer.usage_metadata[n] for n in ("input_tokens", "output_tokens")))
"""

LITELLM = """
import sys
import litellm
asked = {"model": "openai/kvbaton-demo", "base_url": sys.argv[1], "api_key": "none", "temperature": 0, "messages": [
    {"role": "user", "content": 'lamp: fox\\ncomet: ginger\\nWhat is "comet"?'}]}
print(litellm.completion(**asked).choices[0].message.content)
print("".join(piece.choices[0].delta.content or "" for piece in litellm.completion(**asked, stream=True)))
try:
    litellm.completion(**(asked | {"temperature": 9}))
except litellm.BadRequestError as error:
    print("temperature" in str(error))
"""


INSTRUCTOR = """
import asyncio
import json
import sys
from typing import Literal

import instructor
from instructor.core.exceptions import InstructorRetryException
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field, field_validator

class Creature(BaseModel):
    kind: Literal["moose", "fox"]
    name: str = Field(max_length=12)
    age: int = Field(ge=1, le=30)

class Refused(Creature):
    @field_validator("age")
    def is_never_right(cls, age: int) -> int:
        raise ValueError("ask again")

server = {"base_url": sys.argv[1], "api_key": "none", "max_retries": 0}
asked = {"model": "kvbaton-demo", "temperature": 0, "messages": [{"role": "user", "content": "Who is Max?"}]}

async def later(mode):
    async with AsyncOpenAI(**server) as client:
        chat = instructor.from_openai(client, mode=mode).chat.completions
        return (await chat.create(response_model=Creature, max_retries=0, **asked)).model_dump()

for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    chat = instructor.from_openai(OpenAI(**server), mode=mode).chat.completions
    found = chat.create(response_model=Creature, max_retries=0, **asked).model_dump()
    *partial, whole = chat.create_partial(response_model=Creature, **asked)
    # In parts the tool has another name, which the model is shown.
    is_same = whole.model_dump() == found or mode is instructor.Mode.TOOLS
    alike = [asyncio.run(later(mode)) == found, is_same and bool(Creature.model_validate(whole.model_dump()))]
    grows = any(one.kind and one.age is None for one in partial)
    try:
        chat.create(response_model=Refused, max_retries=1, **asked)
    except InstructorRetryException as error:
        print(json.dumps([*alike, grows, error.n_attempts, "ask again" in str(error)]))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Make an environment with all three packages, which share one version of ``openai``."""
    sdks = ("langchain-openai==1.7.3", "litellm==1.106.2", "instructor==1.17.0")
    return environment_with(tmp_path_factory.mktemp("environment"), *sdks)


def test_langchain(service: Service, python: str) -> None:
    lines = lines_of(python, LANGCHAIN, f"http://{service.http}/v1", LANGSMITH_TRACING="false")
    assert lines == [ANSWER, ANSWER, "True"]


def test_litellm(service: Service, python: str) -> None:
    lines = lines_of(python, LITELLM, f"http://{service.http}/v1", LITELLM_LOCAL_MODEL_COST_MAP="True")
    assert [line for line in lines if line.strip()][:2] == [ANSWER, ANSWER]
    assert lines[-1] == "True"


def test_instructor(service: Service, python: str) -> None:
    """By a tool and by a schema: at once, by coroutines, in parts, and asked again because of what was answered."""
    lines = lines_of(python, INSTRUCTOR, f"http://{service.http}/v1")
    assert lines == ["[true, true, true, 2, true]"] * 2
