"""GBNF, the grammars of llama.cpp: parsed into rules over characters, and compiled to the library's Lark.

Source: llama.cpp, grammars/README.md. A rule begins where a name is followed by ``::=``; line ends separate nothing else, so
that alternatives may begin a line, as XGrammar allows. References to tokens (``<think>``) are refused by name.

Single characters are the only terminals in Lark. The library's lexer takes the longest match, so a terminal that could
continue blocks the rules behind it (``[a-z.]+`` before ``"."`` never ends). In UTF-8 no character is a prefix of another.
With characters as terminals the lexer therefore decides nothing, and the parser follows every alternative (Earley).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from contract.errors import InvalidRequestError

# Each repetition is possessive: no text makes the search try a second way.
_TOKENS = re.compile(
    r"""(?P<space>(?:\s|\#[^\r\n]*+)++) | (?P<rule>[\w-]++(?:\s|\#[^\r\n]*+)*+::=) | (?P<name>[\w-]++)
    | "(?P<literal>(?:[^"\\]|\\.)*+)" | \[(?P<characters>\^?(?:[^\]\\]|\\.)*+)\]
    | (?P<times>[*+?] | \{\s*\d*\s*(?:,\s*\d*\s*)?\}) | (?P<mark>[().|])
    | (?P<token>!?<[^\s>]*>)""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\(.)|([^\\])", re.DOTALL)
_SIGNS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_MAX_REPETITIONS = 2**31
_LAST_CHARACTER = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)


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

_NAMED_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"} | {itself: itself for itself in '\\"[]-^/'}


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
        return _not_compiled(f"line {line}: {message}")


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
        item: Item
        match kind, value:
            case "mark", "(":
                self._tokens.advance()
                item = self._group()
                if (self._tokens.kind, self._tokens.value) != ("mark", ")"):
                    raise self._tokens.unexpected("a closing parenthesis")
            case "mark", ".":
                item = ANY
            case "name", _:
                item = Reference(value)
            case "literal", _:
                characters = tuple(Characters(((code, code),)) for code, _ in _codes(self._tokens, value))
                item = characters[0] if len(characters) == 1 else Group((characters,))
            case "characters", _:
                item = _characters(self._tokens, value)
            case _:
                return None
        self._tokens.advance()
        return item

    def _repetition(self, item: Item) -> Repetition:
        value = self._tokens.value
        fewest, most = _SIGNS[value] if value in _SIGNS else self._counts(value)
        self._tokens.advance()
        return Repetition(item, fewest, most)

    def _counts(self, value: str) -> tuple[int, int | None]:
        if not re.search(r"\d", value):
            raise self._tokens.error(f"{value[:40]} has no number")
        # The first digits suffice to see that a number is too large; converting a million of them takes long.
        if any(int(number[:12]) > _MAX_REPETITIONS for number in re.findall(r"\d+", value)):
            raise self._tokens.error(f"{value[:40]} asks for more than {_MAX_REPETITIONS} repetitions")
        first, comma, second = re.sub(r"\s", "", value[1:-1]).partition(",")
        fewest = int(first or 0)
        most = fewest if not comma else int(second) if second else None
        if most is not None and most < fewest:
            raise self._tokens.error(f"{value[:40]} asks for at most {most} and at least {fewest}")
        return fewest, most


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


def _not_compiled(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"the GBNF grammar does not compile: {message}", param="grammar")


def gbnf_to_lark(text: str) -> str:
    """Return the same grammar in the library's syntax. Raises InvalidRequestError about ``grammar``."""
    try:
        rules = _Parser(text).rules()
    except RecursionError as error:
        raise _not_compiled("its groups are nested too deep") from error
    if "root" not in rules:
        raise _not_compiled("there is no rule root")
    for group in rules.values():
        for name in _names_in(group):
            if name not in rules:
                raise _not_compiled(f"the rule {name[:40]!r} is not defined")
    productive = _productive(rules)
    if "root" not in productive:
        raise _not_compiled("no text matches root")
    return _Writer(productive).written({name: rules[name] for name in rules if name in productive})


