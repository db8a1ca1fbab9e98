"""Fields that change nothing (ignored or unknown), and the limits on lists of a request."""

from typing import Any

import pytest

from contract.identity import Role
from router.http.fields.foreign import PEER_FIELDS
from router.http.fields.unsupported import NEUTRAL
from tests.fakes.router.script import Script
from tests.router.cluster import running_cluster
from tests.router.test_bad_input import CHAT, SAY, TEXT, check_all, check_error
from tests.text.tiny_model import END, word_id

HELLO = Script(tokens=[word_id("hello"), END])
IGNORED: dict[str, Any] = {
    "user": "u",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "metadata": {"team": "a"},
    "service_tier": "flex",
    "store": True,
    "prompt_cache_retention": "24h",
    "client_metadata": {"session": {"id": 1}},
    "prediction": {"type": "content", "content": "hello"},
    "request_id": "mine",
    "session_id": "s",
    "rid": "r",
    "prompt_cache_options": {"mode": "implicit"},
}
ASKING: dict[str, Any] = {
    "continuous_usage_stats": True,
    "thinking_token_budget": 100,
    "include_reasoning": False,
    "logprob_token_ids": [1, 2],
    "return_tokens_as_token_ids": True,
    "repetition_detection": {"max_pattern_size": 3},
    "stream_interval": 8,
    "truncation_side": "middle",
    "dry_multiplier": 0.8,
    "mirostat": 2,
    "typical_p": 0.9,
    "xtc_probability": 0.5,
    "kv_transfer_params": {"do_remote_decode": True},
    "custom_logit_processor": "x",
    "watermark": True,
}
IDLE = {name: values[0] if values else None for name, values in NEUTRAL.items()}


async def test_unknown_fields_are_ignored_by_default() -> None:
    async with running_cluster(HELLO, (Role.AGGREGATED,)) as cluster:
        body = {**SAY, "temprature": 0, "x": {"y": [1]}}
        assert (await cluster.post(CHAT, body))[0] == 200
        assert (await cluster.post("/tokenize", {"prompt": "a", "x": 1}))[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (CHAT, {**SAY, "temprature": 0}, "temprature", "did you mean temperature?"),
        (CHAT, {**SAY, "zzzz": 0, "yyyy": 1}, "zzzz", "'zzzz', 'yyyy'"),
        (CHAT, {**SAY, **{f"x{i}": i for i in range(9)}}, "x0", "'x4' and 4 more"),
        (CHAT, {**SAY, "prompt": "hello"}, "prompt", "'prompt'"),
        (
            TEXT,
            {"prompt": "a", "stream": True, "stream_options": {"usage": True}},
            "stream_options.usage",
            "",
        ),
        ("/tokenize", {"prompt": "a", "temperature": 0}, "temperature", ""),
        ("/detokenize", {"tokens": [5], "token": 0}, "token", "did you mean tokens?"),
    ],
)
async def test_strict_api_names_unknown_fields(
    path: str, body: dict[str, Any], param: str, words: str
) -> None:
    async with running_cluster(HELLO, (Role.AGGREGATED,), strict_api=True) as cluster:
        status, answer = await cluster.post(path, body)
        error = check_error(answer, status, param)
        assert (status, error["code"]) == (400, "unknown_parameter")
        assert error["message"].startswith("Unknown parameter: ")
        assert words in error["message"]
        assert cluster.workers["both-0"].received.decodes == []


async def test_ignored_fields_are_accepted_under_strict_api_too() -> None:
    async with running_cluster(HELLO, (Role.AGGREGATED,), strict_api=True) as cluster:
        for fields in (IGNORED, IDLE, dict.fromkeys({**IGNORED, **IDLE})):
            for path, body in ((CHAT, SAY), (TEXT, {"prompt": "a"})):
                status, answer = await cluster.post(path, {**body, **fields})
                assert status == 200, answer


@pytest.mark.parametrize("name", ASKING)
async def test_fields_of_other_servers_are_rejected_by_name(name: str) -> None:
    place = "stream_options." if name == "continuous_usage_stats" else ""
    field: dict[str, Any] = {name: ASKING[name]}
    async with running_cluster(HELLO, (Role.AGGREGATED,)) as cluster:
        for path, body in ((CHAT, SAY), (TEXT, {"prompt": "a"})):
            asking = {"stream": True, "stream_options": field} if place else field
            status, answer = await cluster.post(path, {**body, **asking})
            assert check_error(answer, status, f"{place}{name}")["code"] == "unsupported_parameter"
            assert name in answer["error"]["message"]
            assert cluster.workers["both-0"].received.decodes == []


async def test_every_field_of_other_servers_asks_for_nothing_or_is_rejected() -> None:
    async with running_cluster(HELLO, (Role.AGGREGATED,)) as cluster:
        for name in PEER_FIELDS.keys() - {"tools", "functions", "chat_template_kwargs"}:
            status, answer = await cluster.post(TEXT, {"prompt": "a", name: {"asks": "something"}})
            assert status == 400 and answer["error"]["param"] == name, (name, answer)
            for idle in NEUTRAL[name]:
                assert (await cluster.post(TEXT, {"prompt": "a", name: idle}))[0] == 200, (name, idle)


async def test_the_types_of_ignored_fields_are_checked() -> None:
    async with running_cluster(HELLO, (Role.AGGREGATED,)) as cluster:
        wrong: list[tuple[dict[str, Any], str]] = [
            ({name: [7]}, name) for name in IGNORED if name != "metadata"
        ]
        wrong += [({"metadata": "a"}, "metadata"), ({"metadata": {"a": 1}}, "metadata")]
        await check_all(cluster, CHAT, SAY, wrong)


LIMITS: list[tuple[dict[str, Any], str, str]] = [
    ({"stop": ["x"] * 65}, "stop", "stop has 65 strings; the limit is 64"),
    ({"stop": ["a", "x" * 1025]}, "stop", "stop holds a string of 1025 characters; the limit is 1024"),
    ({"stop_token_ids": [5] * 1025}, "stop_token_ids", "stop_token_ids has 1025 token ids"),
    ({"logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias", "logit_bias has 1025 entries"),
    ({"messages": SAY["messages"] * 4097}, "messages", "messages has 4097 messages; the limit is 4096"),
]


async def test_a_request_that_holds_too_much_is_refused_by_name() -> None:
    async with running_cluster(HELLO, (Role.AGGREGATED,)) as cluster:
        for fields, param, words in LIMITS:
            status, answer = await cluster.post(CHAT, {**SAY, **fields})
            assert status == 400
            assert words in check_error(answer, status, param)["message"]
        full = {"stop": ["x" * 64] * 64, "stop_token_ids": [5] * 1024}
        assert (await cluster.post(CHAT, {**SAY, **full}))[0] == 200


async def test_headers_over_the_limit_are_400() -> None:
    async with running_cluster(HELLO, ()) as cluster:
        for headers in ({"X-Long": "a" * 9000}, {f"X-{i}": "a" for i in range(200)}):
            async with cluster.session.get(cluster.url("/version"), headers=headers) as response:
                assert response.status == 400
