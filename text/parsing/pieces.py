"""The pieces of an answer."""

from dataclasses import dataclass, replace
from typing import TypeVar


@dataclass(frozen=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of the model's reasoning before the answer."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A tool call begins. index: 0 for the answer's first call."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A fragment of the JSON text of a call's arguments; all fragments of a call form one JSON object."""

    index: int
    text: str


CallPiece = CallBegin | CallArguments
Piece = Content | Reasoning | CallPiece
P = TypeVar("P", bound=Piece)


def append(pieces: list[P], piece: P) -> None:
    """Append a piece; text of the same kind is joined with the last one, empty text is dropped."""
    if isinstance(piece, CallBegin):
        pieces.append(piece)
    elif piece.text:
        last = pieces[-1] if pieces else None
        if last is not None and not isinstance(last, CallBegin) and replace(last, text=piece.text) == piece:
            pieces[-1] = replace(last, text=last.text + piece.text)
        else:
            pieces.append(piece)
