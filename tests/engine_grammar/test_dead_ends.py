"""No answer comes to a place where nothing follows: the grammar is refused before the first token, or the answer ends."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from contract.errors import InvalidRequestError, KvbatonError
from contract.sampling import Grammar
from engine.grammar.matcher import GrammarMatcher
from tests.engine_grammar.answers import allowed_by, matcher_of, outcome_of, request_with
from tests.engine_grammar.test_constraints import leaves
from tests.text.tiny_model import END, FIRST_BYTE, byte_ids, write_model

MAX_TOKENS = 60
SCORE: dict[str, Any] = {
    "type": "object",
    "properties": {"score": {"type": "integer"}},
    "required": ["score"],
    "additionalProperties": False,
    "patternProperties": {"^score$": {"type": "integer"}},
}
LISTED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"^score$": {}}, {"score": {}}),
    ({"^a$|^b$": {"type": "integer"}}, {"a": {}, "b": {}, "c": {}}),
    ({"^[ab]{2}$": {"type": "integer"}}, {name: {} for name in ("aa", "ab", "ba", "bb")}),
    ({"[^\\s\\S]": {}}, {"a": {}}),
    ({"^$": {}}, {"": {}}),
    ({'^é"$': {}}, {'é"': {}}),
    ({"^a$": {}, "^b$": {}, "^c": {}}, {"a": {}, "b": {}}),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def schema(value: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def answered(start: GrammarMatcher, seed: int) -> str | None:
    """Return an answer of random tokens; None for one that has not ended after MAX_TOKENS. Raises KvbatonError."""
    draw = random.Random(seed)
    matcher = start.fork()
    tokens: list[int] = []
    while not matcher.is_complete:
        token = draw.choice(sorted(allowed_by(matcher)))
        if token == END:
            break
        tokens.append(token)
        if len(tokens) > MAX_TOKENS:
            return None
        matcher.advance([token])
    return bytes(token - FIRST_BYTE for token in tokens if token < FIRST_BYTE + 256).decode(errors="replace")


def test_a_schema_whose_pattern_only_matches_a_listed_name_is_answered(model: Path) -> None:
    start = matcher_of(model, request_with(schema(SCORE)))
    for seed in range(20):
        text = answered(start, seed)
        assert text is None or isinstance(json.loads(text)["score"], int)


@pytest.mark.parametrize("number", range(len(LISTED)))
def test_a_pattern_of_listed_names_leaves_no_key_without_a_text(model: Path, number: int) -> None:
    patterns, properties = LISTED[number]
    closed = {
        "type": "object",
        "properties": {name: {"type": "null"} for name in properties},
        "required": list(properties),
        "patternProperties": {pattern: {} for pattern in patterns},
        "additionalProperties": False,
    }
    matcher = matcher_of(model, request_with(schema(closed)))
    text = ",".join(f"{json.dumps(name, ensure_ascii=False)}:null" for name in properties)
    matcher.advance(byte_ids(f"{{{text}".encode()))
    may_go_on = "^c" in patterns
    assert (byte_ids(b",")[0] in allowed_by(matcher)) is may_go_on


def test_a_named_property_still_matches_the_schemas_of_its_patterns(model: Path) -> None:
    both = {**SCORE, "properties": {"score": {"minimum": 5}}}
    matcher = matcher_of(model, request_with(schema(both)))
    matcher.advance(byte_ids(b'{"score":'))
    assert not set(byte_ids(b'"[{tn1')) & allowed_by(matcher.fork()) - set(byte_ids(b"1"))
    matcher.advance(byte_ids(b"7"))


def test_patterns_that_take_too_many_steps_are_refused(model: Path) -> None:
    long = "a" * 20_000
    costly = {"type": "object", "properties": {long: {}}, "patternProperties": {f"^{long}$": {}}}
    outcome = outcome_of(model, request_with(schema(costly)))
    assert isinstance(outcome, InvalidRequestError) and "#/patternProperties: " in outcome.message


def test_text_that_can_only_go_on_in_one_way_does_not_hold_the_compiler(model: Path) -> None:
    """The library would take all of it at once, and it has no end."""
    for text in ("start: A B\nA: /a+/\nB: /a/", 'start: "a" start'):
        matcher = matcher_of(model, request_with(Grammar("lark", text)))
        assert allowed_by(matcher) == set(byte_ids(b"a"))


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", r"a[^\s\S]"),
        Grammar("lark", 'start: "a" A\nA: /[^\\s\\S]/'),
        Grammar("lark", 'start: ("a"{1,1000}){1,1000}'),
    ],
)
def test_errors_are_in_our_words(model: Path, grammar: Grammar) -> None:
    outcome = outcome_of(model, request_with(grammar))
    if isinstance(outcome, GrammarMatcher):
        with pytest.raises(InvalidRequestError) as found:
            for _ in range(500):
                outcome.advance(byte_ids(b"a"))
        outcome = found.value
    assert outcome.message.startswith(("no text can follow in the grammar", "the grammar is too complex"))
    assert not any(word in outcome.message for word in ("NoExtension", "Bias", "lexer", "panic", "parser"))


APART = {"^a": {"type": "integer"}, "a$": {"type": "string"}}
NEITHER = [{"type": "integer"}, {"type": "string"}]
INNER: dict[str, Any] = {"type": "object", "patternProperties": APART}
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "patterns": (INNER, "#/patternProperties"),
    "patterns of a part": ({"properties": {"x": INNER}}, "#/properties/x/patternProperties"),
    "patterns of parts": (
        {"properties": {"x": {"allOf": [{"patternProperties": {one: {}}} for one in APART]}}},
        "#/properties/x/patternProperties",
    ),
    "patterns of a definition": (
        {"$ref": "#/$defs/one", "$defs": {"one": {"type": "array", "items": INNER}}},
        "#/$defs/one/items/patternProperties",
    ),
    "a part without a value": (
        {
            "properties": {
                "good": {"pattern": "a"},
                "bad": {"type": "object", "required": ["x"], "properties": {"x": {"allOf": NEITHER}}},
            },
            "required": ["bad"],
            "type": "object",
        },
        "#/properties/bad/properties/x: Unsatisfiable schema",
    ),
    "a pattern": ({"type": "array", "items": {"type": "string", "pattern": "("}}, "#/items: "),
    "a reference elsewhere": (
        {"properties": {"x": INNER, "y": {"$ref": "#/properties/x"}}},
        "#/patternProperties",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_schema_that_does_not_compile_is_refused_with_the_place(model: Path, name: str) -> None:
    """C7: patterns that match one name were refused in the library's words, without a place."""
    value, place = FAULTS[name]
    outcome = outcome_of(model, request_with(schema(value)))
    assert isinstance(outcome, InvalidRequestError)
    assert f"does not compile: {place}" in outcome.message, outcome.message
    assert "regexes" not in outcome.message


