"""Reads values as programs write them, Python's literals and Gemma's, and writes them as JSON.

Words of both languages are known (``True`` and ``true``); any other bare text is a string.
"""

import re
from collections.abc import Sequence

from text.parsing.reader import Reader, Steps, Write, decoded
from text.parsing.tool_schema import quoted

_MAX_DEPTH = 64
"""Depth of lists and objects in a value; a deeper one is not read."""
_BARE = re.compile(r"""[^,()\[\]{}'"<]+""")
_KEY = re.compile(r"""[^,:()\[\]{}'"<]+""")
_ANY = re.compile(".", re.DOTALL)
_HEX = re.compile("[0-9a-fA-F]")
_PLAIN = {"'": re.compile(r"[^'\\]+"), '"': re.compile(r'[^"\\]+')}
_SPELLED = {"True": "true", "False": "false", "None": "null"}
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_BEHIND_A_STRING = frozenset(",:)]}")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_LITERAL_ESCAPES = frozenset("\\'\"")
_NUM_DIGITS = {"x": 2, "u": 4, "U": 8}
_REPLACEMENT = "\ufffd"


def bare_value(text: str) -> str:
    """Return the JSON text of a bare word: a number, true, false or null as such, any other text as a string."""
    text = text.strip()
    text = _SPELLED.get(text, text)
    if decoded(text) is not None or text == "null":
        return text
    # Python also writes 1_000, .5, 5. and 007.
    plain = text.replace("_", "")
    if plain.isascii() and plain[:1] in "+-.0123456789" and plain:
        for read in (int, float):
            try:
                found = str(read(plain))
            except ValueError:
                continue
            if decoded(found) is not None:
                return found
    return quoted(text)


def literal_value(text: str) -> str | None:
    """Return the JSON text of a list or an object of Python; None if the text is none."""
    reader = Reader()
    reader.add(text.strip())
    reader.is_ended = True
    parts: list[str] = []

    def read() -> Steps[None]:
        is_whole = yield from copy_literal(reader, ("'", '"'), parts.append)
        if not is_whole or (yield from reader.peek()):
            parts.clear()

    next(read(), None)
    return "".join(parts) if parts and parts[0] in ("[", "{") else None


def read_bare(reader: Reader) -> Steps[str]:
    """Read a bare word, up to the punctuation behind it."""
    return (yield from reader.read_all(_BARE))


def read_quote(reader: Reader, quotes: Sequence[str]) -> Steps[str]:
    """Read the quote with which a string begins, and return it; empty if there is none."""
    for quote in quotes:
        if (yield from reader.skip(quote)):
            return quote
    return ""


def copy_string(reader: Reader, quote: str, write: Write) -> Steps[bool]:
    """Read a string behind its opening quote and write its text as JSON without quotes; return False if it does not end.

    In Python's quotes a backslash escapes, and a quote with more text behind it does not end the string: models write
    ``'it's'``. Any other quote ends the string.
    """

    def write_text(text: str) -> None:
        write(quoted(text)[1:-1])

    plain = _PLAIN.get(quote)
    if plain is None:
        end = yield from reader.copy_until([quote], write_text, trim="")
        return end is not None and (yield from reader.skip(quote))
    is_long = yield from reader.skip(quote * 2)
    while first := (yield from reader.peek()):
        if first == "\\":
            write_text((yield from _read_escape(reader)))
        elif first != quote:
            write_text(reader.read(plain))
        elif is_long:
            if (yield from reader.skip(quote * 3)):
                return True
            write_text(reader.read(_ANY))
        else:
            reader.read(_ANY)
            space = yield from reader.skip_space()
            behind = yield from reader.peek()
            if not behind or behind in _BEHIND_A_STRING:
                return True
            write_text(quote + space)
    return False


def copy_literal(reader: Reader, quotes: Sequence[str], write: Write, depth: int = 0) -> Steps[bool]:
    """Read a value and write its JSON text; return False if there is none, or it does not end.

    quotes: those with which a string may begin.
    """
    if quote := (yield from read_quote(reader, quotes)):
        write('"')
        is_whole = yield from copy_string(reader, quote, write)
        write('"' if is_whole else "")
        return is_whole
    first = yield from reader.peek()
    if first in _CLOSING and depth < _MAX_DEPTH:
        return (yield from _copy_collection(reader, quotes, write, depth))
    word = yield from read_bare(reader)
    is_whole = bool((yield from reader.peek()))
    write(bare_value(word) if is_whole and word.strip() else word)
    return is_whole and bool(word.strip())


def _copy_collection(reader: Reader, quotes: Sequence[str], write: Write, depth: int) -> Steps[bool]:
    opening = reader.read(_ANY)
    closing = _CLOSING[opening]
    is_object = opening == "{"
    write("{" if is_object else "[")
    between = ""
    while True:
        yield from reader.skip_space()
        if (yield from reader.skip(closing)):
            write("}" if is_object else "]")
            return True
        write(between)
        between = ", "
        if is_object and not (yield from _copy_key(reader, quotes, write)):
            return False
        if not (yield from copy_literal(reader, quotes, write, depth + 1)):
            return False
        yield from reader.skip_space()
        if not (yield from reader.skip(",")) and (yield from reader.peek()) != closing:
            return False


def _copy_key(reader: Reader, quotes: Sequence[str], write: Write) -> Steps[bool]:
    """Read a key and the colon behind it; return False if there is none."""
    if quote := (yield from read_quote(reader, quotes)):
        write('"')
        is_key = yield from copy_string(reader, quote, write)
        write('"')
    else:
        key = yield from reader.read_all(_KEY)
        is_key = bool(key.strip())
        write(quoted(key.strip()))
    yield from reader.skip_space()
    if not is_key or not (yield from reader.skip(":")):
        return False
    write(": ")
    yield from reader.skip_space()
    return True


def _read_escape(reader: Reader) -> Steps[str]:
    """Read a backslash and what it escapes, and return the text that both stand for; an unknown escape is itself."""
    backslash = reader.read(_ANY)
    kind = yield from reader.peek()
    if kind in _ESCAPES or kind in _LITERAL_ESCAPES:
        return _ESCAPES.get(reader.read(_ANY), kind)
    if kind not in _NUM_DIGITS:
        return backslash
    reader.read(_ANY)
    written, code = yield from _read_code(reader, _NUM_DIGITS[kind])
    if kind == "u" and 0xD800 <= code < 0xDC00 and (yield from reader.skip("\\u")):
        low_written, low = yield from _read_code(reader, 4)
        if 0xDC00 <= low < 0xE000:
            return chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00))
        return _REPLACEMENT + (_character(low) or f"\\u{low_written}")
    return _character(code) or f"{backslash}{kind}{written}"


def _read_code(reader: Reader, num_digits: int) -> Steps[tuple[str, int]]:
    """Return the digits of a character's number, and the number; that is -1 if there are too few."""
    digits = ""
    while len(digits) < num_digits and (yield from reader.peek()):
        digit = reader.read(_HEX)
        if not digit:
            break
        digits += digit
    return digits, int(digits, 16) if len(digits) == num_digits else -1


def _character(code: int) -> str:
    """Return the character of a number; empty if it is none, U+FFFD for half of a surrogate pair."""
    if not 0 <= code <= 0x10FFFF:
        return ""
    return _REPLACEMENT if 0xD800 <= code < 0xE000 else chr(code)
