"""Tokens → text, one token at a time (the prefix and read offsets of Hugging Face's TGI).

A token's text depends on its neighbours: a character may lie over several tokens, a leading space may vanish at the
start. So each step decodes a short window twice, with and without the new tokens, and emits the difference.
"""

from collections.abc import Sequence
from functools import partial

from text.tokenizer import Tokenizer

_MAX_PARTIAL = 3
"""Tokens that an unfinished UTF-8 character can lie over: it has at most 3 bytes, a token at least one."""
_CONTEXT = 5
"""Prompt tokens that the first window begins with."""
_MAX_SILENT = 16
"""Tokens without text that a window keeps before its beginning moves on."""
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """The text of one answer. Never emits a part of a character; ``flush`` gives what is left at the end.

    skip_special_tokens: they have no text; else that by which the vocabulary writes them.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._window = list(prompt_token_ids[-_CONTEXT:])
        self._num_read = len(self._window)

    @property
    def has_unread(self) -> bool:
        """Whether tokens were pushed whose text is not certain yet."""
        return self._num_read < len(self._window)

    def push(self, token_id: int) -> str:
        """The text that is certain with this token; empty while a character is unfinished."""
        self._window.append(token_id)
        text = self._unread(len(self._window))
        if not text.endswith(_REPLACEMENT):
            self._advance(len(self._window), text)
            return text
        if len(self._window) - self._num_read <= _MAX_PARTIAL:
            return ""
        # These bytes are no UTF-8 at all: emit all but what may still become a character.
        end = len(self._window) - _MAX_PARTIAL
        text = self._unread(end)
        self._advance(end, text)
        return text

    def flush(self) -> str:
        """The rest; an unfinished character comes as U+FFFD."""
        text = self._unread(len(self._window))
        self._advance(len(self._window), text)
        return text

    def _unread(self, end: int) -> str:
        before = self._decode(self._window[: self._num_read])
        after = self._decode(self._window[:end])
        if after.startswith(before):
            return after[len(before) :]
        return self._decode(self._window[self._num_read : end])

    def _advance(self, end: int, text: str) -> None:
        """Everything before ``end`` is read. What was read before that leaves the window once it is not needed."""
        if end > self._num_read and (text or end > _MAX_SILENT):
            del self._window[: self._num_read]
            end -= self._num_read
        self._num_read = end
