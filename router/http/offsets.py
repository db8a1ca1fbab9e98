"""Where the tokens of a prompt begin in its text."""

import codecs
from collections.abc import Sequence

from text.detokenizer import Detokenizer
from text.tokenizer import Tokenizer


def text_offsets(text: str, num_tokens: int, tokenizer: Tokenizer) -> list[int]:
    """Return the offset of each token of a prompt that came as text.

    White space before a token belongs to it; tokens of one character have one offset; a token that the text does not
    hold (a beginning-of-text token) has no length.
    """
    found: list[int] = []
    end = 0
    for start, stop in tokenizer.spans(text):
        found.append(min(start, end) if stop > start else end)
        end = max(end, stop)
    return (found + [end] * num_tokens)[:num_tokens]


def token_offsets(token_ids: Sequence[int], tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """Return the text of a prompt that came as token ids, special tokens left out, and the offset of each token."""
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    joined, offsets = _by_bytes(token_ids, tokenizer)
    if joined == text:
        return text, offsets
    if joined == f" {text}":
        return text, [max(offset - 1, 0) for offset in offsets]
    return text, [min(offset, len(text)) for offset in _by_windows(token_ids, tokenizer)]


def _by_bytes(token_ids: Sequence[int], tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """Return the joined texts of the tokens by themselves, and where each begins: cheap, and mostly what is decoded."""
    characters = codecs.getincrementaldecoder("utf-8")("replace")
    parts: list[str] = []
    offsets: list[int] = []
    end = 0
    for token_id in token_ids:
        offsets.append(end)
        raw = tokenizer.token_bytes(token_id) if tokenizer.has_text(token_id) else b""
        parts.append(characters.decode(raw))
        end += len(parts[-1])
    return "".join([*parts, characters.decode(b"", True)]), offsets


def _by_windows(token_ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Return where each token begins by decoding it beside its neighbours."""
    detokenizer = Detokenizer(tokenizer)
    offsets: list[int] = []
    end = 0
    for token_id in token_ids:
        offsets.append(end)
        end += len(detokenizer.push(token_id))
    return offsets
