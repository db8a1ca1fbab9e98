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


class ByWindows(Detokenizer):
    """Decodes a window for each token, whatever the token is."""

    def push(self, token_id: int) -> str:
        self._ends_whole = False
        return super().push(token_id)


BYTES = st.lists(
    st.sampled_from([*byte_ids(b"a\xc3\xa9\xe2\x82\xac\xff"), word_id("hello"), word_id(" world"), END])
)


@given(BYTES, BYTES, st.booleans(), st.integers(0, 20))
def test_a_token_that_is_looked_up_has_the_text_of_its_window(
    ids: list[int], prompt: list[int], skips: bool, flush_at: int
) -> None:
    """Tokens that end within a character, invalid bytes and special tokens come before, between and behind them."""
    both = [kind(byte_level(), prompt, skip_special_tokens=skips) for kind in (Detokenizer, ByWindows)]
    for number, token in enumerate(ids):
        if number == flush_at:
            assert both[0].flush() == both[1].flush()
        assert both[0].push(token) == both[1].push(token)
        assert both[0].has_unread == both[1].has_unread
    assert both[0].flush() == both[1].flush()


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
