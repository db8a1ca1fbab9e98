"""Schemas and grammars are prepared for the library in time and memory proportional to their length.

Each text here once took minutes or did not end; the time limit of the tests detects a relapse.
"""

from pathlib import Path

import pytest

from contract.errors import InvalidRequestError, KvbatonError
from contract.sampling import Grammar
from tests.engine_grammar.answers import outcome_of, request_with
from tests.text.tiny_model import write_model
from text.parsing.forced import forced_calls_schema
from text.tools import ToolChoice

pytestmark = pytest.mark.timeout(60)
GRAMMAR_BYTES = 2**16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def filled(part: str, num_bytes: int) -> str:
    return part * (num_bytes // len(part))


def rules(count: int) -> str:
    """Return rules each of which needs the next one; the last is the first to be found satisfiable."""
    return "".join(f"r{i} ::= r{i + 1}\n" for i in range(count)) + f'r{count} ::= "x"'


GRAMMARS = {
    "a comment of number signs": "root ::= a # " + filled("#", 1000) + '\na ::= "x"',
    "number signs and spaces": "root ::= a " + filled("# ", 1000) + '\na ::= "x"',
    "rule to rule": "root ::= r0\n" + rules(4000),
    "quotes that do not end": 'start: "a"\n// ' + filled('\\"', 60_000) + "\n" + filled('\\"', 60_000),
    "slashes that do not end": 'start: "a"\n' + filled("/\\", 60_000),
    "empty lines": filled("\n", 60_000) + "start",
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_reading_a_grammar_terminates(model: Path, name: str) -> None:
    """H1: a line of number signs after a rule's name used to block a worker for ever, with all other requests."""
    text = GRAMMARS[name]
    assert len(text) < 2 * GRAMMAR_BYTES
    outcome = outcome_of(model, request_with(Grammar("ebnf", text)))
    assert isinstance(outcome, InvalidRequestError) or not isinstance(outcome, KvbatonError)


def test_anchors_below_a_long_name_use_little_memory() -> None:
    """H1: the path to every keyword was written out, even if it was no anchor."""
    name = "n" * 400_000
    parameters = {
        "properties": {name: {"enum": list(range(100_000))}, "a": {"$anchor": "a"}, "b": {"$ref": "#a"}}
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    schema = forced_calls_schema([tool], ToolChoice("required"), True)
    assert schema["$defs"]["f"]["properties"]["b"] == {"$ref": "#/$defs/f/properties/a"}
