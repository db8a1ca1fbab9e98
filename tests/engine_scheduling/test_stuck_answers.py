"""An answer that has begun never ends with an error of its grammar: it is cut off where no token may follow."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from contract.outputs import FinishReason
from contract.requests import SendTransfer
from contract.sampling import Grammar
from tests.engine_grammar.test_constraints import leaves
from tests.engine_grammar.test_dead_ends import bounds, composed, patterns, strings
from tests.engine_scheduling.stepping import PROMPT, RECEIVE, SEND
from tests.engine_scheduling.test_grammars import Engine
from tests.text.tiny_model import END, byte_ids, write_model

A = tuple(byte_ids(b"a"))
STUCK: dict[str, tuple[Grammar, dict[str, Any]]] = {
    "a terminal without a text": (Grammar("lark", 'start: "a" A\nA: "b" /[^\\s\\S]/'), {}),
    "tokens that are not allowed": (Grammar("regex", "a{2}b"), {"allowed_token_ids": (*A, END)}),
    "too complex": (
        Grammar("lark", 'start: ("a"{1,1000}){1,1000} "b"'),
        {"allowed_token_ids": A},
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    made = Engine(model)
    made.gate.set()
    yield made
    made.core.close()


@pytest.mark.parametrize("name", STUCK)
def test_an_answer_is_cut_off_where_nothing_may_follow(engine: Engine, name: str) -> None:
    """C7: the client of a whole answer got 400 after all its tokens were computed, and a stream an error event."""
    grammar, sampling = STUCK[name]
    key = engine.ask(name.replace(" ", "-"), grammar, sampling=sampling, max_tokens=200)
    engine.until_heard(key)
    end = engine.end(key)
    assert (end.finish_reason, end.error_kind) == (FinishReason.GRAMMAR, None)
    assert end.end == (FinishReason.LENGTH, "grammar")
    assert engine.text(key).startswith("a")
    engine.assert_empty()


def test_both_legs_of_a_hand_over_are_cut_off(engine: Engine) -> None:
    grammar = Grammar("regex", "ab")
    sent = engine.ask("sent", grammar, transfer=SEND, sampling={"allowed_token_ids": A})
    engine.until_heard(sent)
    assert engine.end(sent).finish_reason is FinishReason.GRAMMAR
    received = engine.ask("received", grammar, transfer=RECEIVE, sampling={"allowed_token_ids": A})
    engine.step()
    engine.until_woken()
    engine.arrive(received)
    assert engine.end(received).finish_reason is FinishReason.GRAMMAR
    engine.assert_empty()


def test_a_replay_that_cannot_go_on_is_cut_off_before_its_first_token(engine: Engine) -> None:
    key = engine.ask(
        "replayed",
        Grammar("regex", "ab"),
        prompt=[*PROMPT, *A],
        first_index=1,
        sampling={"allowed_token_ids": A},
    )
    engine.until_heard(key)
    assert engine.tokens(key) == [] and engine.end(key).finish_reason is FinishReason.GRAMMAR
    engine.assert_empty()


def test_a_grammar_that_cannot_begin_is_refused(engine: Engine) -> None:
    for name, transfer in (("whole", None), ("received", RECEIVE)):
        key = engine.ask(
            f"{name}-x", Grammar("regex", "ba"), transfer=transfer, sampling={"allowed_token_ids": A}
        )
        engine.until_heard(key)
        end = engine.end(key)
        assert (end.error_kind, end.error_param) == ("invalid_request", "grammar")
    engine.assert_empty()


@pytest.mark.parametrize("transfer", [None, SEND])
def test_an_answer_that_can_only_be_empty_is_so_without_a_token(
    engine: Engine, transfer: SendTransfer | None
) -> None:
    """It was sampled without its grammar: any text, with status 200."""
    key = engine.ask("empty", Grammar("regex", "^$"), transfer=transfer, sampling={"allowed_token_ids": A})
    engine.until_heard(key)
    assert (engine.tokens(key), engine.end(key).finish_reason) == ([], FinishReason.STOP)
    engine.outputs.clear()
    engine.assert_empty()


schemas = st.recursive(leaves | strings | bounds | st.just(False), composed, max_leaves=4)
names = st.sampled_from("abc")
parts = st.sampled_from(['"a"', '"ab"', "/a+/", "/[ab]/", "/[^\\s\\S]/", "a", "b", "c", '"é"'])
rules = st.lists(st.lists(parts, min_size=1, max_size=3).map(" ".join), min_size=1, max_size=2)
larks = st.dictionaries(names, rules, min_size=3, max_size=3).map(
    lambda found: "\n".join(["start: a", *(f"{name}: {' | '.join(rule)}" for name, rule in found.items())])
)
grammars = (
    schemas.map(lambda value: Grammar("json_schema", json.dumps(value)))
    | larks.map(lambda text: Grammar("lark", text))
    | patterns.map(lambda text: Grammar("regex", text or "a"))
    | st.lists(st.sampled_from(["a", "ab", "b", "é"]), min_size=1, unique=True).map(
        lambda texts: Grammar("choice", json.dumps(texts))
    )
)
some_tokens = st.sets(st.sampled_from([*byte_ids(b'ab{}[]",: \n0123456789truefalsn-.'), END]), min_size=1)
samplings = st.fixed_dictionaries(
    {},
    optional={
        "allowed_token_ids": some_tokens.map(lambda found: tuple(sorted(found))),
        "min_tokens": st.integers(0, 12),
        "stop_token_ids": st.just(tuple(byte_ids(b"b"))),
        "logit_bias": st.just(((byte_ids(b"a")[0], -100.0),)),
        "ignore_eos": st.booleans(),
        "seed": st.integers(0, 9),
    },
)


@given(grammars, samplings, st.booleans())
@example(Grammar("regex", "^$"), {"allowed_token_ids": A}, False)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_answer_that_has_begun_ends_with_an_error(
    engine: Engine, grammar: Grammar, sampling: dict[str, Any], is_handed_over: bool
) -> None:
    """Any grammar under any constraints is refused before the first token, or its answer ends without an error."""
    transfer = SEND if is_handed_over else None
    key = engine.ask("any", grammar, transfer=transfer, sampling=sampling, max_tokens=40)
    engine.until_heard(key)
    end = engine.end(key)
    if end.error_kind:
        assert engine.tokens(key) == [] and end.error_param == "grammar", end
    engine.outputs.clear()
    engine.assert_empty()
