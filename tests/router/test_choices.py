"""``n`` and ``best_of``: one prompt, one pair of legs, several answers; each survives a worker's death separately."""

import asyncio
from collections import defaultdict
from typing import Any

import grpc.aio
import pytest

from contract.errors import TransferError
from contract.identity import Role
from contract.sampling import choice_seed
from protos import inference_pb2 as pb
from protos import worker_pb2
from tests.fakes.router.script import Script
from tests.router.cluster import PAIR, Cluster, running_cluster
from tests.router.test_ends import nothing_is_left
from tests.text.tiny_model import END, byte_ids, word_id

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
FORMS = [PAIR, (Role.AGGREGATED,)]
ANSWERS = [b"none", b"one", b"two", b"three"]


def by_choice(task: worker_pb2.Task) -> Script:
    """Return a script whose answer is the number of the choice."""
    return Script(tokens=[*byte_ids(ANSWERS[task.choice]), END])


def texts_of(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def tasks_of(cluster: Cluster) -> list[worker_pb2.Task]:
    """Return every task that the workers received."""
    workers = cluster.workers.values()
    return [leg.task for each in workers for leg in each.received.prefills] + [
        leg.task for each in workers for leg in each.received.decodes
    ]


async def streamed(cluster: Cluster, body: dict[str, Any]) -> dict[int, str]:
    """Return every choice's text by its index."""
    *chunks, done = await cluster.stream(TEXT, body)
    assert done == "[DONE]"
    texts: defaultdict[int, str] = defaultdict(str)
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    return dict(texts)


@pytest.mark.parametrize("roles", FORMS)
async def test_one_task_asks_for_all_choices_and_each_has_its_answer(roles: tuple[Role, ...]) -> None:
    async with running_cluster(by_choice, roles) as cluster:
        status, whole = await cluster.post(TEXT, {"prompt": "hello world", "n": 4, "seed": 5})
        assert await streamed(cluster, {"prompt": "x", "n": 3}) == {0: "none", 1: "one", 2: "two"}
        await nothing_is_left(cluster)
        tasks = tasks_of(cluster)
    assert status == 200
    assert texts_of(whole) == ["none", "one", "two", "three"]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert whole["usage"]["prompt_tokens"] == 2
    assert whole["usage"]["completion_tokens"] == sum(len(answer) + 1 for answer in ANSWERS)
    assert [
        (task.choice, task.num_choices, task.sampling.seed) for task in tasks if task.num_choices == 4
    ] == [(0, 4, 5)] * len(roles)
    assert len(tasks) == 2 * len(roles)


async def test_chat_choices_have_their_own_chunks() -> None:
    async with running_cluster(by_choice) as cluster:
        body = {"messages": [{"role": "user", "content": "x"}], "n": 2}
        _, whole = await cluster.post(CHAT, body)
        *chunks, usage, _ = await cluster.stream(CHAT, {**body, "stream_options": {"include_usage": True}})
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["none", "one"]
    roles = [c["index"] for chunk in chunks for c in chunk["choices"] if "role" in c["delta"]]
    assert sorted(roles) == [0, 1]
    assert usage["usage"] == whole["usage"]


async def test_several_prompts_have_n_answers_each_one_prompts_behind_the_others() -> None:
    def script(task: worker_pb2.Task) -> Script:
        return Script(tokens=[*task.prompt_token_ids, *byte_ids(ANSWERS[task.choice]), END])

    async with running_cluster(script) as cluster:
        _, whole = await cluster.post(TEXT, {"prompt": ["hello", " again"], "n": 2})
    assert texts_of(whole) == ["hellonone", "helloone", " againnone", " againone"]
    assert whole["usage"]["prompt_tokens"] == 2


async def test_best_of_returns_the_likeliest_and_counts_all() -> None:
    likely = {1: -0.5, 3: -0.1}

    def script(task: worker_pb2.Task) -> Script:
        tokens = byte_ids(ANSWERS[task.choice])
        return Script(
            tokens=[*tokens, END], logprobs={t: likely.get(task.choice, -2.0) for t in [*tokens, END]}
        )

    async with running_cluster(script) as cluster:
        _, whole = await cluster.post(TEXT, {"prompt": ["x", "y"], "n": 2, "best_of": 4})
        assert texts_of(whole) == ["three", "one", "three", "one"]
        assert all(choice["logprobs"] is None for choice in whole["choices"])
        assert whole["usage"]["completion_tokens"] == 2 * sum(len(answer) + 1 for answer in ANSWERS)
        async with cluster.channel() as channel:
            sampling = pb.SamplingParams(n=1, best_of=4)
            request = pb.GenerateRequest(text="x", sampling=sampling)
            once = await cluster.inference(channel).GenerateOnce(request)
            assert [(choice.index, choice.text) for choice in once.choices] == [(0, "three")]
            assert once.usage.completion_tokens == sum(len(answer) + 1 for answer in ANSWERS)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await cluster.inference(channel).Generate(request).read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_grpc_gives_the_same_choices_as_http() -> None:
    async with running_cluster(by_choice) as cluster, cluster.channel() as channel:
        request = pb.GenerateRequest(text="hello world", sampling=pb.SamplingParams(n=3, max_tokens=9))
        once = await cluster.inference(channel).GenerateOnce(request)
        texts: defaultdict[int, str] = defaultdict(str)
        async for part in cluster.inference(channel).Generate(request):
            for choice in part.choices:
                texts[choice.index] += choice.text
        for bad in (pb.SamplingParams(n=0), pb.SamplingParams(n=129), pb.SamplingParams(n=3, best_of=2)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await cluster.inference(channel).GenerateOnce(pb.GenerateRequest(text="x", sampling=bad))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert [choice.text for choice in once.choices] == ["none", "one", "two"]
    assert dict(texts) == {0: "none", 1: "one", 2: "two"}
    assert (once.usage.prompt_tokens, once.usage.completion_tokens) == (2, 5 + 4 + 4)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("die_at", [0, 1, 3])
async def test_after_a_workers_death_each_choice_goes_on_where_it_was(role: Role, die_at: int) -> None:
    """Each choice is replayed separately, with its own seed, after its delivered tokens."""

    def script(task: worker_pb2.Task) -> Script:
        is_prefill = task.first_index == 0
        is_bad = task.attempt == 0 and is_prefill == (role is Role.PREFILL) and task.choice == 1
        tokens = [*byte_ids(ANSWERS[task.choice]), END]
        return Script(tokens=tokens, die_at=max(die_at, task.first_index) if is_bad else None)

    async with running_cluster(script) as cluster:
        await cluster.add(role, f"{role.value}-1")
        async with asyncio.timeout(30):
            assert await streamed(cluster, {"prompt": "x", "n": 3, "seed": 5}) == {
                0: "none",
                1: "one",
                2: "two",
            }
        await nothing_is_left(cluster)
        tasks = tasks_of(cluster)
    for task in tasks:
        if task.attempt:
            assert task.num_choices == 1
            assert task.sampling.seed == choice_seed(5, task.choice)


async def test_a_failed_hand_over_of_all_is_tried_again_for_each() -> None:
    def script(task: worker_pb2.Task) -> Script:
        tokens = [*byte_ids(ANSWERS[task.choice]), END]
        is_bad = task.attempt == 0 and task.first_index == 1
        return Script(tokens=tokens, fail_at=1 if is_bad else None, error=TransferError("torn"))

    async with running_cluster(script) as cluster:
        _, whole = await cluster.post(TEXT, {"prompt": "x", "n": 3})
    assert texts_of(whole) == ["none", "one", "two"]


async def test_a_refused_leg_is_refused_for_every_choice() -> None:
    def script(task: worker_pb2.Task) -> Script:
        refuse = TransferError("no") if task.first_index else None
        return Script(tokens=[*byte_ids(ANSWERS[task.choice]), END], refuse=refuse)

    async with running_cluster(script, max_replays=0) as cluster:
        status, answer = await cluster.post(TEXT, {"prompt": "x", "n": 3})
        assert status == 500, answer
        await nothing_is_left(cluster)


async def test_a_choice_that_a_stop_string_ends_leaves_the_others_alone() -> None:
    def script(task: worker_pb2.Task) -> Script:
        return Script(
            tokens=byte_ids(b"a.b.c.d" if task.choice else b"ab.cdef"), stall_at=6 if task.choice else 5
        )

    async with running_cluster(script, (Role.AGGREGATED,)) as cluster:
        worker = cluster.workers["both-0"]
        asking = asyncio.create_task(cluster.post(TEXT, {"prompt": "x", "n": 3, "stop": "b.c"}))
        await worker.received.wait_for(lambda worker: len(worker.cancels) == 3)
        assert sorted(cancel.choice for cancel in worker.received.cancels) == [0, 1, 2]
        _, answer = await asking
        await nothing_is_left(cluster)
    assert texts_of(answer) == ["a", "a.", "a."]


async def test_a_client_that_leaves_while_all_wait_for_workers_leaves_nothing() -> None:
    async with running_cluster(by_choice, (), worker_wait_seconds=30) as cluster:
        await cluster.add(Role.PREFILL)
        await cluster.until(lambda state: state["model"])
        asking = asyncio.create_task(cluster.post(TEXT, {"prompt": "x", "n": 3}))
        await cluster.until(lambda state: state["requests"]["waiting_for_workers"] == 3)
        asking.cancel()
        await cluster.until(lambda state: not any(state["requests"].values()))
        await cluster.add(Role.DECODE)
        await nothing_is_left(cluster)


async def test_without_a_worker_all_choices_end_with_one_error() -> None:
    async with running_cluster(by_choice, ()) as cluster:
        await cluster.add(Role.DECODE)
        await cluster.until(lambda state: state["model"])
        status, answer = await cluster.post(TEXT, {"prompt": "x", "n": 3})
        assert (status, answer["error"]["code"]) == (503, "unavailable")
        await nothing_is_left(cluster)


async def test_special_tokens_stay_those_of_their_choice() -> None:
    def script(task: worker_pb2.Task) -> Script:
        return Script(tokens=[word_id("hello")] * (task.choice + 1) + [END])

    async with running_cluster(script) as cluster:
        _, whole = await cluster.post(TEXT, {"prompt": "x", "n": 2, "return_token_ids": True})
    assert [len(choice["token_ids"]) for choice in whole["choices"]] == [2, 3]
