"""The pieces of an answer, and the base of all parsers."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

import msgspec
from msgspec import structs

from text.parsing.reader import CallObject, Reader, Steps
from text.parsing.tool_schema import Allowed, ToolSchema
from text.tools import Tool


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


class TextParser(ABC):
    """Parses one answer. ``push`` returns the pieces that are certain, ``flush`` the rest at the end."""

    def __init__(self) -> None:
        self._reader = Reader()
        self._pieces: list[Piece] = []
        self._steps = self._read()

    def push(self, text: str) -> list[Piece]:
        """Add text and return the pieces that are certain now."""
        self._reader.add(text)
        next(self._steps, None)
        return self._drain()

    def flush(self) -> list[Piece]:
        """Return the pieces that were held back, at the end of the text; call once."""
        self._reader.is_ended = True
        next(self._steps, None)
        return self._drain()

    @abstractmethod
    def _read(self) -> Steps[None]:
        """Read the whole text and ``_emit`` its pieces."""

    def _emit(self, piece: Piece) -> None:
        append(self._pieces, piece)

    def _content(self, text: str) -> None:
        self._emit(Content(text))

    def _drain(self) -> list[Piece]:
        pieces = self._pieces
        self._pieces = []
        return pieces


class ToolParser(TextParser):
    """Finds calls in an answer. Only the markup of calls and white space beside it are dropped from the text.

    Between two texts one such white space is kept. A call begins with its name: text that turns out not to be a call
    before its name is content; an error after that ends the call, and the following text is content. Arguments are
    copied unchanged, so they are JSON if the model wrote JSON. tools: those offered to the model.
    """

    tags: ClassVar[tuple[str, ...]] = ()
    """Markup that may consist of special tokens; it must be in the text nevertheless."""
    is_envelope: ClassVar[bool] = False
    """True if answers without calls have markup too, so that they are parsed even if no tools are offered."""
    reasoning_tags: ClassVar[tuple[str, str] | None] = None
    """The tags of the reasoning, if this parser separates it itself."""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__()
        self.is_reasoning = False
        """True while the text is in the reasoning; always False for a parser that does not separate it."""
        self._tools = {tool["function"]["name"]: tool for tool in reversed(tools)}
        self._new_call_id: Callable[[str, int], str] = self.new_call_id
        self._num_calls = 0
        self._has_content = False
        self._space = ""
        """White space beside calls, which becomes content if more content follows."""

    def _content(self, text: str) -> None:
        if text:
            space = self._space if self._has_content else ""
            self._has_content = True
            self._space = ""
            super()._content(space + text)

    def _skip_space(self) -> Steps[None]:
        """Read white space beside a call."""
        space = yield from self._reader.skip_space()
        self._space = self._space or space

    def _begin(self, name: str, call_id: str = "") -> None:
        """Begin a call; call_id: the one that the model wrote, if it did."""
        self._reader.release()
        index = self._num_calls
        self._num_calls += 1
        self._emit(CallBegin(index, call_id or self._new_call_id(name, index), name))

    def _arguments(self, text: str) -> None:
        self._emit(CallArguments(self._num_calls - 1, text))

    @staticmethod
    def new_call_id(name: str, index: int) -> str:
        """Return a new id for a call of ``name``, the answer's ``index``-th, that the model's chat template accepts."""
        return f"call_{secrets.token_hex(12)}"

    def _give_back(self) -> None:
        """Emit the text since ``hold`` as content."""
        self._content(self._reader.release())

    def _read_marked(self, markers: Sequence[str], calls: Callable[[str], Steps[None]]) -> Steps[None]:
        """Read content, and ``calls`` after each marker, to the end of the text."""
        reader = self._reader
        while marker := (yield from reader.copy_until(markers, self._content)):
            reader.hold()
            space = yield from reader.skip_space()
            yield from reader.skip(marker)
            yield from calls(marker)
            if reader.is_held:
                self._give_back()
            else:
                self._space = self._space or space
                yield from self._skip_space()

    def _read_object(self, accepts: Callable[[str], bool] = bool) -> Steps[None]:
        """Read ``{"name": …, "arguments": …}``; the call begins if it is one and its name is accepted."""
        yield from CallObject(self._reader, accepts, self._begin, self._arguments).read()

    def _read_list(self) -> Steps[None]:
        """Read such objects, separated by commas, up to the closing bracket of a list that is already open."""
        reader = self._reader
        yield from reader.skip_space()
        yield from self._read_object()
        while not reader.is_held:
            reader.hold()
            yield from reader.skip_space()
            if (yield from reader.skip(",")):
                yield from reader.skip_space()
                yield from self._read_object()
            elif (yield from reader.skip("]")) or not (yield from reader.peek()):
                reader.release()
                return


class SectionParser(ToolParser):
    """Reads calls that stand in sections, with values that are typed by the tools' schemas."""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__(tools)
        self._schemas: dict[str, ToolSchema] = {}

    def _allowed(self, name: str, key: str) -> Allowed:
        """Return the allowed values of a tool's parameter; a schema is read once for all calls."""
        if name not in self._schemas:
            tool = self._tools.get(name)
            self._schemas[name] = ToolSchema(tool["function"].get("parameters") if tool else None)
        return self._schemas[name].parameter(key)

    def _read_section(self, read_call: Callable[[], Steps[None]], between: str, closing: str) -> Steps[None]:
        """Read a call, more behind each ``between``, and the ``closing``, which may be missing.

        read_call: reads a call, or leaves its text held if it is none.
        """
        reader = self._reader
        yield from read_call()
        while not reader.is_held:
            reader.hold()
            yield from reader.skip_space()
            if (yield from reader.skip(closing)) or not (yield from reader.peek()):
                reader.release()
                return
            if not (yield from reader.skip(between)):
                break
            yield from read_call()
        if not reader.held.strip():
            space = reader.release()
            self._space = self._space or space
