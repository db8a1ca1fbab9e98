"""Encodes a chat's prompt with special tokens that a client typed as plain text."""

import re
from bisect import bisect_left
from collections.abc import Sequence

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from contract.errors import InvalidRequestError

_SENTINEL = "\ue000kvbaton\ue001"
"""Precedes a section in place of the special token there, so that the section is not the beginning of a text."""
Span = tuple[int, int]


class MessageEncoder:
    """Encodes prompts with one tokenizer. Owns a second tokenizer without special tokens, made at first use."""

    def __init__(self, backend: FastTokenizer) -> None:
        self._backend = backend
        special = {
            token.content: token for token in backend.get_added_tokens_decoder().values() if token.special
        }
        self._special = special
        self._ids = frozenset(backend.token_to_id(content) for content in special)
        longest_first = sorted(map(re.escape, special), key=len, reverse=True)
        self.pattern = re.compile("|".join(longest_first) or "(?!)")
        """Matches a special token."""
        self._plain: FastTokenizer | None = None

    def has_typed(self, prompt: str, texts: Sequence[Span]) -> bool:
        """Return whether a special token overlaps one of ``texts`` (in order)."""
        return any(_overlaps(match.span(), texts) for match in self.pattern.finditer(prompt))

    def encode(self, prompt: str, texts: Sequence[Span]) -> list[int]:
        """Return the ids of a prompt; special tokens within ``texts`` are encoded as text.

        Raises InvalidRequestError if the tokenizer cannot encode a typed one as text.
        """
        ids: list[int] = []
        begin = done = 0
        before: str | None = None
        is_typed = False
        ends = [*self.pattern.finditer(prompt), None]
        for match in ends:
            if match is not None and _overlaps(match.span(), texts):
                is_typed = True
                continue
            end = len(prompt) if match is None else match.start()
            if is_typed:
                ids += self._whole(prompt[done:begin])
                ids += self._section(prompt[begin:end], before, None if match is None else match[0])
                done = end
                is_typed = False
            if match is not None:
                begin = match.end()
                before = match[0]
        return ids + self._whole(prompt[done:])

    def _whole(self, text: str) -> list[int]:
        if not text:
            return []
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return list(encoded.ids)

    def _section(self, text: str, before: str | None, after: str | None) -> list[int]:
        """Return the ids of the text between two special tokens."""
        if before is not None and self._special[before].rstrip:
            text = text.lstrip()
        if after is not None and self._special[after].lstrip:
            text = text.rstrip()
        start = "" if before is None else _SENTINEL
        ids = self._as_text(start + text)
        if not self._ids.isdisjoint(ids):
            broken = self.pattern.sub(lambda match: f"{match[0][0]}{_SENTINEL}{match[0][1:]}", text)
            ids = self._as_text(start + broken)
        if not self._ids.isdisjoint(ids):
            raise InvalidRequestError(
                "a message contains a special token of the model that its tokenizer cannot encode as text; remove it",
                param="messages",
            )
        return ids

    def _as_text(self, text: str) -> list[int]:
        plain = self._plain
        if plain is None:
            plain = FastTokenizer.from_str(self._backend.to_str())
            plain.add_tokens([AddedToken(_SENTINEL, special=False, normalized=False)])
            plain.encode_special_tokens = True
            self._plain = plain
        sentinel = plain.token_to_id(_SENTINEL)
        (encoded,) = plain.encode_batch_fast([text], add_special_tokens=False)
        return [token for token in encoded.ids if token != sentinel]


def _overlaps(span: Span, texts: Sequence[Span]) -> bool:
    """Return whether a span overlaps one of ``texts``, which are disjoint and in order."""
    index = bisect_left(texts, span[1], key=lambda text: text[0]) - 1
    return index >= 0 and texts[index][1] > span[0]
