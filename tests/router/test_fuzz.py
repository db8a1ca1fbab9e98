"""Every body gets an answer, or OpenAI's error object with a 4xx status: never a 5xx, never a hang."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contract.identity import Role
from protos import worker_pb2 as pb
from router.http.schema.chat import CHAT, DETOKENIZE, TOKENIZE
from router.http.schema.completion import COMPLETION, EMBEDDING
from router.http.schema.messages import MESSAGE
from router.http.schema.responses import RESPONSE
from tests.fakes.router.script import Script
from tests.router.cluster import Cluster, running_cluster
from tests.router.test_bad_input import SAY
from tests.text.tiny_model import END, byte_ids

_SECONDS = 20
_BODIES: dict[str, tuple[Any, Any, int]] = {
    "/v1/chat/completions": (CHAT, SAY, 200),
    "/v1/completions": (COMPLETION, {"prompt": "hello"}, 200),
    "/v1/responses": (RESPONSE, {"input": "hello"}, 200),
    "/v1/messages": (MESSAGE, {"max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}, 200),
    "/v1/embeddings": (EMBEDDING, {"input": "hello"}, 100),
    "/tokenize": (TOKENIZE, {"prompt": "hello"}, 100),
    "/detokenize": (DETOKENIZE, {"tokens": [2, 3]}, 100),
}
"""Path → its schema, a body that is answered, and how many bodies are tried."""
_RESULTS = ("choices", "output", "data", "tokens", "prompt", "content")
_LAST_EVENTS = ("event: response.", "event: message_stop")
_NUMBERS = st.integers() | st.integers(-3, 300) | st.floats(allow_nan=False, allow_infinity=False)
_ATOMS = st.none() | st.booleans() | _NUMBERS | st.text(max_size=8)
_JSON = st.recursive(
    _ATOMS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
_OF_KIND: dict[str, st.SearchStrategy[Any]] = {
    "null": st.none(),
    "boolean": st.booleans(),
    "integer": st.integers() | st.integers(-3, 300),
    "number": _NUMBERS,
    "string": st.text(max_size=8),
    "object": st.dictionaries(st.text(max_size=6), _JSON, max_size=4),
}
_ITEM_TYPES = (
    "message",
    "function_call",
    "function_call_output",
    "reasoning",
    "custom_tool_call",
    "local_shell_call",
    "local_shell_call_output",
    "image_generation_call",
    "item_reference",
    "another",
)
_MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(_ITEM_TYPES) | _JSON,
        "role": st.sampled_from(["user", "assistant", "tool"]) | _JSON,
        "content": _JSON,
        "name": _JSON,
        "output": _JSON,
        "input": _JSON,
        "result": _JSON,
        "id": _JSON,
        "arguments": _JSON,
        "call_id": _JSON,
        "summary": _JSON,
    },
)


def _answer(task: pb.Task) -> Script:
    told = [-1.0] * (len(task.prompt_token_ids) - 1)
    return Script(tokens=[*byte_ids("añ".encode()), END], embedding=(0.5, 1.0), prompt_logprobs=told)


def _near(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return values that match a schema, or nearly do."""
    kinds = schema.get("type", [])
    found: list[st.SearchStrategy[Any]] = [
        _OF_KIND[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds) if kind in _OF_KIND
    ]
    found += [st.just(schema["const"])] if "const" in schema else []
    found += [st.sampled_from(schema["enum"])] if "enum" in schema else []
    found += [_near(one) for one in schema.get("anyOf", ())]
    if "items" in schema:
        found.append(st.lists(_near(schema["items"]), max_size=3))
    if "properties" in schema:
        parts = {name: _near(one) for name, one in schema["properties"].items()}
        needed = {name: parts.pop(name) for name in schema.get("required", ())}
        found.append(st.fixed_dictionaries(needed, optional=parts))
    right: st.SearchStrategy[Any] = st.one_of(found)
    return st.integers(0, 7).flatmap(lambda number: right if number else _JSON)


def _bodies(schema: dict[str, Any], base: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """Return bodies: known fields with nearly valid values, any JSON, and bytes that are not JSON."""
    properties: dict[str, Any] = schema["properties"]
    pairs = st.sampled_from(sorted(properties)).flatmap(
        lambda name: st.tuples(st.just(name), _near(properties[name]))
    )
    fields = st.lists(pairs, max_size=4).map(dict)
    several = st.builds(lambda more: {**base, **more}, fields)
    name = "messages" if "messages" in properties else "input"
    chats = st.builds(lambda messages: {**base, name: messages}, st.lists(_MESSAGE, max_size=3))
    written = st.one_of(several, several, fields, chats, _JSON).map(lambda body: json.dumps(body).encode())
    cut = st.builds(lambda raw, at: raw[: at % (len(raw) + 1)], written, st.integers(0, 10**6))
    return st.one_of(written, written, written, cut, st.binary(max_size=40))


async def _ask(cluster: Cluster, path: str, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    async with (
        asyncio.timeout(_SECONDS),
        cluster.session.post(cluster.url(path), data=body, headers=headers) as response,
    ):
        text = await response.text()
    assert response.status < 500, (body, text)
    if response.status != 200:
        error = json.loads(text)["error"]
        is_anthropic = path == "/v1/messages"
        assert set(error) == {"message", "type"} | (set() if is_anthropic else {"param", "code"})
        assert error["type"] in ("invalid_request_error", "not_found_error" if is_anthropic else ""), body
    elif response.content_type == "text/event-stream":
        last = text.removesuffix("\n\n").rpartition("\n\n")[2]
        assert last == "data: [DONE]" or last.startswith(_LAST_EVENTS), (body, text)
    else:
        answer = json.loads(text)
        assert any(name in answer for name in _RESULTS), body


@pytest.mark.parametrize("path", sorted(_BODIES))
async def test_no_body_is_a_5xx_or_a_hang(path: str) -> None:
    loop = asyncio.get_running_loop()
    schema, base, num_bodies = _BODIES[path]
    async with running_cluster(_answer, (Role.AGGREGATED,)) as cluster:

        @settings(max_examples=num_bodies, deadline=None, suppress_health_check=list(HealthCheck))
        @given(_bodies(schema, base))
        def ask(body: bytes) -> None:
            asyncio.run_coroutine_threadsafe(_ask(cluster, path, body), loop).result()

        await asyncio.to_thread(ask)
        await cluster.until(lambda state: not any(state["requests"].values()) and not state["num_tasks"])
