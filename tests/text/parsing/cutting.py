"""Runs a text through a parser whole, cut at every place, and by characters, and checks that the results are equal."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from text.parsing.parser import CallArguments, CallBegin, Content, Piece, Reasoning
from text.tools import Tool


class Parser(Protocol):
    def push(self, text: str) -> list[Piece]: ...

    def flush(self) -> list[Piece]: ...


@dataclass
class Parsed:
    """The result of a text. calls: (name, text of the arguments)."""

    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    reasoning: str = ""


def tool(name: str, **parameters: Any) -> Tool:
    """A function with these parameters (their schemas)."""
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": parameters}},
    }


def collected(pieces: Iterable[Piece]) -> Parsed:
    """Join the pieces; a fragment must belong to an open call, and calls must be numbered from 0."""
    out = Parsed()
    ids = set()
    for piece in pieces:
        match piece:
            case Content(text):
                assert text
                out.content += text
            case Reasoning(text):
                assert text
                out.reasoning += text
            case CallBegin(index, call_id, name):
                assert index == len(out.calls)
                ids.add(call_id)
                out.calls.append((name, ""))
            case CallArguments(index, text):
                assert text
                name, before = out.calls[index]
                out.calls[index] = (name, before + text)
    assert len(ids) == len(out.calls)
    return out


def parse(parser: Parser, *texts: str) -> Parsed:
    """Parse a text that arrives in these pieces."""
    pieces = [piece for text in texts for piece in parser.push(text)]
    return collected([*pieces, *parser.flush()])


def assert_parses(new_parser: Callable[[], Parser], text: str, expected: Parsed) -> None:
    """Parse the text with all kinds of cuts, and return the common result."""
    assert parse(new_parser(), text) == expected
    assert parse(new_parser(), *text) == expected, "character by character"
    for cut in range(len(text) + 1):
        assert parse(new_parser(), text[:cut], text[cut:]) == expected, f"cut at {cut}: {text[:cut]!r}"
