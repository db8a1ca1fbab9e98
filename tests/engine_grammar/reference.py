"""A reference matcher for grammars over characters, by sets of positions, and the same grammars written as GBNF.

It is exhaustive: ``ends`` finds every position where a match may end, and ``is_begun`` decides whether the rest of the
text begins some match. Both are the least fixed points of the grammar's rules.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Node:
    """kind: literal (text), one_of, none_of (text: the characters), any, rule (text: its name), sequence, choice, times."""

    kind: str
    text: str = ""
    parts: tuple["Node", ...] = ()
    fewest: int = 0
    most: int | None = None


@dataclass
class Reference:
    """Matches one text against one grammar."""

    rules: Mapping[str, Node]
    text: str
    _ends: dict[tuple[Node, int], frozenset[int]] = field(default_factory=dict)
    _begun: dict[tuple[Node, int], bool] = field(default_factory=dict)
    _live: dict[str, bool] = field(default_factory=dict)

    def matches(self) -> bool:
        """True if the whole text matches ``root``."""
        self._settle()
        return len(self.text) in self.ends(Node("rule", "root"), 0)

    def is_prefix(self) -> bool:
        """True if some text that begins with this one matches ``root``."""
        self._settle()
        return self.is_begun(Node("rule", "root"), 0)

    def is_live(self, node: Node) -> bool:
        """Return True if some text matches."""
        match node.kind:
            case "one_of":
                return bool(node.text)
            case "rule":
                return self._live.get(node.text, False)
            case "sequence":
                return all(self.is_live(part) for part in node.parts)
            case "choice":
                return any(self.is_live(part) for part in node.parts)
            case "times":
                return node.fewest == 0 or self.is_live(node.parts[0])
        return True

    def ends(self, node: Node, start: int) -> frozenset[int]:
        """Return the positions where a match that begins at ``start`` may end."""
        match node.kind:
            case "literal":
                is_there = self.text.startswith(node.text, start)
                return frozenset([start + len(node.text)] if is_there else [])
            case "one_of" | "none_of" | "any":
                return frozenset([start + 1] if start < len(self.text) and self._is_one(node, start) else [])
            case "rule":
                return self._ends.get((node, start), frozenset())
            case "choice":
                return frozenset(end for part in node.parts for end in self.ends(part, start))
            case "sequence":
                found = frozenset([start])
                for part in node.parts:
                    found = frozenset(end for position in found for end in self.ends(part, position))
                return found
        return self._ends_of_times(node, start)

    def is_begun(self, node: Node, start: int) -> bool:
        """Return True if the text from ``start`` on begins some match."""
        if not self.is_live(node):
            return False
        rest = self.text[start:]
        match node.kind:
            case "literal":
                return node.text.startswith(rest)
            case "one_of" | "none_of" | "any":
                return not rest or (len(rest) == 1 and self._is_one(node, start))
            case "rule":
                return self._begun.get((node, start), False)
            case "choice":
                return any(self.is_begun(part, start) for part in node.parts)
            case "sequence":
                return self._is_sequence_begun(node.parts, start)
        return self._is_times_begun(node, start)

    def _is_one(self, node: Node, position: int) -> bool:
        return node.kind == "any" or (self.text[position] in node.text) is (node.kind == "one_of")

    def _ends_of_times(self, node: Node, start: int) -> frozenset[int]:
        (part,), found = node.parts, frozenset([start])
        reached: set[int] = set()
        most = node.most if node.most is not None else node.fewest + len(self.text) + 1
        for count in range(most + 1):
            if count >= node.fewest:
                reached |= found
            found = frozenset(end for position in found for end in self.ends(part, position))
        return frozenset(reached)

    def _is_sequence_begun(self, parts: tuple[Node, ...], start: int) -> bool:
        positions = frozenset([start])
        for part in parts:
            if any(self.is_begun(part, position) for position in positions):
                return True
            positions = frozenset(end for position in positions for end in self.ends(part, position))
        return len(self.text) in positions

    def _is_times_begun(self, node: Node, start: int) -> bool:
        most = node.most if node.most is not None else node.fewest + len(self.text) + 1
        return start == len(self.text) or self._is_sequence_begun(node.parts * most, start)

    def _settle(self) -> None:
        """Apply the rules until nothing changes."""
        is_new = True
        while is_new:
            live = {name: self.is_live(rule) for name, rule in self.rules.items()}
            is_new, self._live = live != self._live, live
        places = [(Node("rule", name), start) for name in self.rules for start in range(len(self.text) + 1)]
        is_new = True
        while is_new:
            ends = {place: self.ends(self.rules[place[0].text], place[1]) for place in places}
            is_new, self._ends = ends != self._ends, ends
        is_new = True
        while is_new:
            begun = {place: self.is_begun(self.rules[place[0].text], place[1]) for place in places}
            is_new, self._begun = begun != self._begun, begun


def written(rules: Mapping[str, Node]) -> str:
    """Write the grammar as GBNF."""
    return "\n".join(f"{name} ::= {_written(node)}" for name, node in rules.items())


def _written(node: Node) -> str:
    match node.kind:
        case "literal":
            return '"' + _escaped(node.text) + '"'
        case "one_of":
            return f"[{_escaped(node.text)}]"
        case "none_of":
            return f"[^{_escaped(node.text)}]"
        case "any":
            return "."
        case "rule":
            return node.text
        case "sequence":
            return "(" + " ".join(map(_written, node.parts)) + ")"
        case "choice":
            return "(" + " | ".join(map(_written, node.parts)) + ")"
    return _written(node.parts[0]) + _times(node)


def _times(node: Node) -> str:
    match node.fewest, node.most:
        case (0, None):
            return "*"
        case (1, None):
            return "+"
        case (0, 1):
            return "?"
        case (fewest, None):
            return f"{{{fewest},}}"
    return f"{{{node.fewest},{node.most}}}" if node.fewest != node.most else f"{{{node.most}}}"


def _escaped(text: str) -> str:
    """Escape each character, with every kind of escape in turn."""
    named = {"\n": "\\n", '"': '\\"', "\\": "\\\\", "]": "\\]", "[": "\\["}
    out = []
    for character in text:
        if character in named:
            out.append(named[character])
        elif character.isascii() and character.isalnum():
            out.append(character)
        else:
            code = ord(character)
            out.append(
                f"\\x{code:02x}" if code < 256 else f"\\u{code:04X}" if code < 2**16 else f"\\U{code:08x}"
            )
    return "".join(out)
