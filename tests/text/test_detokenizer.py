"""Incremental text: whole characters only, and nothing lost."""

from functools import cache

from hypothesis import given
from hypothesis import strategies as st

from tests.text.test_tokenizer import sentencepiece_like
from tests.text.tiny_model import END, byte_ids, tiny_tokenizer, word_id
from text.detokenizer import Detokenizer
from text.tokenizer import Tokenizer


@cache
def byte_level() -> Tokenizer:
    return Tokenizer(tiny_tokenizer(), {})


def pieces(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt or [])
    return [*[detokenizer.push(token) for token in ids], detokenizer.flush()]


def test_a_character_split_over_tokens_comes_whole() -> None:
    ids = byte_ids("a€\U0001f600é".encode())
    assert pieces(byte_level(), ids) == ["a", "", "", "€", "", "", "", "\U0001f600", "", "é", ""]


@given(st.text(alphabet="aé€\U0001f600 \n", max_size=30))
def test_any_text_over_single_byte_tokens_comes_back(text: str) -> None:
    out = pieces(byte_level(), byte_ids(text.encode()))
    assert "".join(out) == text
    assert "\ufffd" not in "".join(out)


def test_an_unfinished_character_is_flushed_at_the_end() -> None:
    assert pieces(byte_level(), byte_ids(b"a\xe2\x82")) == ["a", "", "", "\ufffd"]


@given(st.integers(1, 40), st.text(alphabet="a€", min_size=1, max_size=5))
def test_bytes_that_are_no_text_are_not_held_back_for_ever(num_bad: int, text: str) -> None:
    out = pieces(byte_level(), byte_ids(b"\xff" * num_bad + text.encode()))
    assert "".join(out) == "\ufffd" * num_bad + text
    detokenizer = Detokenizer(byte_level())
    told = "".join(detokenizer.push(token) for token in byte_ids(b"\xff" * num_bad))
    assert len(told) >= num_bad - 3


def test_special_tokens_have_no_text() -> None:
    ids = [word_id("hello"), END, word_id(" world"), *[END] * 40, word_id(" again")]
    assert "".join(pieces(byte_level(), ids)) == "hello world again"


def test_a_leading_space_survives_behind_a_prompt_and_vanishes_at_the_beginning() -> None:
    tokenizer = Tokenizer(sentencepiece_like(), {})
    the, cat = tokenizer.token_id("▁the"), tokenizer.token_id("▁cat")
    assert the is not None
    assert cat is not None
    assert pieces(tokenizer, [the, cat], prompt=[1]) == ["the", " cat", ""]
    assert pieces(tokenizer, [the, cat], prompt=[1, cat]) == [" the", " cat", ""]
    euro = [tokenizer.token_id(f"<0x{byte:02X}>") or 0 for byte in "€".encode()]
    assert pieces(tokenizer, [the, *euro, cat]) == ["the", "", "", "€", " cat", ""]
