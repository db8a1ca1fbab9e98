"""A sampling parameter stands in few places: most of what carries it from a client to the engine is derived from a table."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from msgspec import structs

from contract.sampling import PARAMETERS, RequestedSampling, SamplingParams

ROOT = Path(__file__).parents[2]
MAX_PLACES = 5
ROOMS = ("contract", "kvbaton", "protos", "router", "serving", "text", "wire", "worker")
"""The packages between a client and the engine. ``cli`` and others that send requests write a client's fields."""
EFFECT = "its effect"
"""Reading the parameter's value, wherever that happens, and all that the engine makes of it: one place."""
OTHER_MEANINGS: dict[str, dict[str, str]] = {
    "max_tokens": {
        # a worker's credit is in tokens as well
        "contract/membership.py": "Credit",
        "protos/worker.proto": "Credit",
        "router/routing/running_shares.py": "TotalCredit",
        "router/routing/views.py": "Credits WorkerView",
        "router/workers/attached_worker.py": "AttachedWorker WorkerView",
        "router/workers/worker_facts.py": "worker_facts",
        "wire/messages.py": "MappingProxyType",
        "worker/credit_shares.py": "CreditShares",
        "worker/role_rules.py": "Credit",
        "worker/router_sessions.py": "RouterSessions",
        # how long a text may be before it is tokenized
        "router/http/tokenizing.py": "_encoding",
        "router/intake/request_preparer.py": "encode_text",
        "text/length_bound.py": "LengthBound _most_bytes _too_many_tokens check_length_fits check_text_fits check_text_size",
    },
    # the log probabilities of an answer have the name of the parameter that asks for them
    "logprobs": {
        "contract/outputs.py": "EngineOutput",
        "kvbaton/outputs.py": "CompletionOutput",
        "protos/inference.proto": "ChoiceDelta",
        "protos/worker.proto": "TokenEntry",
        "router/answers/answer.py": "Prompt",
        "router/grpc/messages.py": "generate_response",
        "router/http/generation/chat_formatter.py": "ChatFormatter",
        "router/http/generation/openai_formatter.py": "OpenAIFormatter",
        "router/http/openapi.py": "_CHOICE",
        "router/http/responses/formatter.py": "MessageItem ResponseFormatter",
        "router/tokens/delivery.py": "Token",
        "wire/tokens.py": "_READ logprobs_to_proto output_to_proto",
    },
    "prompt_logprobs": {
        "contract/outputs.py": "EngineOutput",
        "kvbaton/outputs.py": "RequestOutput",
        "kvbaton/requests.py": "RequestOutput",
        "kvbaton/running_request.py": "RequestOutput",
        "protos/inference.proto": "ChoiceDelta",
        "protos/worker.proto": "TokenEntry",
        "router/attempts/leg_outcome.py": "LegReport",
        "router/grpc/messages.py": "generate_response",
        "router/http/generation/chat_formatter.py": "ChatFormatter",
        "router/http/generation/completion_formatter.py": "CompletionFormatter",
        "wire/tokens.py": "_READ output_to_proto",
    },
}
"""Name → file → definitions (classes, functions, module variables, constructed classes) in which it is another thing."""
BEHAVIOUR: dict[str, dict[str, str]] = {
    # an answer of /v1/responses repeats them
    "temperature": {"router/http/responses/parser.py": "echoed_fields"},
    "top_p": {"router/http/responses/parser.py": "echoed_fields"},
    "max_tokens": {
        # each endpoint has its own name, default and requirement for the limit
        "router/http/generation/parser.py": "GenerationParser GenerationRequest",
        "router/http/messages/parser.py": "GenerationRequest InvalidRequestError MessageParser",
        "router/http/responses/parser.py": "GenerationRequest RESPONSE_NEUTRAL _NAMES",
        "router/http/schema/completion.py": "COMPLETION",
        "router/http/schema/generation.py": "GENERATION",
        "router/http/schema/messages.py": "MESSAGE",
        # a completion of 0 tokens is allowed with echo
        "router/http/generation/completion_formatter.py": "InvalidRequestError without_answer",
        # a message that ended at the limit has a stop reason of its own, unless the model's context ended it
        "router/http/messages/formatter.py": "MessageFormatter STOP_REASONS",
        # a leg before the last one ends before the limit
        "router/attempts/attempt_legs.py": "AttemptLegs",
    },
    "logprobs": {
        # a flag beside top_logprobs in a chat, at most 5 in a completion, an entry of include in a response
        "router/http/generation/parser.py": "AnswerOptions GenerationRequest _chat_logprobs",
        "router/http/responses/parser.py": "AnswerOptions GenerationRequest",
        "router/http/schema/chat.py": "CHAT",
        "router/http/schema/completion.py": "COMPLETION",
        # endpoints without it accept only what asks for none
        "router/http/fields/unsupported.py": "OPENAI_NEUTRAL",
        # whether the answer shows them
        "router/http/exchange.py": "AnswerOptions",
    },
    "prompt_logprobs": {
        # of chats and completions only, and not with stream
        "router/http/fields/sampling.py": "InvalidRequestError read_shared_fields",
        "router/http/schema/generation.py": "GENERATION",
        "router/http/fields/unsupported.py": "OPENAI_NEUTRAL",
        # an echoed prompt is shown with the log probabilities of the answer
        "router/http/generation/parser.py": "AnswerOptions GenerationParser",
        # whether the answer shows them
        "router/http/exchange.py": "AnswerOptions",
        # the prompt of a replay ends with tokens of the answer, which are not rated again
        "router/attempts/leg_requests.py": "leg_request",
    },
}
"""Name → file → the definitions in it that are the parameter's behaviour and no copy of its description.

Both lists may only become shorter. A definition that is not listed is counted, whatever the file.
"""

