"""Translates patterns of JSON schemas (ECMA 262) to the syntax of the grammar library (Rust's regex crate).

The two differ in classes, where ``[``, ``&&``, ``--`` and ``~~`` have a meaning in Rust, in braces that are not a count,
and in a few escapes. Parts that an automaton or this translation does not support are named in an error.
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
_UNSUPPORTED = frozenset("bBkGKEQRXhHN123456789")
"""Escapes for look-around or back-references, and escapes that ECMA 262 does not define."""
_OTHERS = {"\\Z": "\\z", "\\<": "<", "\\>": ">"}
"""Python's escape for the end of the text, and a literal of ECMA that means the end of a word in Rust."""


_IN_RUST = {"\\0": "\\x00", "\\b": "\\x08", **{one: f"\\{one}" for one in "[&~^-"}}
"""Escapes within a class; the zero everywhere."""


class UnsupportedPatternError(Exception):
    """An unsupported part of a pattern; it is the error's text."""


def rust_pattern(pattern: str) -> str:
    """Return the pattern in the library's syntax. Raises UnsupportedPatternError."""
    return "".join(_rust_parts(pattern))


def _rust_parts(pattern: str) -> Iterator[str]:
    position = 0
    while match := _PARTS.match(pattern, position):
        position = match.end()
        text = match[0]
        match match.lastgroup:
            case "group":
                raise UnsupportedPatternError(text)
            case "escape" if text[1] in _UNSUPPORTED:
                raise UnsupportedPatternError(text)
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
    """Return the items of a class and its end. Raises UnsupportedPatternError if it has no end."""
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
        raise UnsupportedPatternError("a class without an end")
    return "".join(out), position + 1


def _plain(text: str) -> str:
    """Return one character of a class, or an escape, in Rust's syntax."""
    if text.startswith("\\c"):
        return f"\\x{ord(text[-1]) % 32:02x}"
    return _IN_RUST.get(text, text)