class _Writer:
    """Writes rules under new names and leaves out alternatives that no text matches.

    productive: the names of the rules that some text matches.
    """

    def __init__(self, productive: set[str]) -> None:
        self._productive = productive
        self._names: dict[str, str] = {"root": "start"}
        self._terminals: dict[str, str] = {}
        self._lines: list[str] = []
        self._num_helpers = 0

    def written(self, rules: dict[str, Group]) -> str:
        for name, group in rules.items():
            self._lines.append(f"{self._name(name)}: {self._alternatives(group)}")
        terminals = [f"{name}: /{pattern}/" for pattern, name in self._terminals.items()]
        return "%llguidance {}\n" + "\n".join([*self._lines, *terminals]) + "\n"

    def _name(self, rule: str) -> str:
        return self._names.setdefault(rule, f"r{len(self._names)}")

    def _alternatives(self, group: Group) -> str:
        possible = [one for one in group.alternatives if _is_productive_sequence(one, self._productive)]
        return " | ".join(" ".join(map(self._item, one)) or '""' for one in dict.fromkeys(possible))

    def _item(self, item: Item) -> str:
        match item:
            case Characters():
                ranges = "".join(f"\\x{{{first:x}}}-\\x{{{last:x}}}" for first, last in _allowed_ranges(item))
                pattern = f"[{ranges}]"
                return self._terminals.setdefault(pattern, f"C{len(self._terminals)}")
            case Reference():
                return self._name(item.name)
            case Group():
                return self._helper(self._alternatives(item))
            case Repetition():
                return self._repetition(item)

    def _repetition(self, item: Repetition) -> str:
        # No text matches the item, and the repetition is productive: it may be empty, and is.
        if not _is_productive(item.item, self._productive):
            return self._helper('""')
        inner = self._item(item.item)
        match item.fewest, item.most:
            case (_, 0):
                return self._helper('""')
            case (0, None):
                return self._helper(f"{inner}*")
            case (fewest, None):
                return self._helper(f"{inner}{{{fewest},}}")
            case (fewest, most):
                return self._helper(f"{inner}{{{fewest},{most}}}")

    def _helper(self, alternatives: str) -> str:
        name = f"h{self._num_helpers}"
        self._num_helpers += 1
        self._lines.append(f"{name}: {alternatives}")
        return name


def _names_in(group: Group) -> Iterable[str]:
    waiting: list[Item] = [group]
    while waiting:
        match waiting.pop():
            case Reference(name):
                yield name
            case Repetition(item=item):
                waiting.append(item)
            case Group(alternatives):
                waiting += [item for sequence in alternatives for item in sequence]


def _productive(rules: dict[str, Group]) -> set[str]:
    """Return the names of the rules that some text matches. A rule is checked again when a rule that it names was found."""
    naming: dict[str, list[str]] = {name: [] for name in rules}
    for name, group in rules.items():
        for named in set(_names_in(group)):
            naming[named].append(name)
    found: set[str] = set()
    waiting = set(rules)
    while waiting:
        new = {name for name in waiting if _is_productive(rules[name], found)}
        found |= new
        waiting = {other for name in new for other in naming[name]} - found
    return found


def _is_productive(item: Item, productive: set[str]) -> bool:
    match item:
        case Characters():
            return bool(_allowed_ranges(item))
        case Reference():
            return item.name in productive
        case Repetition():
            return item.fewest == 0 or _is_productive(item.item, productive)
        case Group():
            return any(_is_productive_sequence(one, productive) for one in item.alternatives)


def _is_productive_sequence(sequence: tuple[Item, ...], productive: set[str]) -> bool:
    return all(_is_productive(item, productive) for item in sequence)


def _allowed_ranges(characters: Characters) -> list[tuple[int, int]]:
    """Return the ranges in order, none of them negated and without surrogates (which are no characters)."""
    ranges = sorted((*characters.ranges, _SURROGATES)) if characters.is_negated else sorted(characters.ranges)
    if not characters.is_negated:
        pieces = [(first, min(last, _SURROGATES[0] - 1)) for first, last in ranges]
        pieces += [(max(first, _SURROGATES[1] + 1), last) for first, last in ranges]
        return sorted((first, last) for first, last in pieces if first <= last)
    out = []
    start = 0
    for first, last in ranges:
        if start < first:
            out.append((start, first - 1))
        start = max(start, last + 1)
    return [*out, (start, _LAST_CHARACTER)] if start <= _LAST_CHARACTER else out
