"""Patterns of JSON schemas (ECMA 262) as the grammar library (Rust's regex crate) writes the same.

The two differ in classes, where ``[``, ``&&``, ``--`` and ``~~`` mean more in Rust, in braces that are no count, and in
a few escapes. What neither an automaton nor this translation can hold is named, not guessed.
"""

import re
from collections.abc import Iterator

_CHARACTER = r"\\[pPux]\{[^{}]*+\} | \\c[A-Za-z] | \\x[0-9A-Fa-f]{2} | \\u[0-9A-Fa-f]{4}"
_PARTS = re.compile(
    rf"""(?P<character>{_CHARACTER} | \\0(?![0-9])) | (?P<escape>\\.) | (?P<open>\[\^?)
    | (?P<group>\(\?(?:<?[=!]|>|\#|\(|P=|P>|&|R)) | (?P<count>\{{[0-9]++(?:,[0-9]*+)?\}}) | (?P<brace>\{{)
    | (?P<plain>[^\\\[({{]++|.)""",
    re.VERBOSE | re.DOTALL,
)
_IN_CLASS = re.compile(
    rf"(?P<set>\\[dDsSwW] | \\[pP]\{{[^{{}}]*+\}}) | {_CHARACTER} | \\. | .", re.VERBOSE | re.DOTALL
)
_NOT_HELD = frozenset("bBkGKEQRXhHN123456789")
"""Escapes that look around, or back at what was matched, or that ECMA 262 does not know."""
_OTHERS = {"\\Z": "\\z", "\\<": "<", "\\>": ">"}
"""The end of the text as Python writes it; what ECMA takes as it is, and Rust for the end of a word."""


_IN_RUST = {"\\0": "\\x00", "\\b": "\\x08", **{one: f"\\{one}" for one in "[&~^-"}}
"""Within a class, or everywhere (the zero)."""


class NotHeldError(Exception):
    """A part of a pattern that cannot be held, which the error's text is."""


def respelled(pattern: str) -> str:
    """Return the pattern as the library writes it. Raises NotHeldError."""
    return "".join(_respelled(pattern))


def _respelled(pattern: str) -> Iterator[str]:
    position = 0
    while match := _PARTS.match(pattern, position):
        position = match.end()
        text = match[0]
        match match.lastgroup:
            case "group":
                raise NotHeldError(text)
            case "escape" if text[1] in _NOT_HELD:
                raise NotHeldError(text)
            case "escape":
                yield _OTHERS.get(text, text)
            case "brace":
                yield "\\{"
            case "open":
                inner, position = _class_from(pattern, position)
                is_negated = text.endswith("^")
                yield f"[{'^' * is_negated}{inner}]" if inner else "[\\s\\S]" if is_negated else "[^\\s\\S]"
            case kind:
                yield _plain(text) if kind == "character" else text


def _class_from(pattern: str, start: int) -> tuple[str, int]:
    """Return the items of the class that begin there, and where it ends. Raises NotHeldError where it does not."""
    out: list[str] = []
    position = start
    is_range = False
    while (match := _IN_CLASS.match(pattern, position)) and match[0] != "]":
        position = match.end()
        is_set = bool(match["set"])
        if is_range and is_set:  # as in [a-\d], where the hyphen stands for itself
            out[-1] = "\\-"
        out.append(_plain(match[0]))
        following = _IN_CLASS.match(pattern, position + 1)
        may_begin = not is_range and not is_set and pattern.startswith("-", position)
        is_range = may_begin and following is not None and following[0] != "]"
        if is_range:
            out.append("-")
            position += 1
    if match is None:
        raise NotHeldError("a class without its end")
    return "".join(out), position + 1


def _plain(text: str) -> str:
    """One character of a class, or an escape, where it means the same in Rust."""
    if text.startswith("\\c"):
        return f"\\x{ord(text[-1]) % 32:02x}"
    return _IN_RUST.get(text, text)
