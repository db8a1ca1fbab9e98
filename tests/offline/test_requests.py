"""Many prompts through a real pipeline with scripted workers: checks, order, outputs, errors."""

from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import pytest

from contract.errors import ContextLengthError, InternalError, InvalidRequestError, KvbatonError
from contract.identity import Role
from kvbaton.outputs import Logprob, RequestOutput
from kvbaton.requests import check_all, parse_conversations, parse_prompts, run_all
from kvbaton.sampling import SamplingParams
from protos import worker_pb2
from tests.fakes.router.script import Script
from tests.router.cluster import Cluster, running_cluster
from tests.text.tiny_model import BOS, END, byte_ids

REQUEST_IDS = count()
"""No id comes twice: a late cancel of one request would end the next."""


def echoing(task: worker_pb2.Task) -> Script:
    """Repeats the prompt's last token, then ends."""
    last = task.prompt_token_ids[-1]
    logprobs = {BOS: -0.25, END: -0.5} if task.sampling.HasField("logprobs") else {}
    return Script(tokens=[last, END], logprobs=logprobs, num_cached_tokens=len(task.prompt_token_ids) - 1)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with running_cluster(echoing, roles=(Role.AGGREGATED,)) as running:
        yield running


async def ask(
    cluster: Cluster, prompts: Any, params: SamplingParams | None = None, *, is_chat: bool = False
) -> list[RequestOutput]:
    service = cluster.service
    parsed = parse_conversations(prompts) if is_chat else parse_prompts(prompts)
    params = params or SamplingParams()
    made = [
        lambda one=one: params.request(str(next(REQUEST_IDS)), one.content, **one.others) for one in parsed
    ]
    questions = check_all(service.pipeline, service.models.card(), made)
    answered: list[None] = []
    outputs = await run_all(
        service.pipeline, service.models.card().tokenizer, questions, lambda: answered.append(None)
    )
    assert len(answered) == len(outputs)
    return outputs


async def test_answers_come_in_the_order_of_the_prompts_whichever_is_ready_first(cluster: Cluster) -> None:
    """A20, A21."""

    def long_first(task: worker_pb2.Task) -> Script:
        last = task.prompt_token_ids[-1]
        return Script(tokens=[last] * (9 if last == byte_ids(b"a")[0] else 1) + [END])

    cluster.script = long_first
    outputs = await ask(cluster, ["a", "b", "c"])
    assert [output.outputs[0].text for output in outputs] == ["a" * 9, "b", "c"]
    first = int(outputs[0].request_id)
    assert [output.request_id for output in outputs] == [f"{first + n}" for n in range(3)]


async def test_an_output_has_the_names_of_vllm(cluster: Cluster) -> None:
    """A21."""
    (output,) = await ask(cluster, "ab")
    (answer,) = output.outputs
    assert (output.prompt, output.prompt_token_ids, output.finished) == ("ab", byte_ids(b"ab"), True)
    assert (answer.index, answer.text, answer.token_ids) == (0, "b", [*byte_ids(b"b"), END])
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    assert (answer.logprobs, answer.cumulative_logprob) == (None, None)
    assert output.num_cached_tokens == 1
    assert output.metrics.end_to_end > 0


async def test_a_prompt_has_as_many_answers_as_asked_for(cluster: Cluster) -> None:
    outputs = await ask(cluster, ["a", "b"], SamplingParams(n=3))
    told = [[(answer.index, answer.text) for answer in output.outputs] for output in outputs]
    assert told == [[(index, text) for index in range(3)] for text in "ab"]
    assert [output.num_cached_tokens for output in outputs] == [0, 0]


async def test_log_probabilities_are_by_token_id_the_answers_own_first(cluster: Cluster) -> None:
    (output,) = await ask(cluster, "ab", SamplingParams(logprobs=2))
    (answer,) = output.outputs
    b = byte_ids(b"b")[0]
    assert answer.logprobs is not None
    assert [list(one) for one in answer.logprobs] == [[b, BOS, END], [END, BOS]]
    assert answer.logprobs[0][b] == Logprob(logprob=-1.0, rank=3, decoded_token="b")
    assert answer.logprobs[1][END] == Logprob(logprob=-0.5, rank=2, decoded_token="<|end|>")
    assert answer.cumulative_logprob == -1.5


async def test_what_ended_the_answer_is_kept_where_asked_for(cluster: Cluster) -> None:
    params = [
        SamplingParams(stop="b"),
        SamplingParams(stop="b", include_stop_str_in_output=True),
        SamplingParams(skip_special_tokens=False),
    ]
    answers = [(await ask(cluster, "ab", each))[0].outputs[0] for each in params]
    assert [answer.text for answer in answers] == ["", "b", "b<|end|>"]


