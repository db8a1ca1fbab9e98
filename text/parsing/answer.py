"""The parsers of one answer in sequence: text that is not reasoning is searched for calls."""

from collections.abc import Set

from msgspec import structs

from text.parsing.parser import ToolParser
from text.parsing.pieces import CallArguments, CallBegin, Content, Piece
from text.parsing.reasoning import ReasoningParser


class AnswerParser:
    """Parses one answer into pieces; without parsers all of it is content.

    max_calls: further calls are dropped. allowed: calls of other functions are dropped; None: none are.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        calls: ToolParser | None = None,
        *,
        max_calls: int | None = None,
        allowed: Set[str] | None = None,
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._max_calls = max_calls
        self._allowed = allowed
        self._indexes: dict[int, int] = {}
        """Index of a call that is kept → its index among those."""

    @property
    def tags(self) -> tuple[str, ...]:
        """Markup that must be in the text even if it consists of special tokens."""
        return (
            *(self._reasoning.tags if self._reasoning else ()),
            *(self._calls.tags if self._calls else ()),
        )

    @property
    def is_plain(self) -> bool:
        """True if there are no parsers, so that all text is content."""
        return self._reasoning is None and self._calls is None

    @property
    def is_reasoning(self) -> bool:
        """True while the text is in the reasoning."""
        return self._reasoning is not None and self._reasoning.is_reasoning

    def push(self, text: str) -> list[Piece]:
        """Add text and return the pieces that are certain now."""
        pieces: list[Piece] = self._reasoning.push(text) if self._reasoning else [Content(text)]
        return self._with_calls(pieces)

    def flush(self) -> list[Piece]:
        """Return the pieces that were held back, at the end of the text; call once."""
        pieces = self._with_calls(self._reasoning.flush()) if self._reasoning else []
        return [*pieces, *self._kept(self._calls.flush() if self._calls else [])]

    def _with_calls(self, pieces: list[Piece]) -> list[Piece]:
        if self._calls is None:
            return pieces
        out: list[Piece] = []
        for piece in pieces:
            out += self._kept(self._calls.push(piece.text)) if isinstance(piece, Content) else [piece]
        return out

    def _kept(self, pieces: list[Piece]) -> list[Piece]:
        """Return the pieces without those of dropped calls, the others numbered anew."""
        kept: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, CallBegin) and self._keeps(piece.name):
                self._indexes[piece.index] = len(self._indexes)
            if not isinstance(piece, CallBegin | CallArguments):
                kept.append(piece)
            elif (index := self._indexes.get(piece.index)) is not None:
                kept.append(piece if index == piece.index else structs.replace(piece, index=index))
        return kept

    def _keeps(self, name: str) -> bool:
        is_within = self._max_calls is None or len(self._indexes) < self._max_calls
        return is_within and (self._allowed is None or name in self._allowed)
