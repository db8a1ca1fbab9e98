"""Encodes text and decodes token ids with a model folder's ``tokenizer.json`` and the ``tokenizers`` library.

``MessageEncoder`` encodes a chat's prompt with special tokens that a client typed as plain text.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from contract.errors import InvalidRequestError, SettingError
from contract.model_folder import MAX_TOKENIZER_BYTES, read_json_object, read_text
from text.length_bound import LengthBound
from text.tokenizer_checks import check_added, check_growth, check_patterns

# Precedes a section in place of the special token there: some tokenizers add a space at the beginning of a text.
_SENTINEL = "\ue000kvbaton\ue001"
Span = tuple[int, int]


class MessageEncoder:
    """Encodes prompts with one tokenizer. Owns a second tokenizer without special tokens, made at first use."""

    def __init__(self, backend: FastTokenizer) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder().values()
        self._special = {token.content: token for token in added if token.special}
        self._ids = frozenset(backend.token_to_id(content) for content in self._special)
        # One may be the beginning of another; an alternation takes the first that matches.
        longest_first = sorted(map(re.escape, self._special), key=len, reverse=True)
        self.pattern = re.compile("|".join(longest_first) or "(?!)")
        """Matches a special token."""
        self._plain: FastTokenizer | None = None

    def encode(self, prompt: str, texts: Sequence[Span]) -> list[int]:
        """Return the ids of a prompt; special tokens within ``texts`` are encoded as text.

        Raises InvalidRequestError if the tokenizer cannot encode a typed one as text.
        """
        ids: list[int] = []
        begin = done = 0
        before: str | None = None
        is_typed = False
        # A section is the text between two special tokens of the template. Only those with typed tokens are encoded apart:
        # everything between them gets the ids that it has in a prompt without typed tokens.
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
        # Such a token takes the white space beside it, which the tokenizer without special tokens would keep.
        if before is not None and self._special[before].rstrip:
            text = text.lstrip()
        if after is not None and self._special[after].lstrip:
            text = text.rstrip()
        start = "" if before is None else _SENTINEL
        ids = self._as_text(start + text)
        if not self._ids.isdisjoint(ids):
            # A token in the vocabulary itself is found even as text: the sentinel after its first character breaks it.
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
            # It holds the vocabulary a second time, and few clients ever type a special token.
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


_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SPACE_MARK = "▁"
_ADDED = "added_tokens_decoder"
# The libraries keep tables with one entry per token id.
_MAX_ID = 2**24 - 1
_TRIAL = "A trial: 1 é 中\n"
_MAX_SHOWN = 500
# Single tokens whose texts are kept.
_MAX_DECODED = 2**15


def read_json(file: Path) -> dict[str, Any]:
    """Return the object of a JSON file; empty if it does not exist. Raises SettingError for an invalid file."""
    return read_json_object(file) or {}


class Tokenizer:
    """One model's tokenizer. Immutable, so that several threads may use it.

    ``encode`` adds special tokens as ``transformers`` does: by the post-processor of ``tokenizer.json`` only
    (``add_bos_token`` and ``add_eos_token`` in ``tokenizer_config.json`` are used only without that file).
    """

    def __init__(self, backend: FastTokenizer, config: dict[str, Any]) -> None:
        self._backend = backend
        names = {name: _content(config.get(name)) for name in _NAMED}
        self.named_tokens = {name: token for name, token in names.items() if token}
        """Special tokens by the names that ``transformers`` passes to chat templates."""
        self.bos_token: str | None = names["bos_token"]
        self.eos_token: str | None = names["eos_token"]
        backend.no_truncation()
        backend.no_padding()
        self._add_missing_tokens(config, [name for name in names.values() if name])
        self._special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self._messages = MessageEncoder(backend)
        self.length_bound = LengthBound(backend)
        self.decode_one = lru_cache(_MAX_DECODED)(self._decode)
        """Returns the text of one token as ``decode`` does: (token id, skip_special_tokens) → text."""
        decoder = json.loads(backend.to_str()).get("decoder") or {}
        self.joins_bytes = decoder.get("type") == "ByteLevel"
        """True if the text of several tokens is that of their bytes in a row, whatever these are."""
        self._is_byte_level = '"ByteLevel"' in json.dumps(decoder)

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Read ``tokenizer.json`` and its companions. Raises SettingError if it is missing or invalid."""
        file = folder / "tokenizer.json"
        text = read_text(file, MAX_TOKENIZER_BYTES)
        if text is None:
            raise SettingError(f"{folder} contains no tokenizer.json", param="model")
        config = read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")
        _check_added_tokens(config)
        # The checks precede the loading: an added token or a step can already take unbounded memory there.
        try:
            check_growth(text)
            check_patterns(text)
            check_added([entry["content"] for entry in config.get(_ADDED, {}).values()])
            with PanicsAsErrors():
                tokenizer = cls(FastTokenizer.from_str(text), config)
                if (largest := max(tokenizer.ids(), default=0)) > _MAX_ID:
                    raise ValueError(f"it has token id {largest}; the limit is {_MAX_ID}")
                tokenizer.decode(tokenizer.encode(_TRIAL))
        except Exception as error:  # the library raises the bare class
            raise SettingError(
                f"{file} is not a valid tokenizer: {str(error)[:_MAX_SHOWN]}", param="model"
            ) from error
        return tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``, in which special tokens are recognized. Releases the GIL."""
        # The library's plain ``encode`` holds the GIL.
        with PanicsAsErrors():
            (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoded.ids

    def encode_messages(self, prompt: str, texts: Sequence[tuple[int, int]]) -> list[int]:
        """Return the ids of a chat's prompt, without added tokens, and with special tokens within ``texts`` as plain text.

        texts: (start, end) of the client's texts, in order. Raises InvalidRequestError if that is not possible.
        """
        special = self._messages.pattern.finditer(prompt)
        if not any(_overlaps(match.span(), texts) for match in special):  # none was typed by the client
            return self.encode(prompt, add_special_tokens=False)
        with PanicsAsErrors():
            return self._messages.encode(prompt, texts)

    @property
    def special_tokens(self) -> re.Pattern[str]:
        """A pattern that matches the model's special tokens in a text."""
        return self._messages.pattern

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return (begin, end) in ``text`` of each token of ``encode(text)``; (0, 0) for an added one."""
        with PanicsAsErrors():
            (encoded,) = self._backend.encode_batch([text])
        return list(encoded.offsets)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``token_ids``; invalid UTF-8 becomes U+FFFD, unknown ids have no text."""
        if len(token_ids) == 1:  # single tokens are decoded again and again
            return self.decode_one(token_ids[0], skip_special_tokens)
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str | None) -> int | None:
        """Return the id of a token in the vocabulary's form, or None."""
        return None if token is None else self._backend.token_to_id(token)

    def ids(self) -> Iterable[int]:
        """Return the ids of all tokens."""
        return self._backend.get_vocab(with_added_tokens=True).values()

    def written(self, token_id: int) -> str:
        """Return a token in the vocabulary's form; empty for an unknown id."""
        return self._backend.id_to_token(token_id) or ""

    def has_text(self, token_id: int) -> bool:
        """Return False for a special token, which decoded text may omit."""
        return token_id not in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, with its leading space; special tokens in their written form."""
        written = self._backend.id_to_token(token_id)
        if written is None:
            return b""
        if token_id in self._special_ids:
            return written.encode()
        if self._is_byte_level:
            if all(char in _BYTE_OF_CHAR for char in written):
                return bytes(_BYTE_OF_CHAR[char] for char in written)
            return written.encode()
        if len(written) == 6 and written.startswith("<0x") and written.endswith(">"):
            return bytes.fromhex(written[3:5])
        return written.replace(_SPACE_MARK, " ").encode()

    def _decode(self, token_id: int, skip_special_tokens: bool) -> str:
        return self._backend.decode((token_id,), skip_special_tokens=skip_special_tokens)

    def _add_missing_tokens(self, config: dict[str, Any], named: list[str]) -> None:
        known = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        # The library numbers added tokens in the order in which they are added.
        added = sorted(config.get(_ADDED, {}).items(), key=lambda item: int(item[0]))
        missing = []
        for _, entry in added:
            if entry["content"] not in known:
                flags = {k: v for k, v in entry.items() if isinstance(v, bool)}
                missing.append(AddedToken(entry["content"], **flags))
                known.add(entry["content"])
        if missing:  # one call: the library builds its automaton anew at each
            self._backend.add_tokens(missing)
        for content in named:
            if content not in known:
                self._backend.add_special_tokens([AddedToken(content, special=True, normalized=False)])
                known.add(content)


class PanicsAsErrors:
    """A block that turns a panic of the library into an error of the text: its class is no Exception, and ends a thread."""

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        """Raise InvalidRequestError for a panic."""
        # The library does not export the class.
        if type(error).__name__ == "PanicException":
            raise InvalidRequestError(
                f"the model's tokenizer failed on this text: {str(error)[:_MAX_SHOWN]}"
            ) from error


def _check_added_tokens(config: Mapping[str, Any]) -> None:
    """Raise SettingError unless the added tokens of tokenizer_config.json, if any, are objects by their ids."""
    added = config.get(_ADDED, {})
    if not isinstance(added, dict):
        raise _wrong_added(f"is {added!r:.80}; it must be an object")
    for token_id, entry in added.items():
        is_id = token_id.isascii() and token_id.isdigit() and len(token_id) < len(str(_MAX_ID)) + 2
        if not is_id or not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise _wrong_added(
                f"contains {token_id!r:.40}: {entry!r:.80}; it must be a token id with its content"
            )


def _wrong_added(what: str) -> SettingError:
    return SettingError(f"model: tokenizer_config.json cannot be read: {_ADDED} {what}", param="model")


def _content(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
# GPT-2's table: printable bytes are themselves, the others are the characters from U+0100 on.
_BYTE_OF_CHAR = {chr(b): b for b in _PRINTABLE} | {chr(256 + n): b for n, b in enumerate(_OTHERS)}
