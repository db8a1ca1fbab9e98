"""Makes text safe for a log: one line of bounded length, without control characters."""

import re

MAX_LINE = 8192
"""Maximum number of characters of a record; a longer one is shortened in the middle."""
MAX_TRACEBACK = 16_384
_UNSAFE = re.compile(
    "[\\\\\x00-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
"""The backslash, control characters (C0, DEL, C1), line and paragraph separators, marks of direction, invisible ones."""
_NAMED = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def safe_line(text: str, max_characters: int = MAX_LINE) -> str:
    """Return the text as one line of limited length, with escapes for characters that could end or forge a line."""
    return _UNSAFE.sub(_escape, cut(text, max_characters))


def cut(text: str, max_characters: int) -> str:
    """Return the text, or its beginning and end with the number of omitted characters between them."""
    if len(text) <= max_characters:
        return text
    tail = max_characters // 4
    head = max_characters - tail
    return f"{text[:head]} ... {len(text) - max_characters} characters ... {text[-tail:]}"


def _escape(match: re.Match[str]) -> str:
    found = match[0]
    code = ord(found)
    if found in _NAMED:
        return _NAMED[found]
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
