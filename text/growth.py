"""Bounds the growth of a text in a tokenizer's steps, before the library runs them.

The library's memory is not bounded: with nine consecutive normalizers that make ten characters of one, a single character
takes 10 GB, and the process is killed. Each step is counted with its maximum growth.

"""

import base64
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from contract.decoding import json_decoder

MAX_GROWTH = 4096
"""Maximum number of characters made of one; published tokenizers stay below 700."""
MAX_COPIES = 16
"""Maximum number of copies of the text in the post-processor's template."""
MAX_ADDED = 2**17
"""Maximum number of added tokens; published tokenizers stay below 40,000."""
MAX_ADDED_CHARACTERS = 2**21
"""Maximum length of all added tokens together: the library's automaton takes some 80 bytes and 0.4 µs per character."""
_INNER = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
_GROWTH = {
    "ByteLevel": 4,
    "BertNormalizer": 12,
    "Lowercase": 3,
    "NFC": 3,
    "NFD": 4,
    "NFKC": 18,
    "NFKD": 18,
    "Precompiled": 18,
}
"""The longest expansions of Unicode; other steps change a text's length by a character or two at most."""


_LENGTH_BYTES = 4


class _Added(msgspec.Struct):
    content: str = ""


class _Steps(msgspec.Struct):
    added_tokens: list[_Added] | None = None
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    post_processor: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


_decoder_of_steps: msgspec.json.Decoder[_Steps] = json_decoder(_Steps)


def check_growth(tokenizer_json: str) -> None:
    """Raise ValueError for a step that can make a text too long, that declares more memory than its data, or is invalid."""
    found = _decoder_of_steps.decode(tokenizer_json)
    check_added([token.content for token in found.added_tokens or ()])
    for name, inner in _INNER.items():
        growth = 1
        most = MAX_COPIES if name == "post_processor" else MAX_GROWTH
        for step in _flat(getattr(found, name), inner):
            growth *= _growth_of(step)
            if growth > most:
                raise ValueError(f"its {name} can turn one character into more than {most}")


def check_added(contents: Sequence[str]) -> None:
    """Raise ValueError for more added tokens, or longer ones, than the library can search for in bounded time and memory."""
    if len(contents) > MAX_ADDED:
        raise ValueError(f"it has {len(contents)} added tokens; the limit is {MAX_ADDED}")
    if (num_characters := sum(map(len, contents))) > MAX_ADDED_CHARACTERS:
        raise ValueError(
            f"its added tokens have {num_characters} characters; the limit is {MAX_ADDED_CHARACTERS}"
        )


def _flat(step: Any, inner: str) -> Iterator[dict[str, Any]]:
    """Yield the steps in order, with flattened sequences. Raises ValueError for an invalid step."""
    if step is None:
        return
    if not isinstance(step, dict) or not isinstance(step.get(inner, []), list):
        raise ValueError("one of its steps is not an object")
    if step.get("type") != "Sequence":
        yield step
        return
    for each in step.get(inner, []):
        yield from _flat(each, inner)


def _growth_of(step: dict[str, Any]) -> int:
    if step.get("type") == "TemplateProcessing":
        return _num_copies(step.get("single"))
    if step.get("type") == "Precompiled":
        _check_table(step.get("precompiled_charsmap"))
    written = step.get("content") or step.get("prepend") or step.get("replacement") or ""
    growth: int = _GROWTH.get(str(step.get("type")), 1)
    if not isinstance(written, str):
        return growth
    pattern = step.get("pattern")
    replaced = pattern.get("String") if isinstance(pattern, dict) else None
    shortest = len(replaced) if isinstance(replaced, str) and replaced else 1
    return growth * max(1, -(-len(written) // shortest))


def _num_copies(template: Any) -> int:
    """Return the number of copies of the text in a template's result."""
    pieces = template if isinstance(template, list) else []
    return max(1, sum(isinstance(piece, dict) and "Sequence" in piece for piece in pieces))


def _check_table(charsmap: Any) -> None:
    """Raise ValueError if the table of a sentencepiece normalizer is shorter than its declared length."""
    table = base64.b64decode(charsmap) if isinstance(charsmap, str) else b""
    if int.from_bytes(table[:_LENGTH_BYTES], "little") > len(table):
        raise ValueError("its precompiled_charsmap is shorter than its declared length")
