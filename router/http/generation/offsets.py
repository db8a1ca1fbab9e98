"""The offsets of a prompt's tokens in its text, in characters."""

import codecs
from collections.abc import Sequence

from text.detokenizer import Detokenizer
from text.tokenizer import Tokenizer


def text_offsets(text: str, num_tokens: int, tokenizer: Tokenizer) -> list[int]:
    """Return the offset of each token of a prompt that was sent as text.

    White space before a token belongs to it. Tokens of the same character have the same offset. A token that is not in
    the text (a beginning-of-text token) has the offset of the next one.
    """
    found: list[int] = []
    end = 0
    for start, stop in tokenizer.spans(text):
        found.append(min(start, end) if stop > start else end)
        end = max(end, stop)
    return (found + [end] * num_tokens)[:num_tokens]


def token_offsets(token_ids: Sequence[int], tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """Return the text, without special tokens, and the offset of each token of a prompt that was sent as token ids."""
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    joined, offsets = _by_bytes(token_ids, tokenizer)
    if joined == text:
        return text, offsets
    if joined == f" {text}":
        return text, [max(offset - 1, 0) for offset in offsets]
    return text, [min(offset, len(text)) for offset in _by_windows(token_ids, tokenizer)]


def _by_bytes(token_ids: Sequence[int], tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """Return the joined texts of the single tokens and their offsets: cheap, and in most cases equal to the decoded text."""
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
    """Return the offset of each token by decoding it together with its neighbours."""
    detokenizer = Detokenizer(tokenizer)
    offsets: list[int] = []
    end = 0
    for token_id in token_ids:
        offsets.append(end)
        end += len(detokenizer.push(token_id))
    return offsets
