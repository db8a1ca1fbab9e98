"""A text that certainly does not fit is rejected without tokenizing it; one that fits is never rejected."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from contract.errors import ContextLengthError
from tests.text.test_tokenizer import sentencepiece_like
from tests.text.tiny_model import tiny_tokenizer
from text.length_bound import MIN_TEXT_BYTES, LengthBound, check_text_fits


def composing() -> Backend:
    """Byte-level behind NFC: several characters of a text become one."""
    backend = tiny_tokenizer()
    backend.normalizer = normalizers.NFC()
    return backend


def swallowing() -> Backend:
    """One token takes all white space before it."""
    backend = tiny_tokenizer()
    backend.add_tokens([AddedToken("<mask>", lstrip=True)])
    return backend


def word_pieces() -> Backend:
    """White space and accents vanish, a long word is one unknown token."""
    names = ["[UNK]", *"abcdefghijklmnopqrstuvwxyz", *[f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"]]
    backend = Backend(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return backend


def unigram() -> Backend:
    """Neighbouring unknown characters are one token; runs of spaces are one."""
    backend = Backend(models.Unigram([("<unk>", 0.0), ("▁", -2.0), ("a", -3.0), ("ab", -4.0)], unk_id=0))
    backend.normalizer = normalizers.Sequence([normalizers.Replace(" ", "▁"), normalizers.Strip()])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return backend


def dropping() -> Backend:
    """Unknown characters have no token."""
    return Backend(models.BPE({"a": 0, "b": 1}, []))


MAKERS = [tiny_tokenizer, sentencepiece_like, composing, swallowing, word_pieces, unigram, dropping]
TEXTS = st.lists(
    st.sampled_from([*"ab e\u0301\u1100\u1161\u11a8\u212b€\n", "hello", " world", "<mask>", "<|bos|>"]),
    max_size=200,
).map("".join)


@pytest.mark.parametrize("make", MAKERS)
@given(data=st.data())
def test_what_fits_is_never_refused(make: Any, data: st.DataObject) -> None:
    """H2: for any tokenizer the bound rejects only texts with too many tokens."""
    backend = make()
    bound = LengthBound(backend)
    text = data.draw(TEXTS) * data.draw(st.integers(1, 4))
    num_tokens = len(backend.encode_batch_fast([text], add_special_tokens=False)[0])
    for limit in {0, num_tokens - 1, num_tokens, num_tokens + 1}:
        if limit >= num_tokens:
            assert not bound.is_exceeded(text, limit)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("unit", ["a", " ", "é", "ab ", "a\n", "x", "hello world ", "\u1100\u1161", "<mask>"])
def test_what_fits_is_never_refused_at_length(make: Any, unit: str) -> None:
    """H2: nor is a long text, whose tokens are counted piece by piece."""
    backend = make()
    text = unit * (300_000 // len(unit))
    num_tokens = len(backend.encode_batch_fast([text], add_special_tokens=False)[0])
    assert not LengthBound(backend).is_exceeded(text, num_tokens)


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (tiny_tokenizer, 13),
        (sentencepiece_like, 6),
        (composing, 52),
        *[(make, None) for make in MAKERS[3:]],
    ],
)
def test_the_longest_token_is_known_where_no_text_can_vanish(make: Any, wanted: int | None) -> None:
    """H2: the bound by bytes exists only where every byte of a text is in some token."""
    assert LengthBound(make()).bytes_per_token == wanted


class CountingBackend:
    """A tokenizer that counts the characters it is given."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.num_characters = 0

    def to_str(self) -> str:
        """The tokenizer as JSON."""
        return self._backend.to_str()

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        """Encode and count."""
        self.num_characters += sum(map(len, texts))
        return self._backend.encode_batch_fast(texts, **options)


@pytest.mark.parametrize("make", [tiny_tokenizer, sentencepiece_like, composing])
def test_a_text_that_cannot_fit_is_not_tokenized(make: Any) -> None:
    """H2: its length in bytes is enough."""
    backend = CountingBackend(make())
    bound: Any = LengthBound(backend)  # type: ignore[arg-type]
    with pytest.raises(ContextLengthError, match="2048 tokens") as caught:
        check_text_fits("hello " * 150_000, bound, 2048, "messages")
    assert caught.value.param == "messages"
    assert backend.num_characters == 0


def test_a_text_that_probably_cannot_fit_is_tokenized_in_part() -> None:
    """H2: with unbounded tokens, the beginning of the text is tokenized."""
    backend = CountingBackend(word_pieces())
    bound: Any = LengthBound(backend)  # type: ignore[arg-type]
    assert bound.is_exceeded("ab " * 300_000, 512)
    assert backend.num_characters <= 2**16


def test_no_text_has_more_bytes_than_memory_allows() -> None:
    """H2: not even one whose white space would vanish."""
    with pytest.raises(ContextLengthError, match="1048576 bytes"):
        check_text_fits(" " * (MIN_TEXT_BYTES + 1), LengthBound(word_pieces()), 512, "input")
    check_text_fits(" " * MIN_TEXT_BYTES, LengthBound(word_pieces()), 512, "input")
