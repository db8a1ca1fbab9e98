"""``echo`` and ``prompt_logprobs``: the prompt beside its answer, over HTTP, gRPC and after a replay."""

import asyncio
from typing import Any

import pytest

from contract.identity import Role
from protos import inference_pb2 as pb
from protos import worker_pb2
from tests.fakes.router.script import Script
from tests.router.cluster import PAIR, running_cluster
from tests.text.tiny_model import END, byte_ids, word_id

TEXT = "/v1/completions"
FORMS = [PAIR, (Role.AGGREGATED,)]
HELLO, WORLD, AGAIN = (word_id(word) for word in ("hello", " world", " again"))


def script(task: worker_pb2.Task) -> Script:
    """Return a script in which token i of the prompt has log probability -i."""
    given = [-float(i) for i in range(1, len(task.prompt_token_ids) - task.first_index)]
    return Script(tokens=[AGAIN, END], prompt_logprobs=given, logprobs={AGAIN: -0.5, END: -0.25})


@pytest.mark.parametrize("roles", FORMS)
@pytest.mark.parametrize("prompt", ["hello world", [HELLO, WORLD]])
async def test_the_prompt_stands_before_the_answer_with_its_log_probabilities(
    prompt: Any, roles: tuple[Role, ...]
) -> None:
    body = {"prompt": prompt, "echo": True, "logprobs": 1}
    async with running_cluster(script, roles) as cluster:
        status, whole = await cluster.post(TEXT, body)
        *chunks, _ = await cluster.stream(TEXT, body)
    assert status == 200
    (choice,) = whole["choices"]
    assert choice["text"] == "hello world again"
    found = choice["logprobs"]
    assert found["tokens"][:3] == ["hello", " world", " again"]
    assert found["token_logprobs"] == [None, -1.0, -0.5, -0.25]
    assert found["top_logprobs"][0] is None and found["top_logprobs"][1] == {" world": -1.0}
    assert found["text_offset"][:3] == [0, 5, 11]
    assert whole["usage"]["prompt_tokens"] == 2 and whole["usage"]["completion_tokens"] == 2
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello world again"
    streamed = [one for chunk in chunks for one in chunk["choices"][0]["logprobs"]["token_logprobs"]]
    assert streamed == found["token_logprobs"]


async def test_no_token_is_wanted_but_the_prompts_log_probabilities() -> None:
    """Evaluations send max_tokens 0."""
    async with running_cluster(script) as cluster:
        body = {"prompt": ["hello world", "hello"], "echo": True, "logprobs": 0, "max_tokens": 0}
        _, whole = await cluster.post(TEXT, body)
    assert [choice["text"] for choice in whole["choices"]] == ["hello world", "hello"]
    assert [choice["logprobs"]["token_logprobs"] for choice in whole["choices"]] == [[None, -1.0], [None]]
    assert {choice["finish_reason"] for choice in whole["choices"]} == {"length"}
    assert whole["usage"]["completion_tokens"] == 0


async def test_echo_without_log_probabilities_asks_for_none() -> None:
    async with running_cluster(script) as cluster:
        _, whole = await cluster.post(
            TEXT, {"prompt": "hello", "echo": True, "n": 2, "return_token_ids": True}
        )
        sampling = cluster.workers["prefill-0"].received.prefills[0].task.sampling
    assert not sampling.HasField("prompt_logprobs")
    assert [choice["text"] for choice in whole["choices"]] == ["hello again"] * 2
    assert [choice["token_ids"] for choice in whole["choices"]] == [[HELLO, AGAIN, END]] * 2
    assert whole["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("roles", FORMS)
async def test_prompt_logprobs_have_vllms_shape(roles: tuple[Role, ...]) -> None:
    async with running_cluster(script, roles) as cluster, cluster.channel() as channel:
        _, whole = await cluster.post(TEXT, {"prompt": "hello world", "prompt_logprobs": 0})
        chat = {"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 0}
        _, answer = await cluster.post("/v1/chat/completions", chat)
        sampling = pb.SamplingParams(prompt_logprobs=0, max_tokens=1)
        once = await cluster.inference(channel).GenerateOnce(
            pb.GenerateRequest(text="hello world", sampling=sampling)
        )
    expected = [None, {str(WORLD): {"logprob": -1.0, "rank": 1, "decoded_token": " world"}}]
    assert whole["choices"][0]["prompt_logprobs"] == expected
    assert answer["prompt_logprobs"][0] is None and len(answer["prompt_logprobs"]) > 2
    assert [one.logprob for one in once.choices[0].prompt_logprobs] == [-1.0]


@pytest.mark.parametrize("stall_at", [0, 1])
async def test_a_replay_asks_for_them_again_only_where_they_did_not_come(stall_at: int) -> None:
    def stalling(task: worker_pb2.Task) -> Script:
        stall = None if task.attempt else stall_at
        told = script(task).prompt_logprobs
        return Script(tokens=[*byte_ids(b"ab"), END], prompt_logprobs=told, stall_at=stall)

    async with running_cluster(stalling, (Role.AGGREGATED,)) as cluster:
        body = {"prompt": "hello world", "prompt_logprobs": 0}
        asking = asyncio.create_task(cluster.post(TEXT, body))
        state = "streaming" if stall_at else "waiting_for_first_token"
        await cluster.until(lambda found: found["requests"][state] == 1)
        await cluster.add(Role.AGGREGATED, "both-1")
        await cluster.workers["both-0"].die()
        _, whole = await asking
        tasks = [leg.task for worker in cluster.workers.values() for leg in worker.received.decodes]
    assert whole["choices"][0]["text"] == "ab"
    assert len(whole["choices"][0]["prompt_logprobs"]) == 2
    asked = {task.attempt: task.sampling.HasField("prompt_logprobs") for task in tasks}
    assert asked == {0: True, 1: stall_at == 0}
