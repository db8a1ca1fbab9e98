"""/v1/completions over real sockets: objects, streaming, text."""

from itertools import product
from typing import Any

import pytest

from contract.identity import Role
from contract.outputs import FinishReason
from tests.fakes.router.script import Script
from tests.router.cluster import PAIR, running_cluster
from tests.text.tiny_model import END, SPECIAL, byte_ids, word_id

HELLO = (word_id("hello"), word_id(" world"), word_id(" again"))
FORMS = [PAIR, (Role.AGGREGATED,)]


@pytest.mark.parametrize("roles", FORMS)
async def test_completion_example_has_vllms_shape(roles: tuple[Role, ...]) -> None:
    """A3: 4 prompt tokens, max_tokens 7, temperature 0."""
    async with (
        running_cluster(Script(tokens=byte_ids(b"San Francisco")), roles) as cluster,
        cluster.session.post(
            cluster.url("/v1/completions"),
            json={"model": "tiny", "prompt": [7, 8, 9, 10], "max_tokens": 7, "temperature": 0},
        ) as response,
    ):
        assert response.status == 200
        answer = await response.json()
        assert response.headers["x-kvbaton-request-id"] == answer["id"]
    assert answer.pop("id").startswith("cmpl-")
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "text": "San Fra",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
                "prompt_logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": 4,
            "total_tokens": 11,
            "completion_tokens": 7,
            "prompt_tokens_details": None,
        },
    }


@pytest.mark.parametrize("roles", FORMS)
async def test_streamed_chunks_add_up_to_the_whole_answer(roles: tuple[Role, ...]) -> None:
    async with running_cluster(Script(tokens=[*HELLO, END]), roles) as cluster:
        body = {"prompt": "hello", "stream_options": {"include_usage": True}}
        *chunks, usage, done = await cluster.stream("/v1/completions", body)
        _, whole = await cluster.post("/v1/completions", {"prompt": "hello"})
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello world again"
    assert whole["choices"][0]["text"] == "hello world again"
    *earlier, last = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert (set(earlier) - {None}, last) == (
        set(),
        "stop",
    )  # all may arrive at once, after a late first token
    assert {chunk["id"] for chunk in chunks} == {usage["id"]}
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    assert usage["usage"]["completion_tokens"] == 4


async def test_without_include_usage_no_chunk_lacks_a_choice() -> None:
    async with running_cluster(Script(tokens=[*HELLO, END])) as cluster:
        *chunks, _ = await cluster.stream("/v1/completions", {"prompt": "hello"})
    assert all(len(chunk["choices"]) == 1 and "usage" not in chunk for chunk in chunks)


async def test_the_two_legs_name_each_other_and_carry_the_same_task() -> None:
    async with running_cluster(Script(tokens=[*HELLO, END])) as cluster:
        body = {
            "prompt": "hello",
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.9,
            "min_tokens": 2,
            "max_tokens": 9,
            "stop_token_ids": [250],
            "priority": 2,
            "cache_salt": "s",
        }
        await cluster.post("/v1/completions", body)
        (prefill,) = cluster.workers["prefill-0"].received.prefills
        (decode,) = cluster.workers["decode-0"].received.decodes
    assert decode.source.transfer_id == prefill.transfer_id != ""
    assert decode.source.worker_id == "prefill-0"
    assert decode.source.boot_id
    assert decode.source.control_address
    assert (prefill.task.first_index, decode.task.first_index) == (0, 1)
    assert prefill.task.request_id == decode.task.request_id
    assert prefill.task.sampling == decode.task.sampling
    sampling = prefill.task.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 3, 0.9)
    assert (sampling.min_tokens, sampling.max_tokens, list(sampling.stop_token_ids)) == (2, 9, [250])
    assert (list(prefill.task.eos_token_ids), prefill.task.priority, prefill.task.cache_salt) == (
        [END],
        2,
        "s",
    )
    assert 0 < prefill.task.deadline_seconds <= 600


async def test_the_router_draws_a_seed_where_the_client_gave_none() -> None:
    async with running_cluster(Script(tokens=[END]), (Role.AGGREGATED,)) as cluster:
        for seed in (None, None, 7, -(2**63)):
            status, _ = await cluster.post("/v1/completions", {"prompt": "hello", "seed": seed})
            assert status == 200
        first, second, *given = [d.task.sampling.seed for d in cluster.workers["both-0"].received.decodes]
    assert first != second
    assert given == [7, -(2**63)]


async def test_a_character_over_several_tokens_arrives_whole() -> None:
    async with running_cluster(
        Script(tokens=[*byte_ids("é€\U0001f600!".encode()), END]), (Role.AGGREGATED,)
    ) as cluster:
        *chunks, _ = await cluster.stream("/v1/completions", {"prompt": "x"})
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert [text for text in texts if text] == ["é", "€", "\U0001f600", "!"]


