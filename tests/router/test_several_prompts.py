"""/v1/completions with a list of prompts: one choice for each, in any order of arrival, and one end for all."""

import asyncio
import logging
import tracemalloc
from collections import defaultdict
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from contract.errors import InternalError
from contract.identity import Role
from protos import worker_pb2 as pb
from router.answers.answer import Delta, merge_streams
from tests.fakes.router.script import Script
from tests.router.cluster import PAIR, running_cluster
from tests.router.test_ends import nothing_is_left
from tests.text.tiny_model import END, byte_ids, word_id

TEXT = "/v1/completions"
HELLO, WORLD, AGAIN = (word_id(word) for word in ("hello", " world", " again"))


def echoing(task: pb.Task) -> Script:
    """Return a script whose answer is the prompt's tokens and " world"."""
    return Script(tokens=[*task.prompt_token_ids, WORLD, END])


@pytest.mark.parametrize("roles", [PAIR, (Role.AGGREGATED,)])
@pytest.mark.parametrize(
    "prompts", [["hello", " again", "hello again"], [[HELLO], [AGAIN], [HELLO, AGAIN]]], ids=["text", "ids"]
)
async def test_each_prompt_has_its_choice(roles: tuple[Role, ...], prompts: list[Any]) -> None:
    async with running_cluster(echoing, roles) as cluster:
        status, whole = await cluster.post(TEXT, {"prompt": prompts, "logprobs": 0, "timings": True})
        body = {"prompt": prompts, "stream_options": {"include_usage": True}, "logprobs": 0}
        *chunks, usage, done = await cluster.stream(TEXT, body)
        await nothing_is_left(cluster)
    assert status == 200 and done == "[DONE]"
    texts = ["hello world", " again world", "hello again world"]
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == list(enumerate(texts))
    assert {choice["finish_reason"] for choice in whole["choices"]} == {"stop"}
    assert [choice["logprobs"]["text_offset"][:2] for choice in whole["choices"]] == [
        [5, 10],
        [6, 12],
        [11, 16],
    ]
    assert whole["usage"]["prompt_tokens"] == 4 and whole["usage"]["completion_tokens"] == 10
    assert whole["kvbaton"]["timings"]["end_to_end"] > 0
    streamed: defaultdict[int, str] = defaultdict(str)
    for chunk in chunks:
        assert chunk["id"] == chunks[0]["id"] and chunk["usage"] is None
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert dict(streamed) == dict(enumerate(texts))
    assert usage["choices"] == [] and usage["usage"] == whole["usage"]


async def test_a_list_of_one_prompt_is_that_prompt() -> None:
    async with running_cluster(echoing) as cluster:
        _, alone = await cluster.post(TEXT, {"prompt": "hello"})
        _, listed = await cluster.post(TEXT, {"prompt": ["hello"]})
    assert listed["choices"] == alone["choices"] and listed["usage"] == alone["usage"]


async def test_one_bad_prompt_rejects_them_all() -> None:
    """The error is that of the bad prompt, and nothing is left of the others."""
    async with running_cluster(echoing) as cluster:
        status, answer = await cluster.post(TEXT, {"prompt": ["hello", "x" * 500], "max_tokens": 4})
        assert status == 400 and "maximum context length" in answer["error"]["message"]
        await nothing_is_left(cluster)


async def test_others_continue_between_the_prompts_of_a_long_list() -> None:
    """The last prompt is bad, so that only tokenizing takes place."""
    prompts = [*["hello"] * 999, "x" * 500]
    async with running_cluster(echoing) as cluster:
        asking = asyncio.create_task(cluster.post(TEXT, {"prompt": prompts, "max_tokens": 4}))
        num_turns = 0
        while not asking.done():
            await asyncio.sleep(0)
            num_turns += 1
        assert asking.result()[0] == 400
    assert num_turns > len(prompts)


async def test_an_error_of_one_answer_ends_the_others() -> None:
    def failing(task: pb.Task) -> Script:
        if list(task.prompt_token_ids) == [AGAIN]:
            return Script(tokens=byte_ids(b"abc"), fail_at=1, error=InternalError("torn"))
        return Script(tokens=byte_ids(b"abc"), stall_at=2)

    async with running_cluster(failing, (Role.AGGREGATED,)) as cluster:
        status, answer = await cluster.post(TEXT, {"prompt": ["hello", " again"], "max_tokens": 3})
        assert status == 500 and "torn" in answer["error"]["message"]
        await nothing_is_left(cluster)


