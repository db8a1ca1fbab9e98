"""The grammars of forced tool calls, checked with the parser that reads their output."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import InvalidRequestError
from contract.sampling import Grammar
from engine.grammar.matcher import GrammarMatcher
from tests.engine_grammar.answers import allowed_by, matcher_of, request_with
from tests.text.parsing.cutting import Parsed, parse
from tests.text.tiny_model import END, tiny_tokenizer, write_model
from text.parsing.forced import ForcedCallsParser, forced_calls_schema
from text.tools import Tool, ToolChoice

INTEGER = {"type": "integer"}
NODE = {"properties": {"n": INTEGER, "next": {"$ref": "#/$defs/Node"}}, "additionalProperties": False}
PARAMETERS: dict[str, Any] = {
    "nothing": {},
    "no type": {"properties": {"n": INTEGER}},
    "object or null": {"type": ["object", "null"], "properties": {"n": INTEGER}},
    "only listed types": {"type": ["null", "object", "string"]},
    "a reference": {"$ref": "#/$defs/Node", "$defs": {"Node": NODE}},
    "a reference to an object or null": {"$ref": "#/$defs/N", "$defs": {"N": {"type": ["object", "null"]}}},
    "anyOf": {"anyOf": [{"type": "string"}, {"type": "object", "properties": {"n": INTEGER}}]},
    "oneOf": {"oneOf": [{"type": "null"}, {"properties": {"n": INTEGER}, "required": ["n"]}]},
    "allOf": {"allOf": [{"properties": {"n": INTEGER}}, {"required": ["n"]}]},
    "enum": {"enum": ["x", {"n": 1}, None, 7]},
    "const": {"const": {"n": 1}},
    "a description": {"description": "Takes nothing.", "title": "T"},
    "an anchor": {"properties": {"n": {"$ref": "#n"}}, "$defs": {"x": {"$anchor": "n", "type": "integer"}}},
    "a property named const": {"properties": {"const": {"$ref": "#/$defs/n"}}, "$defs": {"n": INTEGER}},
}
NOT_OBJECTS: dict[str, Any] = {
    "a string": {"type": "string"},
    "a list": {"type": "array", "items": INTEGER},
    "no object among the types": {"type": ["string", "null"]},
}
CHOICES = {
    "required": ToolChoice("required"),
    "named": ToolChoice("function", "f"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def tool_with(parameters: Any, name: str = "f") -> Tool:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def matcher_for(model: Path, tools: list[Tool], choice: ToolChoice) -> GrammarMatcher:
    schema = forced_calls_schema(tools, choice, parallel=False)
    return matcher_of(model, request_with(Grammar("json_schema", json.dumps(schema)), max_tokens=300))


def written_by(matcher: GrammarMatcher, random: Random) -> str:
    """Draw an answer that the grammar allows. It ends as soon as possible, and strings and numbers stay short."""
    tokenizer = tiny_tokenizer()
    ids: list[int] = []
    while not matcher.is_complete and len(ids) < 300:
        allowed = allowed_by(matcher)
        if END in allowed:
            break
        texts = {token: str(tokenizer.decode([token])) for token in sorted(allowed)}
        ends = [token for token, text in texts.items() if text in ('"', "}", "]", ",", ":")]
        ids.append(random.choice(ends if ends and random.random() < 0.7 else sorted(allowed)))
        matcher.advance(ids[-1:])
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def read(text: str, choice: ToolChoice) -> Parsed:
    return parse(ForcedCallsParser(choice.name), text)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", PARAMETERS)
def test_the_first_output_of_a_forced_grammar_is_a_call(model: Path, name: str, choice: str) -> None:
    """F12: a tool with ``parameters: {}`` or without ``type`` could be called with arguments that are no object."""
    chosen = CHOICES[choice]
    matcher = matcher_for(model, [tool_with(PARAMETERS[name])], chosen)
    if chosen.name is None:
        for character in '[{"name": "f", "parameters": ':
            matcher.advance(list(tiny_tokenizer().encode(character, add_special_tokens=False).ids))
    first = {str(tiny_tokenizer().decode([token])).strip() for token in allowed_by(matcher)}
    assert first - {""} == {"{"}


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(sorted(PARAMETERS)),
    other=st.sampled_from(sorted(PARAMETERS)),
    choice=st.sampled_from(sorted(CHOICES)),
    random=st.randoms(use_true_random=False),
)
def test_any_output_of_a_forced_grammar_parses_as_calls_with_objects(
    model: Path, name: str, other: str, choice: str, random: Random
) -> None:
    """F12, in general: no grammar allows text that its own parser cannot read."""
    tools = [tool_with(PARAMETERS[name]), tool_with(PARAMETERS[other], "g")]
    matcher = matcher_for(model, tools, CHOICES[choice])
    text = written_by(matcher, random)
    found = read(text, CHOICES[choice])
    assert found.calls and found.content == ""
    if END in allowed_by(matcher) or matcher.is_complete:
        for _, arguments in found.calls:
            assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", NOT_OBJECTS)
def test_a_function_that_takes_no_object_cannot_be_forced(name: str, choice: str) -> None:
    """F12: its grammar would allow only text that is no call."""
    tools = [tool_with({}, "g"), tool_with(NOT_OBJECTS[name])]
    with pytest.raises(InvalidRequestError, match="allow no object") as refused:
        forced_calls_schema(tools, CHOICES[choice], parallel=True)
    assert refused.value.param == "tools[1]"


def test_two_functions_may_use_the_same_anchor(model: Path) -> None:
    """F12: the schemas of all functions are in one document."""
    text = {"properties": {"n": {"$ref": "#n"}}, "$defs": {"x": {"$anchor": "n", "enum": ["a"]}}}
    matcher = matcher_for(
        model, [tool_with(text), tool_with(PARAMETERS["an anchor"], "g")], CHOICES["required"]
    )
    for character in '[{"name": "g", "parameters": {"n": ':
        matcher.advance(list(tiny_tokenizer().encode(character, add_special_tokens=False).ids))
    assert {str(tiny_tokenizer().decode([token])).strip() for token in allowed_by(matcher)} >= {"-", "1"}
