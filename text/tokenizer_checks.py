"""Checks that a tokenizer cannot be made to take much memory or time, before the library loads and runs it.

Growth: the library's memory is not bounded. With nine consecutive normalizers that make ten characters of one, a single
character takes 10 GB, and the process is killed. Each step is counted with its maximum growth.

Patterns: the library's engine backtracks. A text of 30 characters can occupy it for a second, and then the library panics.
Patterns are tried on hostile texts, in a process that the kernel ends; such a pattern is refused at the start, so that no
client can send the text. One whose time grows with the square of the text, as in some published models, is logged.
"""

import base64
import json
import logging
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import msgspec
from tokenizers import Regex, pre_tokenizers

from contract.decoding import json_decoder
from text.templates.settings import child_command, render_environment

logger = logging.getLogger(__name__)

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
# The longest expansions of Unicode; other steps change a text's length by a character or two at most.
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
_LENGTH_BYTES = 4
MAX_SECONDS = 0.25
"""Processor time for one text. Patterns of common models take 10 ms for 8,000 characters."""
# For 8,000 characters; patterns whose time grows with the square take 0.25 s.
_SQUARE_SECONDS = 0.05
_MAX_PATTERNS = 64
_CPU_SECONDS = 6
_PATIENCE_SECONDS = 300.0
_LONG = 8_000
_MIDDLE = 2_000
_SHORT = 120
_MAX_LETTERS = 32
_LETTERS = "aA1 \n'!é中_"
_END = "\0"
_SLOW = "slow"
_SHOWN = 200


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
        template = step.get("single")
        pieces = template if isinstance(template, list) else []
        return max(1, sum(isinstance(piece, dict) and "Sequence" in piece for piece in pieces))
    if step.get("type") == "Precompiled":
        charsmap = step.get("precompiled_charsmap")
        table = base64.b64decode(charsmap) if isinstance(charsmap, str) else b""
        # The library reserves the declared length, whatever it gets.
        if int.from_bytes(table[:_LENGTH_BYTES], "little") > len(table):
            raise ValueError("its precompiled_charsmap is shorter than its declared length")
    written = step.get("content") or step.get("prepend") or step.get("replacement") or ""
    growth: int = _GROWTH.get(str(step.get("type")), 1)
    if not isinstance(written, str):
        return growth
    pattern = step.get("pattern")
    replaced = pattern.get("String") if isinstance(pattern, dict) else None
    # A pattern that is an expression may match a single character.
    shortest = len(replaced) if isinstance(replaced, str) and replaced else 1
    return growth * max(1, -(-len(written) // shortest))


def check_patterns(tokenizer_json: str) -> None:
    """Raise ValueError if a pattern of a tokenizer takes long, or fails, on a hostile text."""
    patterns = sorted(set(_patterns(json.loads(tokenizer_json))))
    if not patterns:
        return
    if len(patterns) > _MAX_PATTERNS:
        raise ValueError(f"it has {len(patterns)} patterns; the limit is {_MAX_PATTERNS}")
    try:
        tried = subprocess.run(
            child_command("text.tokenizer_checks"),
            input=json.dumps(patterns).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the library writes its panics there
            env=render_environment(),
            timeout=_PATIENCE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"its patterns could not be tried within {_PATIENCE_SECONDS:g} s") from error
    lines = tried.stdout.decode().splitlines()
    # The process writes a line for each pattern that passed, and ends at the first that does not.
    if len(lines) < len(patterns):
        failed = patterns[len(lines)]
        raise ValueError(f"its pattern {failed[:_SHOWN]!r} takes too long on some text, or fails")
    for pattern, line in zip(patterns, lines, strict=True):
        if line == _SLOW:
            logger.warning(
                "the tokenizer's pattern %.200r takes time that grows with the square of a text of one letter",
                pattern,
            )


def main() -> None:
    """Read patterns as JSON, and write a line for each up to the first that does not pass."""
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    # A process that the kernel ends for its processor time would leave a core file for each pattern.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for pattern in json.load(sys.stdin):
        splitter = pre_tokenizers.Split(Regex(pattern), "isolated")
        if any(_seconds(splitter, text) > MAX_SECONDS for text in _texts(pattern)):
            return
        is_slow = any(_seconds(splitter, letter * _LONG + _END) > _SQUARE_SECONDS for letter in _LETTERS)
        sys.stdout.write(f"{_SLOW if is_slow else 'fast'}\n")
        sys.stdout.flush()


def _seconds(splitter: pre_tokenizers.Split, text: str) -> float:
    began = time.process_time()
    splitter.pre_tokenize_str(text)
    return time.process_time() - began


def _texts(pattern: str) -> Iterator[str]:
    """Yield repeated letters, of the pattern and others, that end with one which breaks most matches."""
    letters = list(dict.fromkeys([*_LETTERS, *pattern]))[:_MAX_LETTERS]
    needed = "".join(letter * 2 for letter in letters)  # without them the engine may not begin to match
    for first, second in product(letters, repeat=2):
        yield (first + second) * (_SHORT // 2) + _END + needed
    for letter in letters:
        yield letter * _MIDDLE + _END + needed


def _patterns(value: Any) -> Iterable[str]:
    """Yield every pattern in the steps of a tokenizer, wherever it stands."""
    open_values = [value]
    while open_values:
        one = open_values.pop()
        if isinstance(one, list):
            open_values += one
        elif isinstance(one, dict):
            if isinstance(found := one.get("Regex"), str):
                yield found
            # The vocabulary is large, and contains no patterns.
            open_values += [inner for name, inner in one.items() if name not in ("model", "added_tokens")]
