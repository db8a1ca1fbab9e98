"""The grammar compiler: errors give a reason, malicious grammars leave the process alive, nothing is compiled twice."""

import json
import threading
from pathlib import Path

import pytest
from llguidance import LLTokenizer

from contract.errors import InternalError, InvalidRequestError, KvbatonError
from contract.sampling import Grammar
from engine.grammar.building import load_vocabulary
from engine.grammar.compiler import GrammarCompiler, Outcome
from engine.grammar.machine import Compiled
from engine.grammar.matcher import GrammarMatcher
from tests.engine_grammar.answers import (
    VOCAB_SIZE,
    WAIT_SECONDS,
    allowed_by,
    ids_of,
    matcher_of,
    outcome_of,
    request_with,
)
from tests.text.tiny_model import END, byte_ids, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar("regex", "(a"), "unclosed group"),
        (Grammar("regex", r"(a)\1"), "backreferences are not supported"),
        (Grammar("json_schema", '{"type": "strin"}'), "strin"),
        (Grammar("json_schema", '{"type": "string", "not": {"const": "a"}}'), "not"),
        (Grammar("json_schema", "false"), "Unsatisfiable"),
        (Grammar("json_schema", '{"$ref": "http://127.0.0.1:9/schema"}'), "does not compile"),
        (Grammar("ebnf", "root ::= missing"), "missing"),
        (Grammar("ebnf", "start: \x00"), "does not compile"),
        (Grammar("json_schema", '{"$ref": "#/a", "a": {"$ref": "#/a"}}'), "does not compile"),
    ],
)
def test_a_grammar_that_does_not_compile_gives_the_reason(model: Path, grammar: Grammar, words: str) -> None:
    outcome = outcome_of(model, request_with(grammar))
    assert isinstance(outcome, InvalidRequestError) and outcome.param == "grammar"
    assert words in outcome.message and "<" not in outcome.message


def name(number: int) -> str:
    """Return the name of a rule: aaa, aab, and so on."""
    return "".join(chr(97 + number // 26**place % 26) for place in (2, 1, 0))


def chain(length: int, form: str, last: str) -> str:
    """Return rules or definitions each of which needs the next."""
    return "".join(form.replace("@", name(i)).replace("%", name(i + 1)) for i in range(length)) + last


HOSTILE = {
    "rule to rule": Grammar("ebnf", "start: aaa\n" + chain(7900, "@:%\n", name(7900) + ':"a"')),
    "within brackets": Grammar("ebnf", "start: aaa\n" + chain(5000, "@:((%))\n", name(5000) + ':"a"')),
    "schema to schema": Grammar(
        "json_schema",
        '{"$ref":"#/aaa",' + chain(1500, '"@":{"properties":{"":{"$ref":"#/%"}}},', f'"{name(1500)}":true}}'),
    ),
    "nested schemas": Grammar("json_schema", '{"items":' * 6000 + "{}" + "}" * 6000),
    "nested groups": Grammar("regex", "(" * 30000 + "a" + ")" * 30000),
    "nested rules": Grammar("ebnf", "root ::= " + "(" * 30000 + '"a"' + ")" * 30000),
    "many counts": Grammar("regex", "((a{1,1000}){1,1000}){1,1000}"),
    "many optional items": Grammar("ebnf", "start: " + '"a"? ' * 12000),
    "many properties": Grammar(
        "json_schema", json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(2000)}})
    ),
    "many answers": Grammar("choice", json.dumps([f"{i}" for i in range(8000)])),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_malicious_grammar_leaves_the_process_alive(model: Path, name: str) -> None:
    """The outcome is a matcher or an error about the grammar. On ordinary stacks some of these end the process."""
    outcome = outcome_of(model, request_with(HOSTILE[name]))
    if isinstance(outcome, KvbatonError):
        assert isinstance(outcome, InvalidRequestError) and outcome.param == "grammar"


