"""Detects texts with too many tokens, at a fraction of the cost of tokenizing them.

The library needs about 150 bytes of memory and a microsecond per byte of text, so a text that cannot fit is rejected by its
length in bytes, or by the tokens of its beginning.

"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.pre_tokenizers import ByteLevel

from contract.errors import ContextLengthError

MIN_TEXT_BYTES = 2**20
MAX_BYTES_PER_TOKEN = 16
"""Limit of a text's bytes per token of the model's length; at least MIN_TEXT_BYTES are allowed."""
_PIECE = 2**16
_PIECE_SLACK = 4
_TEXT_SLACK = 1024
# Factors by which normalizers can shrink a text's bytes; others are unknown.
_COMPOSING = {"NFC": 4, "NFKC": 4, "NFD": 4, "NFKD": 4, "Prepend": 1, "ByteLevel": 1}
_KEEPING = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"})
"""Pre-tokenizers that drop no text."""


class LengthBound:
    """Bounds the number of tokens of a text for one tokenizer. Immutable.

    bytes_per_token: the most bytes of a text that one token stands for; None if there is no such limit.
    """

    def __init__(self, backend: FastTokenizer) -> None:
        spec = json.loads(backend.to_str())
        self._backend = backend
        # Such a token takes white space on either side of the cut between two pieces.
        self._is_local = not any(token["lstrip"] or token["rstrip"] for token in spec["added_tokens"])
        self.bytes_per_token = _bytes_per_token(spec) if self._is_local else None

    def is_exceeded(self, text: str, max_tokens: int) -> bool:
        """Return True if the text certainly has more than ``max_tokens`` tokens."""
        if len(text) <= max_tokens:
            return False
        if self.bytes_per_token is not None:
            most = self.bytes_per_token * max_tokens
            if len(text) > most or len(text.encode(errors="replace")) > most:
                return True
        if len(text) <= max(_PIECE, 4 * max_tokens) or not self._is_local:
            return False
        # Tokens are counted piece by piece, up to twice the limit, since a cut may split a token into a few.
        count = 0
        for start in range(0, len(text), _PIECE):
            piece = text[start : start + _PIECE]
            (encoded,) = self._backend.encode_batch_fast([piece], add_special_tokens=False)
            count += len(encoded) - _PIECE_SLACK
            if count > 2 * max_tokens + _TEXT_SLACK:
                return True
        return False


def check_text_size(text: str, max_tokens: int, param: str) -> None:
    """Raise ContextLengthError for a text above the byte limit, which bounds the memory for one text."""
    most = _most_bytes(max_tokens)
    if len(text) > most or (4 * len(text) > most and len(text.encode(errors="replace")) > most):
        raise ContextLengthError(
            f"This model's maximum context length is {max_tokens} tokens, and no text may have more than {most} bytes. "
            f"However, yours has {len(text)} characters. Please reduce its length.",
            param=param,
        )


def check_text_fits(text: str, bound: LengthBound, max_tokens: int, param: str) -> None:
    """Raise ContextLengthError for a text that certainly has more than ``max_tokens`` tokens, or too many bytes."""
    check_text_size(text, max_tokens, param)
    if bound.is_exceeded(text, max_tokens):
        raise _too_many_tokens(len(text), max_tokens, param)


def check_length_fits(num_characters: int, bound: LengthBound, max_tokens: int, param: str) -> None:
    """Raise ContextLengthError if no text of ``num_characters`` fits; then it need not be rendered."""
    per_token = bound.bytes_per_token
    if num_characters > _most_bytes(max_tokens) or (per_token and num_characters > per_token * max_tokens):
        raise _too_many_tokens(num_characters, max_tokens, param)


def _most_bytes(max_tokens: int) -> int:
    return max(MIN_TEXT_BYTES, MAX_BYTES_PER_TOKEN * max_tokens)


def _too_many_tokens(num_characters: int, max_tokens: int, param: str) -> ContextLengthError:
    return ContextLengthError(
        f"This model's maximum context length is {max_tokens} tokens. However, your text of {num_characters} characters "
        "has more. Please reduce its length.",
        param=param,
    )


def _bytes_per_token(spec: Mapping[str, Any]) -> int | None:
    """Return the bytes of the longest token, times the normalizer's shrink factor; None if unknown."""
    normalizers = _parts(spec.get("normalizer"), "normalizers")
    pre_tokenizers = _parts(spec.get("pre_tokenizer"), "pretokenizers")
    shrinking = _shrinking(normalizers)
    keeps_all = all(
        step["type"] in _KEEPING
        or (step["type"] in ("Split", "Punctuation") and step.get("behavior") != "Removed")
        for step in pre_tokenizers
    )
    model = spec["model"]
    if shrinking is None or not keeps_all or model["type"] != "BPE":
        return None
    has_fallback = model.get("byte_fallback") and all(
        f"<0x{byte:02X}>" in model["vocab"] for byte in range(256)
    )
    # Otherwise the text must be converted to bytes first, all of which the vocabulary has.
    is_byte_level = any(step["type"] == "ByteLevel" for step in (*normalizers, *pre_tokenizers))
    if not has_fallback and not (
        is_byte_level and all(char in model["vocab"] for char in ByteLevel.alphabet())
    ):
        return None
    written = [*model["vocab"], *(token["content"] for token in spec["added_tokens"])]
    return shrinking * max(len(token.encode()) for token in written)


def _parts(spec: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, with flattened sequences."""
    if spec is None:
        return []
    if spec["type"] != "Sequence":
        return [spec]
    return [part for inner in spec[name] for part in _parts(inner, name)]


def _shrinking(normalizers: Iterable[Mapping[str, Any]]) -> int | None:
    factor = 1
    for step in normalizers:
        if step["type"] == "Replace":
            pattern = step["pattern"].get("String", "")
            if not pattern or len(step["content"].encode()) < len(pattern.encode()):
                return None
        elif (own := _COMPOSING.get(step["type"])) is None:
            return None
        else:
            factor *= own
    return factor
