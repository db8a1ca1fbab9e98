"""The pieces of an answer."""

from typing import TypeVar

import msgspec
from msgspec import structs


class Content(msgspec.Struct, frozen=True):
    """Text of the answer itself."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Text of the model's reasoning before the answer."""

    text: str


class CallBegin(msgspec.Struct, frozen=True):
    """A tool call begins. index: 0 for the answer's first call."""

    index: int
    call_id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
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
        if (
            last is not None
            and not isinstance(last, CallBegin)
            and structs.replace(last, text=piece.text) == piece
        ):
            pieces[-1] = structs.replace(last, text=last.text + piece.text)
        else:
            pieces.append(piece)
