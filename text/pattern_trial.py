"""Tries the patterns of a tokenizer on hostile texts before it is used, in a process that the kernel ends.

The library's engine backtracks: a text of 30 characters can occupy it for a second, and then the library panics. Such a
pattern is refused at the start, so that no client can send the text. One whose time grows with the square of the text, as
in some published models, is logged.
"""

import json
import logging
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

from tokenizers import Regex, pre_tokenizers

from text.templates.settings import child_command, render_environment

logger = logging.getLogger(__name__)

MAX_SECONDS = 0.25
"""Processor time for one text. Patterns of common models take 10 ms for 8,000 characters."""
_SQUARE_SECONDS = 0.05
"""Processor time for 8,000 characters from which a pattern is logged: those whose time grows with the square take 0.25 s."""
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


def check_patterns(tokenizer_json: str) -> None:
    """Raise ValueError if a pattern of a tokenizer takes long, or fails, on a hostile text."""
    patterns = sorted(set(_patterns(json.loads(tokenizer_json))))
    if not patterns:
        return
    if len(patterns) > _MAX_PATTERNS:
        raise ValueError(f"it has {len(patterns)} patterns; the limit is {_MAX_PATTERNS}")
    try:
        tried = subprocess.run(
            child_command("text.pattern_trial"),
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
            open_values += [inner for name, inner in one.items() if name not in ("model", "added_tokens")]
