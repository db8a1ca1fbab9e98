"""Grammars in all fields that can hold one: the same task for the workers, and errors that name the field."""

import json
from typing import Any

import grpc
import pytest

from contract.errors import InvalidRequestError
from contract.identity import Role
from contract.json_schema import MAX_SCHEMA_BYTES, reduced
from contract.sampling import MAX_GRAMMAR_BYTES, Grammar
from protos import inference_pb2 as pb
from tests.fakes.router.script import Script
from tests.router.cluster import PAIR, Cluster, running_cluster
from tests.router.test_bad_input import CHAT, SAY, TEXT, check_all, check_error
from tests.text.tiny_model import END, word_id

HELLO = Script(tokens=[word_id("hello"), END])
SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"const": "é"}}}
WRITTEN = json.dumps(SCHEMA, ensure_ascii=False, separators=(",", ":"))
FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": SCHEMA}}

WAYS: list[tuple[dict[str, Any], tuple[str, str]]] = [
    ({"response_format": FORMAT}, ("json_schema", WRITTEN)),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": True}}}, ("json_schema", "true")),
    ({"response_format": {"type": "json_object"}}, ("json_object", "")),
    ({"response_format": {"type": "json_object", "schema": None}}, ("json_object", "")),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, ("json_schema", WRITTEN)),
    ({"response_format": {"type": "json_object", "schema": WRITTEN}}, ("json_schema", WRITTEN)),
    (
        {"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}},
        ("json_schema", WRITTEN),
    ),
    ({"response_format": {"type": "json_object", "schema": {}}}, ("json_schema", '{"type":"object"}')),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, ("json_schema", WRITTEN)),
    ({"guided_json": SCHEMA}, ("json_schema", WRITTEN)),
    ({"guided_json": WRITTEN}, ("json_schema", WRITTEN)),
    ({"guided_regex": r"\d+"}, ("regex", r"\d+")),
    ({"guided_choice": ["a", "é"]}, ("choice", '["a","é"]')),
    ({"guided_grammar": 'root ::= "a"'}, ("ebnf", 'root ::= "a"')),
    ({"guided_grammar": {"syntax": "gbnf", "definition": 'root ::= "a"'}}, ("gbnf", 'root ::= "a"')),
    ({"guided_grammar": {"definition": "start: X"}}, ("ebnf", "start: X")),
    (
        {"structured_outputs": {"grammar": {"type": "grammar", "syntax": "lark", "definition": "start: X"}}},
        ("lark", "start: X"),
    ),
    ({"structured_outputs": {"grammar": {"syntax": "regex", "definition": "a+"}}}, ("regex", "a+")),
    ({"guided_json": {"title": "t", **SCHEMA, "$comment": "c", "default": {}}}, ("json_schema", WRITTEN)),
    ({"guided_json": json.dumps(SCHEMA, indent=99)}, ("json_schema", WRITTEN)),
    ({"structured_outputs": {"json": SCHEMA}}, ("json_schema", WRITTEN)),
    ({"structured_outputs": {"regex": "a", "json": None}}, ("regex", "a")),
    ({"structured_outputs": {"choice": ["a"]}}, ("choice", '["a"]')),
    ({"structured_outputs": {"grammar": "start: X"}}, ("ebnf", "start: X")),
    ({"structured_outputs": {"json_object": True}, "response_format": None}, ("json_object", "")),
]
NOTHING: list[dict[str, Any]] = [
    {},
    {"response_format": {"type": "text"}, "guided_json": None},
    {"structured_outputs": {}},
    {"structured_outputs": {"json_object": False, "regex": None}},
]


def grammars_of(cluster: Cluster) -> list[tuple[str, str] | None]:
    """Return the grammars that both legs of every request received; None for no grammar."""
    tasks = [
        task
        for worker in cluster.workers.values()
        for task in (
            *(leg.task for leg in worker.received.prefills),
            *(leg.task for leg in worker.received.decodes),
        )
    ]
    grammars = [task.sampling.grammar if task.sampling.HasField("grammar") else None for task in tasks]
    return [grammar and (grammar.kind, grammar.text) for grammar in grammars]


@pytest.mark.parametrize(
    ("path", "base"),
    [
        (CHAT, SAY),
        pytest.param(TEXT, {"prompt": ["hello", "again"]}, marks=pytest.mark.slow),
    ],
)
async def test_each_field_reaches_both_legs(path: str, base: dict[str, Any]) -> None:
    async with running_cluster(HELLO, PAIR) as cluster:
        for fields, wanted in WAYS:
            status, answer = await cluster.post(path, {**base, **fields})
            assert status == 200, answer
            assert grammars_of(cluster) == [wanted] * (2 if path == CHAT else 4), fields
            for worker in cluster.workers.values():
                worker.received.prefills.clear()
                worker.received.decodes.clear()