names = st.sampled_from(["a", "b", "aa", "score", ""])
patterns = st.sampled_from(
    ["^a$", "^a", "^a$|^b$", "^[ab]$", "^$", "", ".", "a+$", "[^\\s\\S]", "^score$", "^s"]
)
strings = st.fixed_dictionaries(
    {"type": st.just("string")},
    optional={"pattern": patterns, "minLength": st.integers(0, 3), "maxLength": st.integers(0, 3)},
)
bounds = st.fixed_dictionaries(
    {"type": st.sampled_from(["integer", "number"])},
    optional={
        "minimum": st.integers(0, 3),
        "maximum": st.integers(0, 3),
        "multipleOf": st.sampled_from([2, 5]),
    },
)


def composed(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.fixed_dictionaries(
        {"type": st.just("object"), "patternProperties": st.dictionaries(patterns, inner, max_size=2)},
        optional={
            "properties": st.dictionaries(names, inner, max_size=2),
            "additionalProperties": st.sampled_from([False, True, {"type": "integer"}]),
            "required": st.lists(names, max_size=2, unique=True),
            "minProperties": st.integers(0, 2),
        },
    )
    arrays = st.fixed_dictionaries(
        {"type": st.just("array"), "items": inner},
        optional={"minItems": st.integers(0, 2), "maxItems": st.integers(0, 2)},
    )
    pairs = st.tuples(st.sampled_from(["anyOf", "allOf"]), st.lists(inner, min_size=1, max_size=2))
    return objects | arrays | pairs.map(lambda pair: {pair[0]: pair[1]})


@given(st.recursive(leaves | strings | bounds | st.just(False), composed, max_leaves=5))
@example(SCORE)
@example(
    {
        "type": "object",
        "additionalProperties": False,
        "patternProperties": {"^a$": {"type": "integer", "minimum": 0}},
        "required": ["a"],
    }
)
@example({"type": "object", "patternProperties": {"[^\\s\\S]": {}}, "minProperties": 2})
@settings(max_examples=120, deadline=None)
def test_no_answer_fails_after_it_has_begun(model: Path, value: Any) -> None:
    """Any schema is refused before the first token, or no random answer to it gets stuck."""
    start = outcome_of(model, request_with(schema(value), max_tokens=1000))
    if isinstance(start, KvbatonError):
        assert isinstance(start, InvalidRequestError)
        return
    for seed in range(6):
        answered(start, seed)
