"""What an answer's text consists of."""

from dataclasses import dataclass, replace
from typing import TypeVar


@dataclass(frozen=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text that the model thought before it answered."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A tool call begins. index: 0 for the answer's first call."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the JSON text of a call's arguments; the fragments of a whole call are one JSON object."""

    index: int
    text: str


CallPiece = CallBegin | CallArguments
Piece = Content | Reasoning | CallPiece
P = TypeVar("P", bound=Piece)


def append(pieces: list[P], piece: P) -> None:
    """Add a piece at the end; text that goes on is joined, empty text is left out."""
    if isinstance(piece, CallBegin):
        pieces.append(piece)
    elif piece.text:
        last = pieces[-1] if pieces else None
        if last is not None and not isinstance(last, CallBegin) and replace(last, text=piece.text) == piece:
            pieces[-1] = replace(last, text=last.text + piece.text)
        else:
            pieces.append(piece)
