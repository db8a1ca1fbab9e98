"""Compile GBNF to the library's Lark, with single characters as its only terminals.

The library's lexer takes the longest match, so a terminal that could continue blocks the rules behind it (``[a-z.]+`` before
``"."`` never ends). In UTF-8 no character is a prefix of another. With characters as terminals the lexer therefore decides
nothing, and the parser follows every alternative (Earley).
"""

from collections.abc import Iterable

from contract.errors import InvalidRequestError
from engine.grammar.gbnf_syntax import Characters, Group, Item, Reference, Repetition, parse_gbnf

_LAST_CHARACTER = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)


def gbnf_to_lark(text: str) -> str:
    """Return the same grammar in the library's syntax. Raises InvalidRequestError about ``grammar``."""
    rules = parse_gbnf(text)
    if "root" not in rules:
        raise _wrong("there is no rule root")
    for group in rules.values():
        for name in _names_in(group):
            if name not in rules:
                raise _wrong(f"the rule {name[:40]!r} is not defined")
    productive = _productive(rules)
    if "root" not in productive:
        raise _wrong("no text matches root")
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
                pattern = _pattern(item)
                return self._terminals.setdefault(pattern, f"C{len(self._terminals)}")
            case Reference():
                return self._name(item.name)
            case Group():
                return self._helper(self._alternatives(item))
            case Repetition():
                return self._repetition(item)

    def _repetition(self, item: Repetition) -> str:
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


def _pattern(characters: Characters) -> str:
    ranges = _allowed_ranges(characters)
    return "[" + "".join(f"\\x{{{first:x}}}-\\x{{{last:x}}}" for first, last in ranges) + "]"


def _wrong(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"the GBNF grammar does not compile: {message}", param="grammar")
