"""Converts tokens to text incrementally (with the prefix and read offsets of Hugging Face's TGI).

A token's text depends on its neighbours: a character may consist of several tokens, a leading space may be dropped at the
start. Therefore each step decodes a short window twice, with and without the new tokens, and emits the difference. The
neighbours do not matter if a vocabulary consists of bytes, and no character is unfinished before or behind a token: that is
so for most tokens, whose text is looked up.
"""

from collections.abc import Sequence
from functools import partial

from text.tokenizer import Tokenizer

# Tokens of an unfinished UTF-8 character: it has at most 3 bytes, a token at least one.
_MAX_PARTIAL = 3
# Prompt tokens at the beginning of the first window: the first token's text depends on those before it.
_CONTEXT = 5
# Tokens without text that a window keeps before its beginning moves.
_MAX_SILENT = 16
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Detokenizes one answer. Never emits part of a character; ``flush`` returns the rest at the end.

    skip_special_tokens: special tokens have no text; otherwise their form in the vocabulary. has_unread: tokens were pushed
    whose text is not certain yet.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._decode_one = tokenizer.decode_one
        self._skips_special = skip_special_tokens
        self._joins_bytes = tokenizer.joins_bytes
        self._window = list(prompt_token_ids[-_CONTEXT:])
        self._num_read = len(self._window)
        self.has_unread = False
        before = self._decode_one(self._window[-1], skip_special_tokens) if self._window else ""
        self._ends_whole = self._joins_bytes and _is_whole(before)
        """The bytes before the next token certainly end with a whole character."""

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is certain now; empty while a character is unfinished."""
        # nearly always, so without a call of ``_is_whole``
        if (
            self._ends_whole
            and (text := self._decode_one(token_id, self._skips_special))
            and not text.endswith(_REPLACEMENT)
        ):
            self._window = [token_id]
            self._num_read = 1
            return text
        self._window.append(token_id)
        text = self._unread(len(self._window))
        self.has_unread = text.endswith(_REPLACEMENT)
        self._ends_whole = self._joins_bytes and _is_whole(text)
        if not self.has_unread:
            self._advance(len(self._window), text)
            return text
        if len(self._window) - self._num_read <= _MAX_PARTIAL:
            return ""
        # These bytes are not UTF-8: emit all but those that may still become a character.
        end = len(self._window) - _MAX_PARTIAL
        text = self._unread(end)
        self._advance(end, text)
        return text

    def flush(self) -> str:
        """Return the rest; an unfinished character becomes U+FFFD."""
        self.has_unread = False
        if self._num_read == len(self._window):
            return ""
        text = self._unread(len(self._window))
        self._advance(len(self._window), text)
        self._ends_whole = False
        return text

    def _unread(self, end: int) -> str:
        before = self._decode(self._window[: self._num_read])
        after = self._decode(self._window[:end])
        if after.startswith(before):
            return after[len(before) :]
        return self._decode(self._window[self._num_read : end])

    def _advance(self, end: int, text: str) -> None:
        """Mark everything before ``end`` as read, and drop what is no longer needed from the window."""
        if end > self._num_read and (text or end > _MAX_SILENT):
            del self._window[: self._num_read]
            end -= self._num_read
        self._num_read = end


def _is_whole(text: str) -> bool:
    """Return True for text that ends with a whole character. It may not be one if it is empty or ends with U+FFFD."""
    return text != "" and not text.endswith(_REPLACEMENT)