async def test_without_a_grammar_no_task_has_one() -> None:
    async with running_cluster(HELLO, (Role.AGGREGATED,)) as cluster:
        for fields in NOTHING:
            status, answer = await cluster.post(CHAT, {**SAY, **fields})
            assert status == 200, answer
        assert grammars_of(cluster) == [None] * len(NOTHING)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {}}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": 7}}, "response_format"),
    ({"response_format": {"type": "json_object", "schema": 7}}, "response_format"),
    ({"response_format": {"type": "json_object", "schema": "{"}}, "response_format"),
    ({"response_format": {"type": "json_object", "schema": {"type": "array"}}}, "response_format"),
    (
        {"response_format": {"type": "json_object", "schema": {}, "json_schema": {"schema": {}}}},
        "response_format",
    ),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format"),
    ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": []}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "it"}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}}, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
        "response_format",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "name": 1}}},
        "response_format",
    ),
    ({"guided_json": 7}, "guided_json"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": '{"a": ' * 5000}, "guided_json"),
    ({"guided_json": '{"const": "\\ud800"}'}, "guided_json"),
    ({"structured_outputs": {"json": '{"properties": {"\\udfff": {}}}'}}, "structured_outputs"),
    ({"guided_regex": ["a"]}, "guided_regex"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", ""]}, "guided_choice"),
    ({"guided_choice": ["a", 7]}, "guided_choice"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"guided_grammar": {}}, "guided_grammar"),
    ({"guided_grammar": {"syntax": "peg", "definition": "a"}}, "guided_grammar"),
    ({"guided_grammar": {"type": "text", "definition": "a"}}, "guided_grammar"),
    ({"guided_grammar": {"syntax": "lark"}}, "guided_grammar"),
    ({"guided_json": {"type": "string", "not": {"const": "a"}}}, "guided_json"),
    ({"structured_outputs": "json"}, "structured_outputs"),
    ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "guided_regex"),
]


async def test_a_malformed_grammar_is_named_by_its_field() -> None:
    async with running_cluster(HELLO, (Role.AGGREGATED,)) as cluster:
        await check_all(cluster, CHAT, SAY, BAD)
        await check_all(cluster, TEXT, {"prompt": "hello"}, BAD)
        assert cluster.workers["both-0"].received.decodes == []


@pytest.mark.parametrize("roles", [PAIR, (Role.AGGREGATED,)])
@pytest.mark.parametrize(
    ("fields", "param"),
    [({"response_format": FORMAT}, "response_format"), ({"guided_regex": "(a"}, "guided_regex")],
)
async def test_a_grammar_that_a_worker_cannot_compile_is_named_by_its_field(
    roles: tuple[Role, ...], fields: dict[str, Any], param: str
) -> None:
    """For streams too: headers are sent with the first token. No other worker is tried."""
    failing = Script(
        tokens=HELLO.tokens, fail_at=0, error=InvalidRequestError("it does not compile", param="grammar")
    )
    async with running_cluster(failing, roles) as cluster:
        for stream in (False, True):
            status, answer = await cluster.post(CHAT, {**SAY, **fields, "stream": stream})
            assert status == 400
            assert check_error(answer, 400, param)["message"] == "it does not compile"
        begun = cluster.workers[f"{roles[0].value}-0"]
        assert [len(legs) for legs in (begun.received.prefills, begun.received.decodes)] in ([2, 0], [0, 2])


GRPC_WAYS: list[tuple[pb.AnswerGrammar, tuple[str, str] | None]] = [
    (pb.AnswerGrammar(json_schema=WRITTEN), ("json_schema", WRITTEN)),
    (pb.AnswerGrammar(json_object=True), ("json_object", "")),
    (pb.AnswerGrammar(json_object=False), None),
    (pb.AnswerGrammar(regex="a"), ("regex", "a")),
    (pb.AnswerGrammar(choice=pb.Choices(texts=["a", "é"])), ("choice", '["a","é"]')),
    (pb.AnswerGrammar(ebnf="start: X"), ("ebnf", "start: X")),
    (pb.AnswerGrammar(gbnf='root ::= "a"'), ("gbnf", 'root ::= "a"')),
    (pb.AnswerGrammar(lark="start: X"), ("lark", "start: X")),
    (pb.AnswerGrammar(json_schema=json.dumps({**SCHEMA, "title": "t"})), ("json_schema", WRITTEN)),
]


async def test_grpc_sends_the_same_task() -> None:
    async with running_cluster(HELLO, (Role.AGGREGATED,)) as cluster, cluster.channel() as channel:
        for grammar, _ in GRPC_WAYS:
            await cluster.inference(channel).GenerateOnce(pb.GenerateRequest(text="hello", grammar=grammar))
        assert grammars_of(cluster) == [wanted for _, wanted in GRPC_WAYS]


@pytest.mark.parametrize(
    "grammar", [pb.AnswerGrammar(), pb.AnswerGrammar(regex=""), pb.AnswerGrammar(json_schema="[")]
)
async def test_malformed_over_grpc_is_invalid_argument(grammar: pb.AnswerGrammar) -> None:
    async with running_cluster(HELLO, (Role.AGGREGATED,)) as cluster, cluster.channel() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await cluster.inference(channel).GenerateOnce(pb.GenerateRequest(text="hello", grammar=grammar))
        assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert cluster.workers["both-0"].received.decodes == []


def test_annotations_are_bounded_too() -> None:
    """F13: annotations do not count up to a size that is cheap to read."""
    fits = Grammar("json_schema", json.dumps({"title": "x" * (MAX_SCHEMA_BYTES - 100), "enum": [1]}))
    assert reduced(fits).text == '{"enum":[1]}'
    with pytest.raises(InvalidRequestError, match="with its annotations; the limit is 1048576"):
        reduced(Grammar("json_schema", json.dumps({"title": "x" * MAX_SCHEMA_BYTES})))


async def test_logs_quote_no_grammar(caplog: pytest.LogCaptureFixture) -> None:
    """L2: a pattern that does not compile is quoted to its client, but not in the log."""
    error = InvalidRequestError("the regex does not compile: (private", param="grammar")
    failing = Script(tokens=HELLO.tokens, fail_at=0, error=error)
    with caplog.at_level("DEBUG"):
        async with running_cluster(failing, (Role.AGGREGATED,)) as cluster:
            status, answer = await cluster.post(CHAT, {**SAY, "guided_regex": "(private"})
    assert status == 400 and "(private" in json.dumps(answer)
    assert "private" not in caplog.text and "ended as" in caplog.text
