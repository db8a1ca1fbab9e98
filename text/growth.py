"""Tells how much longer a tokenizer's steps can make a text, before the library runs them.

The library's memory has no bound: where a normalizer makes ten characters of one, and nine such follow each other, one
character takes 10 GB, and the process is ended. A step is counted by the most that it can do.
"""

import base64
from collections.abc import Iterator
from typing import Any

import msgspec

MAX_GROWTH = 4096
"""Characters of one; published tokenizers stay below 700."""
MAX_COPIES = 16
"""Of a text in what the model is shown."""
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
"""The longest expansions of Unicode; steps that are not named keep a text's length, but for a character or two."""


_LENGTH_BYTES = 4


class _Steps(msgspec.Struct):
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    post_processor: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


def check_growth(tokenizer_json: str) -> None:
    """Raise ValueError for a step that can make a text too long, takes memory that its file has not, or is none."""
    found = msgspec.json.decode(tokenizer_json, type=_Steps)
    for name, inner in _INNER.items():
        growth = 1
        most = MAX_COPIES if name == "post_processor" else MAX_GROWTH
        for step in _flat(getattr(found, name), inner):
            growth *= _growth_of(step)
            if growth > most:
                raise ValueError(f"its {name} can make more than {most} characters of one")


def _flat(step: Any, inner: str) -> Iterator[dict[str, Any]]:
    """Yield the steps in order, sequences taken apart. Raises ValueError for what is no step."""
    if step is None:
        return
    if not isinstance(step, dict) or not isinstance(step.get(inner, []), list):
        raise ValueError("a step of it is no object")
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
    """How often the text itself stands in what is made of it."""
    pieces = template if isinstance(template, list) else []
    return max(1, sum(isinstance(piece, dict) and "Sequence" in piece for piece in pieces))


def _check_table(charsmap: Any) -> None:
    """Raise ValueError where the table of a sentencepiece normalizer says that it is longer than it is."""
    table = base64.b64decode(charsmap) if isinstance(charsmap, str) else b""
    if int.from_bytes(table[:_LENGTH_BYTES], "little") > len(table):
        raise ValueError("its precompiled_charsmap is shorter than it says")
