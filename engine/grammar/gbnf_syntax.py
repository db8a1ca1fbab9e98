"""Parses GBNF, the grammars of llama.cpp, into rules over characters.

Source: llama.cpp, grammars/README.md. A rule begins where a name is followed by ``::=``; line ends separate nothing else, so
that alternatives may begin a line, as XGrammar allows. References to tokens (``<think>``) are refused by name.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from contract.errors import InvalidRequestError


@dataclass(frozen=True)
class Characters:
    """One character of these ranges (both ends belong to them), or one of none of them."""

    ranges: tuple[tuple[int, int], ...]
    is_negated: bool = False


@dataclass(frozen=True)
class Reference:
    """A reference to the rule of this name."""

    name: str


@dataclass(frozen=True)
class Repetition:
    """``fewest`` to ``most`` times the item; without ``most`` any number."""

    item: "Item"
    fewest: int
    most: int | None


@dataclass(frozen=True)
class Group:
    """One of the alternatives, each a sequence."""

    alternatives: tuple[tuple["Item", ...], ...]


Item = Characters | Reference | Repetition | Group
ANY = Characters((), is_negated=True)

# Each repetition is possessive: no text makes the search try a second way.
_TOKENS = re.compile(
    r"""(?P<space>(?:\s|\#[^\r\n]*+)++) | (?P<rule>[\w-]++(?:\s|\#[^\r\n]*+)*+::=) | (?P<name>[\w-]++)
    | "(?P<literal>(?:[^"\\]|\\.)*+)" | \[(?P<characters>\^?(?:[^\]\\]|\\.)*+)\]
    | (?P<times>[*+?] | \{\s*\d*\s*(?:,\s*\d*\s*)?\}) | (?P<mark>[().|])
    | (?P<token>!?<[^\s>]*>)""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\(.)|([^\\])", re.DOTALL)
_NAMED_ESCAPES = {
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "\\": "\\",
    '"': '"',
    "[": "[",
    "]": "]",
    "-": "-",
    "^": "^",
    "/": "/",
}
_MAX_REPETITIONS = 2**31


def parse_gbnf(text: str) -> dict[str, Group]:
    """Return the rules by name. Raises InvalidRequestError about ``grammar`` with the place of the mistake."""
    try:
        return _Parser(text).rules()
    except RecursionError as error:
        raise _wrong("its groups are nested too deep") from error


class _Tokens:
    """The tokens of a text, one at a time. kind: that of the pattern, or "end". value: what the pattern captures."""

    def __init__(self, text: str) -> None:
        self.kind = ""
        self.value = ""
        self._text = text
        self._start = 0
        self._end = 0
        self.advance()

    def advance(self) -> None:
        """Read the next token, without spaces and comments."""
        while True:
            self._start = self._end
            if self._end == len(self._text):
                self.kind = "end"
                self.value = ""
                return
            match = _TOKENS.match(self._text, self._end)
            if match is None:
                self.kind = "other"
                self.value = self._text[self._end]
                raise self.unexpected("a rule, text in quotes, a class or an operator")
            self._end = match.end()
            self.kind = match.lastgroup or ""
            if self.kind != "space":
                self.value = match[self.kind]
                return

    def unexpected(self, expected: str) -> InvalidRequestError:
        """Return the error of this token in the place of another one."""
        found = repr(self.value[:20]) if self.kind != "end" else "the end"
        return self.error(f"there is {found} where {expected} should be")

    def error(self, message: str) -> InvalidRequestError:
        """Return an error with the line of this token."""
        line = self._text.count("\n", 0, self._start) + 1
        return _wrong(f"line {line}: {message}")


