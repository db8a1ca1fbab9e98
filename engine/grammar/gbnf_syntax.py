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
    """What the rule of this name matches."""

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


class _Parser:
    """Reads one grammar from its tokens, one token ahead."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._end = 0
        self._kind = ""
        self._value = ""
        self._start = 0
        self._advance()

    def rules(self) -> dict[str, Group]:
        rules: dict[str, Group] = {}
        while self._kind != "end":
            if self._kind != "rule":
                raise self._unexpected("a rule, as in name ::= ...")
            name = re.split(r"[\s#:]", self._value, maxsplit=1)[0]
            if name in rules:
                raise self._error(f"the rule {name[:40]!r} is defined twice")
            self._advance()
            rules[name] = self._group()
        return rules

    def _group(self) -> Group:
        alternatives = [self._sequence()]
        while (self._kind, self._value) == ("mark", "|"):
            self._advance()
            alternatives.append(self._sequence())
        return Group(tuple(alternatives))

    def _sequence(self) -> tuple[Item, ...]:
        items: list[Item] = []
        while (found := self._item()) is not None:
            while self._kind == "times":
                found = self._repetition(found)
            items.append(found)
        return tuple(items)

    def _item(self) -> Item | None:
        kind = self._kind
        value = self._value
        if kind == "token":
            raise self._error(
                f"the token {value[:40]} cannot be asked for; grammars are over characters here"
            )
        if kind == "mark" and value == "(":
            return self._bracketed()
        readers: dict[str, Callable[[str], Item]] = {
            "name": Reference,
            "literal": self._literal,
            "characters": self._characters,
        }
        if kind == "mark" and value == ".":
            self._advance()
            return ANY
        reader = readers.get(kind)
        if reader is None:
            return None
        item = reader(value)
        self._advance()
        return item

    def _bracketed(self) -> Group:
        self._advance()
        group = self._group()
        if (self._kind, self._value) != ("mark", ")"):
            raise self._unexpected("a closing parenthesis")
        self._advance()
        return group

    def _repetition(self, item: Item) -> Repetition:
        value = self._value
        self._take_times_error(value)
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
        self._advance()
        return Repetition(item, fewest, most)

    def _counts(self, value: str) -> tuple[int, int | None]:
        first, comma, second = re.sub(r"\s", "", value[1:-1]).partition(",")
        fewest = int(first or 0)
        most = fewest if not comma else int(second) if second else None
        if most is not None and most < fewest:
            raise self._error(f"{value[:40]} asks for at most {most} and at least {fewest}")
        return fewest, most

    def _take_times_error(self, value: str) -> None:
        if value.startswith("{") and not re.search(r"\d", value):
            raise self._error(f"{value[:40]} has no number")
        if any(int(number[:12]) > _MAX_REPETITIONS for number in re.findall(r"\d+", value)):
            raise self._error(f"{value[:40]} asks for more than {_MAX_REPETITIONS} repetitions")

    def _literal(self, value: str) -> Item:
        characters = tuple(Characters(((code, code),)) for code, _ in self._codes(value))
        return characters[0] if len(characters) == 1 else Group((characters,))

    def _characters(self, value: str) -> Item:
        is_negated = value.startswith("^")
        codes = self._codes(value[is_negated:])
        ranges = []
        position = 0
        while position < len(codes):
            first = last = codes[position][0]
            if position + 2 < len(codes) and codes[position + 1] == (ord("-"), False):
                last = codes[position + 2][0]
                position += 2
            if last < first:
                raise self._error(f"the range {chr(first)!r} to {chr(last)!r} is empty")
            ranges.append((first, last))
            position += 1
        return Characters(tuple(ranges), is_negated)

    def _codes(self, value: str) -> list[tuple[int, bool]]:
        """Return the code points that are written, and whether each is written as an escape."""
        codes = []
        for match in _ESCAPE.finditer(value):
            *hexadecimal, named, plain = match.groups()
            digits = next(filter(None, hexadecimal), "")
            if named and named not in _NAMED_ESCAPES:
                raise self._error(f"\\{named} is no escape of GBNF")
            code = int(digits, 16) if digits else ord(_NAMED_ESCAPES[named] if named else plain)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise self._error(f"{match[0]} is no character")
            codes.append((code, plain is None))
        return codes

    def _advance(self) -> None:
        while True:
            self._start = self._end
            if self._end == len(self._text):
                self._kind = "end"
                self._value = ""
                return
            match = _TOKENS.match(self._text, self._end)
            if match is None:
                self._kind = "other"
                self._value = self._text[self._end]
                raise self._unexpected("a rule, text in quotes, a class or an operator")
            self._end = match.end()
            self._kind = match.lastgroup or ""
            if self._kind != "space":
                self._value = match[self._kind]
                return

    def _unexpected(self, wanted: str) -> InvalidRequestError:
        found = repr(self._value[:20]) if self._kind != "end" else "the end"
        return self._error(f"there is {found} where {wanted} should be")

    def _error(self, message: str) -> InvalidRequestError:
        line = self._text.count("\n", 0, self._start) + 1
        return _wrong(f"line {line}: {message}")


def _wrong(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"the GBNF grammar does not compile: {message}", param="grammar")