def test_a_grammar_that_becomes_too_complex_during_an_answer_ends_it(model: Path) -> None:
    matcher = matcher_of(
        model, request_with(Grammar("ebnf", 'start: ("a"{1,1000}){1,1000}'), max_tokens=1000)
    )
    with pytest.raises(InvalidRequestError, match="the grammar is too complex") as found:
        for _ in range(500):
            matcher.advance(byte_ids(b"a"))
    assert found.value.param == "grammar" and matcher.num_tokens > 10


class Bench:
    """A compiler whose vocabulary loads when the test opens the gate, and its outcomes."""

    def __init__(self, model: Path) -> None:
        self.gate = threading.Event()
        self.num_loaded = 0
        self.outcomes: list[Outcome] = []
        self._model = model
        self._arrived = threading.Semaphore(0)
        self.compiler = GrammarCompiler(self._load, VOCAB_SIZE)

    def start(self, grammar: Grammar) -> Compiled:
        return self.compiler.start(request_with(grammar), grammar, self._take)

    def wait_for(self, count: int) -> None:
        for _ in range(count):
            assert self._arrived.acquire(timeout=WAIT_SECONDS)

    def _load(self) -> LLTokenizer:
        assert self.gate.wait(WAIT_SECONDS)
        self.num_loaded += 1
        return load_vocabulary(self._model, [END])

    def _take(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self._arrived.release()


def test_equal_grammars_are_compiled_once_and_each_request_has_its_own_matcher(model: Path) -> None:
    bench = Bench(model)
    same = [bench.start(Grammar("regex", "a+")) for _ in range(5)]
    other = bench.start(Grammar("regex", "b+"))
    bench.gate.set()
    bench.wait_for(6)
    assert all(one is same[0] for one in same) and other is not same[0]
    assert bench.start(Grammar("regex", "a+")) is same[0]
    bench.wait_for(1)
    bench.compiler.close()
    assert bench.num_loaded == 1 and len({id(outcome) for outcome in bench.outcomes}) == 7
    matchers = [outcome for outcome in bench.outcomes if isinstance(outcome, GrammarMatcher)]
    first, *others = [matcher for matcher in matchers if allowed_by(matcher) == ids_of("a")]
    first.advance(byte_ids(b"a"))
    assert len(others) == 5 and all(allowed_by(matcher) == ids_of("a") for matcher in others)


def test_compiled_grammars_are_bounded_in_number(model: Path) -> None:
    bench = Bench(model)
    bench.gate.set()
    first = bench.start(Grammar("regex", "first"))
    bench.wait_for(1)
    for number in range(64):
        bench.start(Grammar("regex", f"another {number}"))
    bench.wait_for(64)
    assert bench.start(Grammar("regex", "first")) is not first
    bench.wait_for(1)
    bench.compiler.close()
    assert all(isinstance(outcome, GrammarMatcher) for outcome in bench.outcomes)


def test_a_compilation_that_no_request_needs_is_not_started(model: Path) -> None:
    """H1: a compilation that is given up while it is queued is dropped, unless another request needs it too."""
    bench = Bench(model)
    for number in range(2):
        bench.start(Grammar("regex", f"first {number}"))
    alone, shared = Grammar("regex", "alone"), Grammar("regex", "shared")
    dropped, kept = bench.start(alone), bench.start(shared)
    assert bench.start(shared) is kept
    bench.compiler.give_up(alone, dropped)
    bench.compiler.give_up(shared, kept)
    bench.gate.set()
    bench.wait_for(4)
    assert dropped.cancelled() and not kept.cancelled() and len(bench.outcomes) == 4
    bench.compiler.close()


def test_an_unexpected_exception_is_an_internal_error(model: Path) -> None:
    def load() -> LLTokenizer:
        raise ZeroDivisionError("by the test")

    compiler, found, is_ready = GrammarCompiler(load, VOCAB_SIZE), [], threading.Event()

    def take(outcome: Outcome) -> None:
        found.append(outcome)
        is_ready.set()

    compiler.start(request_with(Grammar("json_object")), Grammar("json_object"), take)
    assert is_ready.wait(WAIT_SECONDS)
    compiler.close()
    assert isinstance(found[0], InternalError) and "by the test" in found[0].message
