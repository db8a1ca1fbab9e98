"""Schemas that are written to cost time: what is done with one grows with its length, not with its square.

The long ones took minutes, hours or all memory; what they are made into shows that they were looked at nevertheless.
"""

import json
import tracemalloc
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import InvalidRequestError
from contract.json_schema import MAX_SCHEMA_BYTES, plain_schema, reduced
from contract.sampling import Grammar
from contract.schema_unions import Unions
from contract.schema_values import Schema


def unions(max_steps: int = 2**18) -> Unions:
    return Unions(lambda schema: schema, max_steps)


_NAMES = ("a", "b", "c")
_VALUES = st.sampled_from([1, 1.0, 2, "a", "b", None, True])
_PLAIN = st.one_of(
    st.sampled_from([True, False, {}, {"type": "string"}, {"type": ["object", "null"]}, {"type": "integer"}]),
    _VALUES.map(lambda value: {"const": value}),
    st.lists(_VALUES, min_size=1, max_size=3).map(lambda values: {"enum": values}),
)
_OBJECTS = st.builds(
    lambda kind, properties, required: {"type": kind, "properties": properties, "required": required},
    st.sampled_from(["object", ["object", "null"]]),
    st.dictionaries(st.sampled_from(_NAMES), _PLAIN, max_size=3),
    st.lists(st.sampled_from(_NAMES), max_size=3),
)


@given(st.lists(_PLAIN | _OBJECTS, max_size=4))
def test_all_are_disjoint_where_each_pair_is(schemas: list[Any]) -> None:
    """Looking at all at once finds what looking at pairs finds."""
    in_pairs = all(unions().are_disjoint(pair) for pair in combinations(schemas, 2))
    assert unions().are_disjoint(schemas) == in_pairs


@pytest.mark.parametrize(
    "branch",
    [
        lambda number: {"const": number},
        lambda number: {"enum": [f"{number}", f"other {number}"]},
        lambda number: {"required": ["k"], "type": "object", "properties": {"k": {"const": number}}},
        lambda number: {"$ref": f"#/$defs/{number}"},
    ],
    ids=["const", "enum", "discriminator", "references"],
)
def test_very_many_branches_are_kept_apart(branch: Any) -> None:
    """A list of 8,000 branches is no reason to compare 32 million pairs."""
    number = 8000
    schema = {
        "oneOf": [branch(each) for each in range(number)],
        "$defs": {str(each): {"const": each} for each in range(number)},
    }
    assert "anyOf" in json.loads(plain_schema(json.dumps(schema)))


def test_what_would_take_too_long_to_compare_stays_one_of() -> None:
    """Branches of which each pair differs in another way: beyond the budget nothing is claimed."""
    schemas: list[Schema] = [
        {"type": ["object", "null"] if number % 2 else "object", "properties": {}, "required": []}
        for number in range(8000)
    ]
    few = unions(max_steps=100)
    assert not few.are_disjoint(schemas)
    assert not few.are_disjoint([{"const": 1}, {"const": 2}]), "the budget is that of a whole document"
    assert unions().are_disjoint([{"const": 1}, {"const": 2}])


def test_properties_of_properties_are_looked_at_within_the_budget() -> None:
    """Each common property of the branches may distinguish them, by its own properties, and so on."""
    inner: Any = {}
    for name in "abcdefgh":
        inner = {"type": "object", "required": [f"{name}{i}" for i in range(40)]}
        inner["properties"] = {f"{name}{i}": {"$ref": "#/$defs/next"} for i in range(40)}
    branches = [{**inner, "title": str(number)} for number in range(40)]
    schema = {"oneOf": branches, "$defs": {"next": inner}}
    assert "oneOf" in json.loads(plain_schema(json.dumps(schema)))


def test_chains_of_references_are_followed_once() -> None:
    """Each branch leads through all 4,000 references to the same end."""
    number = 4000
    definitions: Schema = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(number)}
    schema = {
        "$defs": {**definitions, f"d{number}": {"const": 1}},
        "oneOf": [{"$ref": f"#/$defs/d{i}"} for i in range(number)],
    }
    assert len(json.loads(plain_schema(json.dumps(schema)))["oneOf"]) == number


def test_a_pointer_that_leads_nowhere_costs_no_more_than_its_length() -> None:
    """Its 400,000 beginnings have 80 billion parts together."""
    schema = {"properties": {"a": {"$ref": "#" + "/a" * 400_000}}}
    tracemalloc.start()
    try:
        plain_schema(json.dumps(schema))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * 2**20


@pytest.mark.parametrize("end", ["", "\\", "a]"])
def test_a_pattern_of_open_brackets_is_read_once(end: str) -> None:
    """Each bracket was looked for its end, to the pattern's end."""
    number = MAX_SCHEMA_BYTES // 2
    text = json.dumps({"pattern": "[" * number + end})
    if end == "a]":
        assert json.loads(plain_schema(text)) == {"pattern": "[" + "\\[" * (number - 1) + end}
        return
    with pytest.raises(InvalidRequestError, match="a class without an end"):
        plain_schema(text)


@pytest.mark.parametrize("pattern", ["(?=a)", "[a](?!b)", "a\\1", "[a]\\b", "[]](?<=a)"])
def test_what_looks_around_is_still_found(pattern: str) -> None:
    """Behind a bracket that is closed."""
    with pytest.raises(InvalidRequestError, match="in a pattern is not supported"):
        plain_schema(json.dumps({"pattern": pattern}))


def test_divisors_of_many_digits_are_refused_at_the_first() -> None:
    """Their common multiple had millions of digits."""
    divisors = [{"multipleOf": 1e300 + number * 1e285} for number in range(20_000)]
    with pytest.raises(InvalidRequestError, match="remainders"):
        reduced(Grammar("json_schema", json.dumps({"anyOf": divisors})))
