"""The tokens that may follow at each point of an answer, and the end of an answer that no token can end."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from contract.errors import InternalError, InvalidRequestError
from contract.sampling import Grammar
from engine.grammar.building import load_vocabulary
from tests.engine_grammar.answers import allowed_by, ids_of, matcher_of, request_with
from tests.text.tiny_model import BOS, END, byte_ids, word_id, write_model

AB = Grammar("choice", '["a", "ab"]')


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def test_the_end_token_is_allowed_where_the_grammar_may_end(model: Path) -> None:
    matcher = matcher_of(model, request_with(AB))
    assert allowed_by(matcher) == ids_of("a")
    matcher.advance(byte_ids(b"a"))
    assert allowed_by(matcher) == {*ids_of("b"), END}
    matcher.advance(byte_ids(b"b"))
    assert allowed_by(matcher) == {END} and not matcher.is_complete


@pytest.mark.parametrize("how", [{"ignore_eos": True}, {"min_tokens": 9}])
def test_an_answer_that_no_token_can_end_is_complete(model: Path, how: dict[str, Any]) -> None:
    """With ignore_eos or min_tokens the end token is never allowed; the grammar's end takes precedence over min_tokens."""
    matcher = matcher_of(model, request_with(AB, **how))
    matcher.advance(byte_ids(b"a"))
    assert allowed_by(matcher) == ids_of("b") and not matcher.is_complete
    matcher.advance(byte_ids(b"b"))
    assert allowed_by(matcher) == set() and matcher.is_complete


def test_a_stop_token_is_allowed_at_the_end_and_where_the_grammar_has_it(model: Path) -> None:
    (b,) = byte_ids(b"b")
    matcher = matcher_of(model, request_with(Grammar("regex", "b?c+"), stop_token_ids=(b,), ignore_eos=True))
    assert allowed_by(matcher) == ids_of("bc")
    matcher.advance(byte_ids(b"c"))
    assert allowed_by(matcher) == ids_of("cb")


def test_allowed_token_ids_apply_as_well(model: Path) -> None:
    (a, b) = byte_ids(b"ab")
    matcher = matcher_of(model, request_with(Grammar("regex", "[abc]{3}"), allowed_token_ids=(a, b, END)))
    assert allowed_by(matcher) == {a, b}
    matcher.advance([a, b, b])
    assert allowed_by(matcher) == {END}


def test_the_error_for_no_possible_token_names_the_grammar(model: Path) -> None:
    with pytest.raises(
        InvalidRequestError, match="no token can follow in the grammar after 0 tokens"
    ) as found:
        matcher_of(model, request_with(AB, allowed_token_ids=(END,)))
    assert found.value.param == "grammar"


def test_a_token_that_may_not_follow_is_an_internal_error(model: Path) -> None:
    matcher = matcher_of(model, request_with(AB))
    with pytest.raises(InternalError, match="number 1 of the answer, does not match"):
        matcher.advance(byte_ids(b"ax"))


def test_delivered_tokens_are_consumed_first(model: Path) -> None:
    matcher = matcher_of(model, request_with(Grammar("regex", "one, two"), delivered="one, t"))
    assert matcher.num_tokens == 6 and allowed_by(matcher) == ids_of("w")


def test_special_tokens_and_ids_beyond_the_tokenizer_are_never_allowed(model: Path) -> None:
    """The model's vocabulary has 300 tokens, the tokenizer's 266: special ones, bytes, and a few words."""
    matcher = matcher_of(model, request_with(Grammar("regex", "(?s:.+)")))
    assert word_id("hello") in allowed_by(matcher)
    assert not allowed_by(matcher) & {BOS, END, 2, 3, 4, *range(266, 300)}
    matcher.advance([word_id("hello"), word_id(" world")])
    assert END in allowed_by(matcher)


def test_a_character_is_not_cut_in_the_middle(model: Path) -> None:
    matcher = matcher_of(model, request_with(Grammar("choice", '["é"]')))
    first, second = byte_ids("é".encode())
    assert allowed_by(matcher) == {first}
    matcher.advance([first])
    assert allowed_by(matcher) == {second}


def test_json_may_be_indented_but_runs_of_spaces_are_bounded(model: Path) -> None:
    """One space within a line, up to 32 at its beginning; then other text must follow."""
    matcher = matcher_of(model, request_with(Grammar("json_object")))
    matcher.advance(byte_ids(b'{\n    "a": 1, "b" :[ ],\r\n\t"c":2, '))
    assert allowed_by(matcher) == ids_of('"')
    matcher.advance(byte_ids(b'"d":3,\n' + b" " * 32))
    assert allowed_by(matcher) == ids_of('"')


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar("json_schema", '{"type": "integer", "minimum": 7, "maximum": 12}'), "11", "13"),
        (Grammar("json_schema", "true"), '[null, {"a": 1.5}]', "[,"),
        (Grammar("json_object"), '{"a": [1, "x"]}', "[1]"),
        (Grammar("regex", r"\d{3}-\d{2}"), "123-45", "12-345"),
        (Grammar("choice", json.dumps(["x/y", 'é"\\\n', "a\0b", "(.*)", "日本😀"])), "(.*)", "(.)"),
        (Grammar("choice", json.dumps(["x/y", 'é"\\\n', "a\0b", "(.*)", "日本😀"])), 'é"\\\n', "é\\"),
        (Grammar("choice", json.dumps(["x/y", 'é"\\\n', "a\0b", "(.*)", "日本😀"])), "日本😀", "日😀"),
        (Grammar("ebnf", 'root ::= "<" [a-z]+ ">" | "(" root ")"'), "((<ab>))", "(<ab)"),
        (Grammar("ebnf", 'start: NAME ("," NAME)*\nNAME: /[a-z]+/'), "ab,c", "ab,,c"),
    ],
)
def test_each_kind_of_grammar(model: Path, grammar: Grammar, good: str, bad: str) -> None:
    matcher = matcher_of(model, request_with(grammar))
    matcher.advance(byte_ids(good.encode()))
    assert END in allowed_by(matcher)
    with pytest.raises(InternalError):
        matcher_of(model, request_with(grammar)).advance(byte_ids(bad.encode()))


def test_sentencepiece_with_byte_fallback(tmp_path: Path) -> None:
    """Words with their mark for a space, single bytes as <0x..>."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁ab"]
    vocab = {name: i for i, name in enumerate(names)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([AddedToken(name, special=True) for name in names[:3]])
    (tmp_path / "tokenizer.json").write_text(backend.to_str())
    matcher = matcher_of(tmp_path, request_with(Grammar("regex", " ?a*b|é")))
    byte = {value: 3 + value for value in range(256)}
    starts = {
        vocab["▁"],
        vocab["a"],
        vocab["b"],
        vocab["▁ab"],
        byte[0x20],
        byte[0x61],
        byte[0x62],
        byte[0xC3],
    }
    assert allowed_by(matcher) == starts
    matcher.advance([vocab["▁ab"]])
    assert allowed_by(matcher) == {END}


@pytest.mark.parametrize("content", [None, b"{", b"{}", b'{"added_tokens": [], "model": 3}', b"\xff"])
def test_an_unreadable_vocabulary_is_an_error_of_the_request(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(InvalidRequestError, match="grammars are not served with this model") as found:
        load_vocabulary(tmp_path, [END])
    assert found.value.param == "grammar"
