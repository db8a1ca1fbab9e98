"""The text that each token of an answer adds, and where it begins in the answer's text."""

from collections.abc import Iterable

from router.tokens.delivery import Token
from text.detokenizer import Detokenizer
from text.tokenizer import Tokenizer


class TokenTexts:
    """Detokenizes the tokens of one answer, in order, and counts the characters.

    hidden: token ids without text. tags: token ids that separate the parts of an answer; each has its own text, whether or
    not special tokens are skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: list[int],
        hidden: Iterable[int],
        tags: Iterable[str],
        *,
        skip_special_tokens: bool,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens)
        self._token_bytes = tokenizer.token_bytes
        self._hidden = frozenset(hidden)
        self._tags = {tokenizer.token_id(tag): tag for tag in tags}
        self._num_characters = 0
        self._holds_text = False

    def push(self, token: Token) -> tuple[str, int]:
        """Return the text that became certain with a token, and the offset at which the token itself begins."""
        text = self._text_of(token.token_id)
        offset = self._num_characters
        if self._holds_text and len(text) > 1:
            offset += self._num_before(token.token_id, text)
        self._num_characters += len(text)
        self._holds_text = self._detokenizer.has_unread
        return text, offset

    def flush(self) -> str:
        """Return the text of an unfinished character at the end of the answer."""
        return self._detokenizer.flush()

    def _text_of(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        tag = self._tags.get(token_id)
        return self._detokenizer.push(token_id) if tag is None else self._detokenizer.flush() + tag

    def _num_before(self, token_id: int, text: str) -> int:
        """Return how many characters of ``text`` belong to earlier tokens."""
        raw = self._token_bytes(token_id)
        own = raw.decode("utf-8", "ignore")
        begins = bool(raw) and raw[0] & 0xC0 != 0x80
        return len(text) - len(own) if begins and text.endswith(own) else 0
