"""The meaning of GBNF, compared with a reference matcher on random grammars and texts, and by examples."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from contract.errors import InvalidRequestError, KvbatonError
from contract.sampling import Grammar
from engine.grammar.building import load_vocabulary
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.gbnf import gbnf_to_lark
from engine.grammar.machine import GRAMMAR_LIMITS
from tests.engine_grammar.answers import allowed_by, matcher_of, outcome_of, request_with
from tests.engine_grammar.reference import Node, Reference, written
from tests.text.tiny_model import END, byte_ids, tiny_tokenizer, write_model

ALPHABET = 'ab."é\n'
WORDS = ["ab", "aab", "ba", "b.", "aa", "a.b"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    """Bytes, and tokens of several characters."""
    folder = tmp_path_factory.mktemp("words")
    (folder / "tokenizer.json").write_text(tiny_tokenizer(WORDS).to_str(), encoding="utf-8")
    return load_vocabulary(folder, [END])


def accepts(model: Path, grammar: Grammar, answer: str) -> bool:
    """Return True if ``answer`` may be written and may end there."""
    matcher = matcher_of(model, request_with(grammar, max_tokens=300))
    try:
        matcher.advance(byte_ids(answer.encode()))
    except KvbatonError:
        return False
    return END in allowed_by(matcher)


characters = st.text(ALPHABET, max_size=2)
terminals = st.one_of(
    st.builds(Node, st.just("literal"), st.text(ALPHABET, max_size=3)),
    st.builds(Node, st.just("one_of"), characters),
    st.builds(Node, st.just("none_of"), characters),
    st.just(Node("any")),
)
RULES = ["root", "one", "a-two"]
references = st.builds(Node, st.just("rule"), st.sampled_from(RULES))


def composed(inner: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    counts = st.tuples(st.integers(0, 2), st.one_of(st.none(), st.integers(0, 2)))
    several = st.lists(inner, min_size=1, max_size=3).map(tuple)
    return st.one_of(
        st.builds(lambda parts: Node("sequence", parts=parts), several),
        st.builds(lambda parts: Node("choice", parts=parts), several),
        st.builds(
            lambda part, count: Node(
                "times", "", (part,), count[0], None if count[1] is None else count[0] + count[1]
            ),
            inner,
            counts,
        ),
    )


nodes = st.recursive(st.one_of(terminals, terminals, references), composed, max_leaves=6)
grammars = st.fixed_dictionaries(dict.fromkeys(RULES, nodes))


@given(grammars, st.lists(st.text(ALPHABET, max_size=5), min_size=1, max_size=6), st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_grammars_match_the_reference(
    vocabulary: LLTokenizer, rules: dict[str, Node], texts: list[str], data: st.DataObject
) -> None:
    """F15: whole matches and prefixes, in bytes and in tokens of several characters."""
    text = written(rules)
    if not Reference(rules, "").is_prefix():
        with pytest.raises(InvalidRequestError, match="no text matches root"):
            gbnf_to_lark(text)
        return
    machine = LLMatcher(vocabulary, gbnf_to_lark(text), log_level=0, limits=GRAMMAR_LIMITS)
    assert not machine.is_error(), machine.get_error()
    for answer in [*texts, data.draw(st.text("ab", max_size=6))]:
        reference = Reference(rules, answer)
        tokens = data.draw(st.sampled_from([byte_ids(answer.encode()), vocabulary.tokenize_str(answer)]))
        copy = machine.deep_copy()
        is_taken = copy.try_consume_tokens(tokens) == len(tokens)
        assert not copy.is_error(), copy.get_error()
        assert is_taken is reference.is_prefix(), (text, answer)
        assert (is_taken and copy.is_accepting()) is reference.matches(), (text, answer)


EXAMPLES: list[tuple[str, list[str], list[str]]] = [
    ('root ::= text "."\ntext ::= [a-zA-Z. ]+', ["Hello world.", "a..."], ["a", "."]),
    ('root ::= "a" | "ab" | "abc" tail\ntail ::= "d" |', ["a", "ab", "abc", "abcd"], ["abd", ""]),
    ('root ::= [ab]+ "ab" [ab]*', ["aab", "ababab"], ["ab", "bbb"]),
    ('root ::= root "+" [0-9] | [0-9]', ["1", "1+2+3"], ["1+", "+1"]),
    ('root ::= "(" root ")" | ', ["", "(())"], ["(()"]),
    (
        'root ::= "x"{3} | "y"{2,} | "z"{1,2} | "w"{,2}',
        ["xxx", "yyyy", "zz", "w", ""],
        ["xx", "y", "zzz", "www"],
    ),
    (r'root ::= "\u00e9" "\x41" "\U0001F600" "\t\r\n\\\"" "\[\]"', ['éA😀\t\r\n\\"[]'], ["é"]),
    (r'root ::= [^"\\\n] | [\x00-\x1f]{2} | [а-я]+ "!"', ["a", "😀", "\t\t", "да!"], ["\\", "\n", '"', "да"]),
    ("root ::= [a-] [\\]^] [^]", ["a]x", "-^]"], ["b]x"]),
    ("root ::= . . .", ["a\né"], ["ab"]),
    (
        '# a comment\nroot ::= (\n  "a" # another\n  | "b"\n)+\n  some-name\n\nsome-name ::=\n  "!" |\n  "?"\n  | "."',
        ["ab!", "b?", "a."],
        ["!"],
    ),
    ('root ::= ("a" | root "never" nothing | "b")*\nnothing ::= "x" nothing', ["", "ab"], ["an", "x"]),
    ('root::="a"b\nb::="c"', ["ac"], ["a"]),
]


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_gbnf_by_examples(model: Path, number: int) -> None:
    """F15, F16: cases in which greedy terminals or a too narrow reading of the format gave wrong results."""
    text, good, bad = EXAMPLES[number]
    for kind in ("gbnf", "ebnf"):
        grammar = Grammar(kind, text)
        assert [answer for answer in good if not accepts(model, grammar, answer)] == []
        assert [answer for answer in bad if accepts(model, grammar, answer)] == []


WRONG = [
    ('root ::= "a', "line 1"),
    ('root ::= "a"\nother ::= )', "line 2"),
    ("root ::= <think>", "the token <think>"),
    ("root ::= !<[12]>", "the token !<[12]>"),
    ('other ::= "a"', "no rule root"),
    ("root ::= missing", "'missing' is not defined"),
    ('root ::= "x" root', "no text matches root"),
    ('root ::= "a"\nroot ::= "b"', "defined twice"),
    (r'root ::= "\q"', r"\q is no escape"),
    (r'root ::= "\ud800"', "is no character"),
    (r"root ::= [z-a]", "is empty"),
    ('root ::= "a"{3,2}', "at most 2 and at least 3"),
    ('root ::= "a"{,}', "has no number"),
    ('root ::= "a"{99999999999}', "repetitions"),
    ("root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000, "nested too deep"),
    ("root ::= @", "'@'"),
    ('root = "a" ::=', "line 1"),
]


@pytest.mark.parametrize(("text", "words"), WRONG)
def test_gbnf_errors_name_the_problem(model: Path, text: str, words: str) -> None:
    """F16: the error names the line."""
    outcome = outcome_of(model, request_with(Grammar("gbnf", text)))
    assert isinstance(outcome, InvalidRequestError) and outcome.param == "grammar"
    assert words in outcome.message and len(outcome.message) < 300


LARK = [
    '?start: "a" | item\nitem: "b"',
    "// a comment\nstart : A\nA: /a/",
    '%llguidance {}\nstart: "a"',
    'start: "a ::= b" | "a"',
    'item: "x"\n\nstart: "a" | item',
    '# root ::= "b" is GBNF\nstart: "a"',
]


@pytest.mark.parametrize("text", LARK)
@pytest.mark.parametrize("kind", ["lark", "ebnf"])
def test_lark_is_recognized(model: Path, kind: str, text: str) -> None:
    """F16: Lark that began with ?start: used to be read as GBNF."""
    assert accepts(model, Grammar("ebnf" if kind == "ebnf" else "lark", text), "a")


def test_a_named_syntax_is_not_guessed(model: Path) -> None:
    """F16: an explicit syntax takes precedence."""
    for grammar in (Grammar("lark", 'root ::= "a"'), Grammar("gbnf", 'start: "a"'), Grammar("lark", " ")):
        assert isinstance(outcome_of(model, request_with(grammar)), InvalidRequestError)


def test_schemas_within_lark_are_schemas(model: Path) -> None:
    """F14: annotations are ignored here too, and constraints that cannot be enforced are rejected."""
    schema = {"type": "string", "format": "password", "title": "%json {", "enum": ["x"]}
    assert accepts(model, Grammar("lark", f"start: %json {json.dumps(schema)}"), '"x"')
    refused = outcome_of(
        model, request_with(Grammar("lark", 'start: %json {"type": "string", "not": {"const": "a"}}'))
    )
    assert isinstance(refused, InvalidRequestError) and "#/not" in refused.message
    assert accepts(
        model, Grammar("lark", r'start: "%json {\"not\": {\"const\": 1}}"'), '%json {"not": {"const": 1}}'
    )


@pytest.mark.parametrize("terminal", ["/(.{101})*/ & /(.{103})*/", "~/(.{101})*/", "~ (B | C)"])
def test_terminals_of_unbounded_cost_are_rejected(model: Path, terminal: str) -> None:
    """H1: two patterns of 20 characters took 40 MB a second, for ever."""
    outcome = outcome_of(model, request_with(Grammar("lark", f"start: A\nA: {terminal}\nB: /b/\nC: /c/")))
    assert isinstance(outcome, InvalidRequestError) and "between terminals is not served" in outcome.message
    for text in ('start: "a"~1..2', "start: /a|&/ // & ~", 'start: "a" | "~&"', 'start: "a" ~ 1'):
        assert accepts(model, Grammar("lark", text), "a")


def test_schemas_within_lark_share_their_bounds(model: Path) -> None:
    """H1: each schema had its own bounds, and 40 of them took 285 MB and 6 s."""
    schemas = [f'%json {{"type": "integer", "multipleOf": {divisor}}}' for divisor in (9_999, 10_001, 10_003)]
    for number, is_held in ((1, True), (2, True), (3, False)):
        outcome = outcome_of(model, request_with(Grammar("lark", "start: " + " | ".join(schemas[:number]))))
        assert isinstance(outcome, InvalidRequestError) is not is_held
    assert isinstance(outcome, InvalidRequestError) and "30003 remainders" in outcome.message


def test_the_random_grammars_are_compiled_as_the_compiler_does(vocabulary: LLTokenizer) -> None:
    """The random grammars above are compiled in the same way as by the compiler."""
    compiler = GrammarCompiler(lambda: vocabulary, 300)
    grammar = Grammar("gbnf", 'root ::= "a"+ "ab"')
    outcome = compiler.start(request_with(grammar), grammar, lambda _: None).result(timeout=30)
    compiler.close()
    assert not isinstance(outcome, KvbatonError)
    machine = outcome.copy()
    assert machine.try_consume_tokens(byte_ids(b"aaab")) == 4 and machine.is_accepting()