Naming = tuple[str, str, str]
"""(name, file, definition)"""


def is_listed(naming: Naming, listed: Mapping[str, Mapping[str, str]]) -> bool:
    name, path, definition = naming
    return definition in listed.get(name, {}).get(path, "").split()


def namings_of_source(path: str, source: str) -> Iterator[Naming]:
    """Yield each name that a Python file declares, passes as a keyword, spells or reads."""
    yield from _namings_in(ast.parse(source), path, "")


def _namings_in(node: ast.AST, path: str, definition: str) -> Iterator[Naming]:
    for child in ast.iter_child_nodes(node):
        inner = definition
        match child:
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.arg(arg=name):
                yield name, path, definition
            case ast.keyword(arg=str(name)) | ast.Constant(value=str(name)):
                yield name, path, definition
            case ast.Attribute(attr=name):
                yield name, EFFECT, ""
        match child:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                inner = definition or name
            case ast.Call(func=ast.Name(id=name)) if name[0].isupper():
                inner = name  # what is given to a constructor is a field of what it makes
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                inner = definition or name
        yield from _namings_in(child, path, inner)


def namings_of_proto(path: str, source: str) -> Iterator[Naming]:
    """Yield each field of a .proto file with its message."""
    for message, field in re.findall(r"^message (\w+)|\b(\w+) = \d+;", source, re.MULTILINE):
        if message:
            definition = message
        else:
            yield field, path, definition


def namings() -> Iterator[Naming]:
    """Yield each time that the product names a sampling parameter."""
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*")):
            if path.suffix not in (".py", ".proto") or "_pb2" in path.name:
                continue
            read = namings_of_source if path.suffix == ".py" else namings_of_proto
            for naming in read(path.relative_to(ROOT).as_posix(), path.read_text()):
                if naming[0] in NAMES:
                    yield naming


NAMES = {parameter.name for parameter in PARAMETERS}


@pytest.fixture(scope="module")
def named() -> set[Naming]:
    return set(namings())


def places_of(name: str, named: set[Naming]) -> set[str]:
    """Return the files that copy the description of a parameter in the table, and its effect."""
    counted = {
        naming for naming in named if not any(is_listed(naming, one) for one in (OTHER_MEANINGS, BEHAVIOUR))
    }
    return {path for other, path, _ in counted if other == name} | {EFFECT}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_parameter_stands_in_few_places(named: set[Naming], name: str) -> None:
    places = places_of(name, named)
    assert {"contract/sampling.py", "kvbaton/sampling.py"} < places
    assert len(places) <= MAX_PLACES, sorted(places)


@pytest.mark.parametrize("listed", [OTHER_MEANINGS, BEHAVIOUR], ids=["other meanings", "behaviour"])
def test_no_definition_is_listed_in_vain(named: set[Naming], listed: Mapping[str, Mapping[str, str]]) -> None:
    expected = {
        (name, path, definition)
        for name, files in listed.items()
        for path, definitions in files.items()
        for definition in definitions.split()
    }
    assert expected - named == set()


@pytest.mark.parametrize("name", ["max_tokens", "logprobs", "prompt_logprobs"])
def test_a_further_copy_is_counted_also_beside_other_meanings(named: set[Naming], name: str) -> None:
    """In the file of a worker's credit, or of an endpoint, only the listed definitions are left out."""
    for path in (*OTHER_MEANINGS[name], *BEHAVIOUR[name]):
        copy = set(namings_of_source(path, f"class Copy:\n    {name}: int | None = None"))
        assert places_of(name, named | copy) == places_of(name, named) | {path}


@pytest.mark.parametrize(
    "source",
    [
        "class Request:\n    min_p: float = 0.0",
        "def request(min_p): pass",
        "Request(min_p=body.number(name))",
        "body.number('min_p')",
    ],
)
def test_each_way_to_pass_one_on_is_counted(source: str) -> None:
    found = {(name, path) for name, path, _ in namings_of_source("router/new.py", source)}
    assert ("min_p", "router/new.py") in found


def test_reading_one_is_its_effect_wherever_it_is_read() -> None:
    source = "kept = probs >= sampling.min_p * probs.max()"
    assert ("min_p", EFFECT, "") in namings_of_source("router/new.py", source)
    proto = "message Sampling {\n  optional float min_p = 11;\n}"
    assert ("min_p", "new.proto", "Sampling") in namings_of_proto("new.proto", proto)


def test_the_table_has_every_parameter() -> None:
    """All but the grammar, which is a message of its own. What a client may send is what an engine takes."""
    fields = {field.name for field in structs.fields(SamplingParams)}
    assert NAMES | {"grammar"} == fields == {field.name for field in structs.fields(RequestedSampling)}
    assert len(PARAMETERS) == len(NAMES)


def test_a_parameter_that_is_not_given_is_the_models() -> None:
    models = SamplingParams(temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, repetition_penalty=1.25)
    sent = RequestedSampling(top_k=0, min_p=0.0, seed=7)
    assert sent.completed(models, 5, rates_tokens=True) == SamplingParams(
        temperature=0.5, top_k=0, top_p=0.25, repetition_penalty=1.25, seed=7, max_tokens=5, logprobs=0
    )