async def test_every_shape_of_a_prompt_is_taken(cluster: Cluster) -> None:
    ids = byte_ids(b"xy")
    for prompt in ("xy", ids, tuple(ids), {"prompt": "xy"}, {"prompt_token_ids": ids, "cache_salt": "s"}):
        for prompts in (prompt, [prompt]):
            (output,) = await ask(cluster, prompts)
            assert output.prompt_token_ids == ids
    assert await ask(cluster, []) == []


async def test_a_salt_and_a_priority_go_to_the_workers(cluster: Cluster) -> None:
    """A21."""
    await ask(cluster, {"prompt": "xy", "cache_salt": "mine"})
    assert cluster.workers["both-0"].received.decodes[-1].task.cache_salt == "mine"
    pipeline, card = cluster.service.pipeline, cluster.service.models.card()
    made = [lambda: SamplingParams().request("one", "xy", priority=7)]
    await run_all(pipeline, card.tokenizer, check_all(pipeline, card, made), lambda: None)
    assert cluster.workers["both-0"].received.decodes[-1].task.priority == 7


async def test_a_chat_is_what_the_service_makes_of_it(cluster: Cluster) -> None:
    messages = [{"role": "user", "content": "hi"}]
    one, several = (
        await ask(cluster, messages, is_chat=True),
        await ask(cluster, [messages, messages], is_chat=True),
    )
    await cluster.post("/v1/chat/completions", {"messages": messages, "max_tokens": 16})
    over_http = list(cluster.workers["both-0"].received.decodes[-1].task.prompt_token_ids)
    assert [output.prompt_token_ids for output in (*one, *several)] == [over_http] * 3
    assert one[0].prompt is not None
    assert "hi" in one[0].prompt


async def test_a_form_goes_to_the_workers_and_a_bad_one_is_named(cluster: Cluster) -> None:
    await ask(cluster, "xy", SamplingParams(structured_outputs={"choice": ["a", "b"]}))
    grammar = cluster.workers["both-0"].received.decodes[-1].task.sampling.grammar
    assert (grammar.kind, grammar.text) == ("choice", '["a","b"]')
    with pytest.raises(InvalidRequestError, match=r"^prompt 0: ") as caught:
        await ask(cluster, "xy", SamplingParams(structured_outputs={"choice": []}))
    assert caught.value.param == "structured_outputs"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3.0}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": "two"}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"bad_words": ["no"]}, "bad_words"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
    ],
)
async def test_a_bad_field_is_named_before_anything_is_sent(
    cluster: Cluster, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequestError, match=r"^prompt 0: ") as caught:
        await ask(cluster, ["a", "b"], SamplingParams(**fields))
    assert caught.value.param == param
    assert cluster.workers["both-0"].received.decodes == []


@pytest.mark.parametrize(
    "bad", [7, None, {}, {"text": "x"}, {"prompt": [1]}, {"prompt_token_ids": "x"}, ["x", 1], {"prompt": 7}]
)
async def test_a_bad_prompt_is_named_by_its_place(cluster: Cluster, bad: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"prompts\[1\]"):
        await ask(cluster, ["a", bad])
    assert cluster.workers["both-0"].received.decodes == []


async def test_what_the_model_cannot_take_is_named_by_its_place(cluster: Cluster) -> None:
    with pytest.raises(ContextLengthError, match=r"^prompt 1: "):
        await ask(cluster, ["a", "b" * 1000])
    with pytest.raises(InvalidRequestError, match=r"^prompt 1: .*vocabulary"):
        await ask(cluster, ["a", [10**6]])
    with pytest.raises(InvalidRequestError, match=r"^prompt 1: messages\[0\].role"):
        await ask(
            cluster, [[{"role": "user", "content": "a"}], [{"role": "x", "content": "a"}]], is_chat=True
        )
    assert cluster.workers["both-0"].received.decodes == []


async def test_an_error_on_the_way_names_the_prompt_and_ends_the_others(cluster: Cluster) -> None:
    def failing(task: worker_pb2.Task) -> Script:
        is_bad = task.prompt_token_ids[-1] == byte_ids(b"b")[0]
        error = InternalError("broken")
        return Script(
            tokens=[END], fail_at=0 if is_bad else None, stall_at=None if is_bad else 0, error=error
        )

    cluster.script = failing
    with pytest.raises(KvbatonError, match=r"^prompt 1: .*broken"):
        await ask(cluster, ["a", "b", "c"])
    await cluster.until(lambda state: state["num_tasks"] == 0 and not any(state["requests"].values()))