class _Parser:
    """Reads one grammar by recursive descent, one token ahead."""

    def __init__(self, text: str) -> None:
        self._tokens = _Tokens(text)

    def rules(self) -> dict[str, Group]:
        """Return the rules by name."""
        rules: dict[str, Group] = {}
        while self._tokens.kind != "end":
            if self._tokens.kind != "rule":
                raise self._tokens.unexpected("a rule, as in name ::= ...")
            name = re.split(r"[\s#:]", self._tokens.value, maxsplit=1)[0]
            if name in rules:
                raise self._tokens.error(f"the rule {name[:40]!r} is defined twice")
            self._tokens.advance()
            rules[name] = self._group()
        return rules

    def _group(self) -> Group:
        alternatives = [self._sequence()]
        while (self._tokens.kind, self._tokens.value) == ("mark", "|"):
            self._tokens.advance()
            alternatives.append(self._sequence())
        return Group(tuple(alternatives))

    def _sequence(self) -> tuple[Item, ...]:
        items: list[Item] = []
        while (found := self._item()) is not None:
            while self._tokens.kind == "times":
                found = self._repetition(found)
            items.append(found)
        return tuple(items)

    def _item(self) -> Item | None:
        kind = self._tokens.kind
        value = self._tokens.value
        if kind == "token":
            raise self._tokens.error(
                f"the token {value[:40]} cannot be asked for; grammars are over characters here"
            )
        if kind == "mark" and value == "(":
            return self._bracketed()
        readers: dict[str, Callable[[], Item]] = {
            "name": lambda: Reference(value),
            "literal": lambda: _literal(self._tokens, value),
            "characters": lambda: _characters(self._tokens, value),
        }
        if kind == "mark" and value == ".":
            self._tokens.advance()
            return ANY
        reader = readers.get(kind)
        if reader is None:
            return None
        item = reader()
        self._tokens.advance()
        return item

    def _bracketed(self) -> Group:
        self._tokens.advance()
        group = self._group()
        if (self._tokens.kind, self._tokens.value) != ("mark", ")"):
            raise self._tokens.unexpected("a closing parenthesis")
        self._tokens.advance()
        return group

    def _repetition(self, item: Item) -> Repetition:
        value = self._tokens.value
        self._check_counts(value)
        match value:
            case "*":
                fewest = 0
                most = None
            case "+":
                fewest = 1
                most = None
            case "?":
                fewest = 0
                most = 1
            case _:
                fewest, most = self._counts(value)
        self._tokens.advance()
        return Repetition(item, fewest, most)

    def _counts(self, value: str) -> tuple[int, int | None]:
        first, comma, second = re.sub(r"\s", "", value[1:-1]).partition(",")
        fewest = int(first or 0)
        most = fewest if not comma else int(second) if second else None
        if most is not None and most < fewest:
            raise self._tokens.error(f"{value[:40]} asks for at most {most} and at least {fewest}")
        return fewest, most

    def _check_counts(self, value: str) -> None:
        if value.startswith("{") and not re.search(r"\d", value):
            raise self._tokens.error(f"{value[:40]} has no number")
        if any(int(number[:12]) > _MAX_REPETITIONS for number in re.findall(r"\d+", value)):
            raise self._tokens.error(f"{value[:40]} asks for more than {_MAX_REPETITIONS} repetitions")


def _literal(tokens: _Tokens, value: str) -> Item:
    characters = tuple(Characters(((code, code),)) for code, _ in _codes(tokens, value))
    return characters[0] if len(characters) == 1 else Group((characters,))


def _characters(tokens: _Tokens, value: str) -> Item:
    is_negated = value.startswith("^")
    codes = _codes(tokens, value[is_negated:])
    ranges = []
    position = 0
    while position < len(codes):
        first = last = codes[position][0]
        if position + 2 < len(codes) and codes[position + 1] == (ord("-"), False):
            last = codes[position + 2][0]
            position += 2
        if last < first:
            raise tokens.error(f"the range {chr(first)!r} to {chr(last)!r} is empty")
        ranges.append((first, last))
        position += 1
    return Characters(tuple(ranges), is_negated)


def _codes(tokens: _Tokens, value: str) -> list[tuple[int, bool]]:
    """Return the code points that are written, and whether each is written as an escape."""
    codes = []
    for match in _ESCAPE.finditer(value):
        *hexadecimal, named, plain = match.groups()
        digits = next(filter(None, hexadecimal), "")
        if named and named not in _NAMED_ESCAPES:
            raise tokens.error(f"\\{named} is no escape of GBNF")
        code = int(digits, 16) if digits else ord(_NAMED_ESCAPES[named] if named else plain)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise tokens.error(f"{match[0]} is no character")
        codes.append((code, plain is None))
    return codes


def _wrong(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"the GBNF grammar does not compile: {message}", param="grammar")