@pytest.mark.parametrize("tokens_per_step", [1, 2, 5])
async def test_a_stop_string_cuts_exactly_across_tokens(tokens_per_step: int) -> None:
    # The script never ends by itself: after a late first token all tokens would be there, with nothing left to cancel.
    script = Script(tokens=byte_ids(b"a b STOP c d"), tokens_per_step=tokens_per_step, stall_at=11)
    async with running_cluster(script) as cluster:
        received = cluster.workers["decode-0"].received
        for stop, keeps in product(("STOP", "b ST", "STO", "OP", ["nope", "TOP c"]), (False, True)):
            body = {"prompt": "x", "stop": stop, "include_stop_str_in_output": keeps}
            received.cancels.clear()
            _, answer = await cluster.post("/v1/completions", body)
            *chunks, _ = await cluster.stream("/v1/completions", body)
            await received.wait_for(lambda worker: len(worker.cancels) == 2)
            matched = stop if isinstance(stop, str) else stop[-1]
            before, stopped, _ = "a b STOP c d".partition(matched)
            expected = before + stopped if keeps else before
            choice = answer["choices"][0]
            assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
                expected,
                "stop",
                matched,
            )
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected, body


async def test_held_back_text_is_flushed_when_the_answer_ends() -> None:
    script = Script(tokens=byte_ids(b"a ST"), finish_reason=FinishReason.LENGTH)
    async with running_cluster(script) as cluster:
        _, answer = await cluster.post("/v1/completions", {"prompt": "x", "stop": "STOP"})
    assert answer["choices"][0]["text"] == "a ST"
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_end_and_stop_tokens_have_no_text() -> None:
    stop_token = word_id("STOP")
    script = Script(tokens=[word_id("hello"), stop_token], stop_reason=stop_token)
    async with running_cluster(script) as cluster:
        body = {"prompt": "x", "stop_token_ids": [stop_token], "return_token_ids": True}
        _, answer = await cluster.post("/v1/completions", body)
    choice = answer["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("hello", stop_token)
    assert choice["token_ids"] == [word_id("hello"), stop_token]


async def test_a_stop_tokens_text_is_kept_where_asked_for() -> None:
    stop_token = word_id("STOP")
    script = Script(tokens=[word_id("hello"), stop_token], stop_reason=stop_token)
    async with running_cluster(script) as cluster:
        body = {"prompt": "x", "stop_token_ids": [stop_token], "include_stop_str_in_output": True}
        _, answer = await cluster.post("/v1/completions", body)
    assert answer["choices"][0]["text"] == "helloSTOP"


@pytest.mark.parametrize("roles", FORMS)
@pytest.mark.parametrize(
    ("skips", "expected"), [(True, "hello world"), (False, "hello<|user|> world<|end|>")]
)
async def test_special_and_end_tokens_are_shown_where_asked_for(
    roles: tuple[Role, ...], skips: bool, expected: str
) -> None:
    script = Script(tokens=[word_id("hello"), SPECIAL.index("<|user|>"), word_id(" world"), END])
    body = {"prompt": "x", "skip_special_tokens": skips, "spaces_between_special_tokens": True}
    chat = {**body, "messages": [{"role": "user", "content": "x"}]}
    del chat["prompt"]
    async with running_cluster(script, roles) as cluster:
        _, text = await cluster.post("/v1/completions", body)
        *chunks, _ = await cluster.stream("/v1/completions", body)
        _, answer = await cluster.post("/v1/chat/completions", chat)
    assert text["choices"][0]["text"] == expected
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
    assert answer["choices"][0]["message"]["content"] == expected
    assert text["choices"][0]["finish_reason"] == "stop"


async def test_a_stop_string_is_found_in_shown_special_tokens_alone() -> None:
    script = Script(tokens=[word_id("hello"), SPECIAL.index("<|user|>"), word_id(" world"), END])
    body = {"prompt": "x", "stop": "o<|u", "include_stop_str_in_output": True}
    async with running_cluster(script) as cluster:
        _, hidden = await cluster.post("/v1/completions", body)
        _, shown = await cluster.post("/v1/completions", {**body, "skip_special_tokens": False})
    assert hidden["choices"][0]["text"] == "hello world"
    assert (shown["choices"][0]["text"], shown["choices"][0]["stop_reason"]) == ("hello<|u", "o<|u")


@pytest.mark.parametrize("name", ["include_stop_str_in_output", "skip_special_tokens"])
async def test_a_switch_of_the_text_is_true_or_false(name: str) -> None:
    async with running_cluster(Script(tokens=[END]), (Role.AGGREGATED,)) as cluster:
        status, answer = await cluster.post("/v1/completions", {"prompt": "x", name: "yes"})
    assert (status, answer["error"]["param"]) == (400, name)


async def test_a_stop_string_waits_for_min_tokens() -> None:
    body = {"prompt": "x", "stop": ".", "min_tokens": 3}
    async with running_cluster(Script(tokens=byte_ids(b"a.b.c.d"))) as cluster:
        _, answer = await cluster.post("/v1/completions", body)
        _, kept = await cluster.post("/v1/completions", {**body, "include_stop_str_in_output": True})
    assert answer["choices"][0]["text"] == "a.b"
    assert kept["choices"][0]["text"] == "a.b."


async def test_an_answer_of_one_token_cancels_the_decode_leg() -> None:
    async with running_cluster(Script(tokens=[*HELLO, END])) as cluster:
        _, answer = await cluster.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
        decode = cluster.workers["decode-0"]
        await decode.received.wait_for(lambda worker: len(worker.cancels) == 1)
        assert decode.received.cancels[0].request_id == answer["id"]
        assert cluster.workers["prefill-0"].received.cancels == []
    assert answer["choices"][0]["text"] == "hello"
    assert answer["usage"]["completion_tokens"] == 1


async def test_a_finished_answer_cancels_nothing() -> None:
    async with running_cluster(Script(tokens=[*HELLO, END])) as cluster:
        await cluster.post("/v1/completions", {"prompt": "x"})
        await cluster.service.stop()
        assert [worker.received.cancels for worker in cluster.workers.values()] == [[], []]


async def test_legacy_logprobs_are_the_same_streamed_or_not() -> None:
    a, b = byte_ids(b"ab")
    script = Script(tokens=[a, *byte_ids("€".encode()), b], logprobs={a: -0.5, b: -1.5})
    async with running_cluster(script) as cluster:
        body = {"prompt": "x", "logprobs": 2, "max_tokens": 5}
        _, whole = await cluster.post("/v1/completions", body)
        *chunks, _ = await cluster.stream("/v1/completions", body)
    logprobs = whole["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b"]
    assert logprobs["token_logprobs"] == [-0.5, -1.0, -1.0, -1.0, -1.5]
    assert logprobs["top_logprobs"][0] == {"a": -0.5, "b": -1.5}
    assert logprobs["top_logprobs"][1] == {"a": -0.5, "b": -1.5, "bytes:\\xe2": -1.0}
    assert logprobs["text_offset"] == [1, 2, 2, 2, 3]
    for name, values in logprobs.items():
        assert [item for chunk in chunks for item in chunk["choices"][0]["logprobs"][name]] == values


async def test_cached_tokens_are_those_of_the_prefill_side() -> None:
    async with running_cluster(Script(tokens=[*HELLO, END], num_cached_tokens=16)) as cluster:
        _, answer = await cluster.post("/v1/completions", {"prompt": "x" * 20})
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


@pytest.mark.parametrize("prompt", ["hello world", [5, 6], ["hello world"], [[5, 6]]])
async def test_every_form_of_one_prompt_is_taken(prompt: Any) -> None:
    async with running_cluster(Script(tokens=[END])) as cluster:
        status, answer = await cluster.post("/v1/completions", {"prompt": prompt})
    assert (status, answer["usage"]["prompt_tokens"]) == (200, 2)


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/completions", {"prompt": [5] * 10}, 16),
        ("/v1/completions", {"prompt": [5] * 120}, 8),
        ("/v1/completions", {"prompt": [5] * 127}, 1),
        ("/v1/completions", {"prompt": [5] * 10, "max_tokens": 118}, 118),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}, 123),
    ],
)
async def test_default_of_max_tokens(path: str, body: dict[str, Any], expected: int) -> None:
    async with running_cluster(Script(tokens=[END]), (Role.AGGREGATED,)) as cluster:
        assert (await cluster.post(path, body))[0] == 200
        assert cluster.workers["both-0"].received.decodes[0].task.sampling.max_tokens == expected


@pytest.mark.parametrize("stream", [False, True])
async def test_an_infinite_log_probability_is_null_and_not_broken_json(stream: bool) -> None:
    script = Script(
        tokens=byte_ids(b"a"), logprobs={byte_ids(b"a")[0]: 0.0, byte_ids(b"b")[0]: float("-inf")}
    )
    body = {"prompt": "x", "logprobs": 2, "stream": stream}
    async with (
        running_cluster(script) as cluster,
        cluster.session.post(cluster.url("/v1/completions"), json=body) as response,
    ):
        text = await response.text()
    assert "Infinity" not in text
    assert '"top_logprobs":[{"a":0.0,"b":null}]' in text
