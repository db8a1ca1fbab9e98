"""Whatever a client sends, it gets an answer, or OpenAI's error object with a 4xx: never a 5xx, never a hang."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contract.identity import Role
from router.http.response_input import ITEM_TYPES
from router.http.schema import CHAT, COMPLETION, RESPONSE
from router.testing import Script
from tests.router.cluster import Cluster, running_cluster
from tests.router.test_bad_input import SAY
from tests.text.tiny_model import END, byte_ids

ANSWER = Script(tokens=[*byte_ids("añ".encode()), END])
_SECONDS = 20
_BODIES: dict[str, tuple[Any, Any]] = {
    "/v1/chat/completions": (CHAT, SAY),
    "/v1/completions": (COMPLETION, {"prompt": "hello"}),
    "/v1/responses": (RESPONSE, {"input": "hello"}),
}
_NUMBERS = st.integers() | st.integers(-3, 300) | st.floats(allow_nan=False, allow_infinity=False)
_ATOMS = st.none() | st.booleans() | _NUMBERS | st.text(max_size=8)
_JSON = st.recursive(
    _ATOMS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
_MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(ITEM_TYPES) | _JSON,
        "role": st.sampled_from(["user", "assistant", "tool"]) | _JSON,
        "content": _JSON,
        "name": _JSON,
        "output": _JSON,
        "arguments": _JSON,
        "call_id": _JSON,
        "summary": _JSON,
    },
)


def _bodies(schema: dict[str, Any], base: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """Bodies of known fields with whatever values, of whatever JSON, and of bytes that are none."""
    known: st.SearchStrategy[str] = st.sampled_from(sorted(schema["properties"]))
    fields = st.dictionaries(known, _JSON, max_size=4)
    several = st.builds(lambda more: {**base, **more}, fields)
    name = "input" if "input" in base else "messages"
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
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error", body
    elif response.content_type == "text/event-stream":
        last = text.removesuffix("\n\n").rpartition("\n\n")[2]
        assert last == "data: [DONE]" or last.startswith("event: response."), (body, text)
    else:
        answer = json.loads(text)
        assert answer.get("choices") or answer["output"], body


@pytest.mark.parametrize("path", sorted(_BODIES))
async def test_no_body_is_a_5xx_or_a_hang(path: str) -> None:
    loop = asyncio.get_running_loop()
    async with running_cluster(ANSWER, (Role.BOTH,)) as cluster:

        @settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
        @given(_bodies(*_BODIES[path]))
        def ask(body: bytes) -> None:
            asyncio.run_coroutine_threadsafe(_ask(cluster, path, body), loop).result()

        await asyncio.to_thread(ask)
        await cluster.until(lambda state: not any(state["requests"].values()) and not state["num_tasks"])