async def test_a_client_that_leaves_cancels_every_answer() -> None:
    async with running_cluster(
        lambda _: Script(tokens=byte_ids(b"abc"), stall_at=1), (Role.AGGREGATED,)
    ) as cluster:
        worker = cluster.workers["both-0"]
        asking = asyncio.create_task(cluster.post(TEXT, {"prompt": ["a", "b", "c"], "max_tokens": 3}))
        await worker.received.wait_for(lambda worker: len(worker.decodes) == 3)
        asking.cancel()
        await worker.received.wait_for(lambda worker: len(worker.cancels) == 3)
        await nothing_is_left(cluster)


async def test_a_reader_that_is_cancelled_twice_leaves_no_stream_open() -> None:
    """The second cancellation may arrive while the first one is still being handled."""
    open_streams: set[int] = set()

    async def stream(number: int) -> AsyncGenerator[Delta, None]:
        open_streams.add(number)
        try:
            await asyncio.Event().wait()
            yield Delta()
        finally:
            open_streams.remove(number)

    async def read() -> None:
        async for _ in merge_streams([stream(number) for number in range(6)]):
            pass

    reader = asyncio.create_task(read())
    while len(open_streams) < 6:
        await asyncio.sleep(0)
    reader.cancel()
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.wait([reader])
    await asyncio.sleep(0)
    assert not open_streams


async def test_prompts_share_what_is_made_of_their_stop_strings() -> None:
    """H2: 256 prompts with 4,096 characters of stop strings took 170 MB."""
    stops = [f"{number:02}" * 32 for number in range(64)]
    script = Script(tokens=[*byte_ids(b"00"), END], stall_at=2)
    async with running_cluster(script, (Role.AGGREGATED,)) as cluster:
        tracemalloc.start()
        try:
            body = {"prompt": ["x"] * 256, "stop": stops, "max_tokens": 9}
            asking = asyncio.create_task(cluster.post(TEXT, body))
            await cluster.until(lambda state: state["requests"]["streaming"] == 256)
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        asking.cancel()
        assert held < 64 * 2**20
        await cluster.until(lambda state: not any(state["requests"].values()))


@pytest.mark.parametrize(
    "field",
    [{"guided_regex": "a" * 200_000}, {"allowed_token_ids": list(range(250)) * 64}],
    ids=["grammar", "ids"],
)
async def test_what_every_prompt_takes_along_is_bounded(field: dict[str, Any]) -> None:
    """H2: one request of 200 kB sent 400 MB to the workers."""
    async with running_cluster(echoing, (Role.AGGREGATED,)) as cluster:
        status, answer = await cluster.post(TEXT, {"prompt": ["hello"] * 1000, **field})
        assert (status, answer["error"]["param"]) == (400, "prompt")
        assert "with each of 1000 prompts" in answer["error"]["message"]
        assert (await cluster.post(TEXT, {"prompt": ["hello"] * 2, **field}))[0] == 200


async def test_a_request_of_too_many_prompts_is_refused_before_one_is_opened(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """M3: each of its prompts was opened and closed, and had a line in the log: 1,000 took 100 ms of everybody's time."""
    async with running_cluster(Script(tokens=[END], stall_at=0), (Role.AGGREGATED,), max_queue=4) as cluster:
        first = asyncio.create_task(cluster.post(TEXT, {"prompt": "hello"}))
        await cluster.workers["both-0"].received.wait_for(lambda worker: len(worker.decodes) == 1)
        cluster.workers["both-0"].stream.grant(pb.Credit(max_requests=1, max_tokens=100))
        await cluster.until(lambda state: state["workers"][0]["max_requests"] == 1)
        second = asyncio.create_task(cluster.post(TEXT, {"prompt": "hello"}))
        await cluster.until(lambda state: state["num_in_line"] == 1)
        with caplog.at_level(logging.INFO):
            status, refused = await cluster.post(TEXT, {"prompt": ["hello"] * 4})
        assert status == 429 and "makes 4 more" in refused["error"]["message"]
        assert not [line for line in caplog.messages if "ended as overloaded" in line]
        second.cancel()
        first.cancel()


async def test_a_request_of_many_prompts_that_ends_early_has_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """L1: a client that goes away took a line for each prompt; and none of those that wait is begun while they end."""
    async with running_cluster(Script(tokens=[HELLO, END], stall_at=0), (Role.AGGREGATED,)) as cluster:
        cluster.workers["both-0"].stream.grant(pb.Credit(max_requests=2, max_tokens=1000))
        await cluster.until(lambda state: state["workers"][0]["max_requests"] == 2)
        asking = asyncio.create_task(cluster.post(TEXT, {"prompt": ["hello"] * 50}))
        await cluster.until(lambda state: state["num_in_line"] == 48)
        with caplog.at_level(logging.INFO):
            asking.cancel()
            await cluster.until(lambda state: not any(state["requests"].values()))
        await nothing_is_left(cluster)
        assert len(cluster.workers["both-0"].received.decodes) == 2
    assert len([line for line in caplog.messages if "ended as cancelled" in line]) == 1
