"""The format of a model's calls and reasoning, chosen by settings or found in its chat template.

The parsers of an answer work in sequence: the reasoning is separated first, and the rest is searched for calls.
"""

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

from msgspec import structs

from text.chat import Chat
from text.parsing.call_formats import HermesParser, Llama3Parser, MistralParser, QwenParser
from text.parsing.forced import ForcedCallsParser
from text.parsing.parser import CallArguments, CallBegin, Content, Piece, Reasoning, TextParser, ToolParser
from text.parsing.reader import Steps

ToolParserName = Literal["auto", "none", "hermes", "llama3", "mistral", "qwen"]
ReasoningParserName = Literal["auto", "none", "think"]
TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
    "qwen": QwenParser,
}
# (parser, texts that a template contains if the model writes calls in that parser's format). The first match is used, so
# a format whose signs contain those of another one stands before it.
_SIGNS = (
    ("mistral", ("[TOOL_CALLS]",)),
    ("qwen", ("<tool_call>", "<function=", "<parameter=")),
    ("llama3", ("<|python_tag|>",)),
    ("llama3", ('{"name": function name, "parameters":',)),
    ("none", ("<tool_call>", "<arg_key>")),
    ("hermes", ("<tool_call>", "arguments")),
)


class ReasoningParser(TextParser):
    """Separates the reasoning at an answer's beginning from the answer. White space beside the tags is dropped.

    tags: (opening, closing). is_reasoning: True while the text is in the reasoning; initially, if the prompt has opened it.
    """

    def __init__(self, opening: str, closing: str, *, is_reasoning: bool = False) -> None:
        super().__init__()
        self.tags = (opening, closing)
        self.is_reasoning = is_reasoning

    def _read(self) -> Steps[None]:
        reader = self._reader
        reader.hold()
        yield from reader.skip_space()
        is_opened = yield from reader.skip(self.tags[0])
        if is_opened or self.is_reasoning:
            reader.release()
            self.is_reasoning = True
            yield from reader.skip_space()
            yield from reader.copy_until([self.tags[1]], lambda text: self._emit(Reasoning(text)))
            yield from reader.skip_space()
            yield from reader.skip(self.tags[1])
            self.is_reasoning = False
            yield from reader.skip_space()
        else:
            self._content(reader.release())
        yield from reader.copy_rest(self._content)


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
        # Index of a call that is kept → its index among those: clients expect indexes without gaps.
        self._indexes: dict[int, int] = {}

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
            if isinstance(piece, CallBegin):
                has_room = self._max_calls is None or len(self._indexes) < self._max_calls
                if has_room and (self._allowed is None or piece.name in self._allowed):
                    self._indexes[piece.index] = len(self._indexes)
            if not isinstance(piece, CallBegin | CallArguments):
                kept.append(piece)
            elif (index := self._indexes.get(piece.index)) is not None:
                kept.append(piece if index == piece.index else structs.replace(piece, index=index))
        return kept


@dataclass(frozen=True)
class ParserChoice:
    """The settings of the answer format. reasoning_tags: (opening, closing). special_tokens_in_messages: see ModelCard."""

    tool_parser: ToolParserName = "auto"
    reasoning_parser: ReasoningParserName = "auto"
    reasoning_tags: tuple[str, str] = ("<think>", "</think>")
    special_tokens_in_messages: bool = False


@dataclass(frozen=True)
class AnswerFormat:
    """The answer format of one model. None: no known format of calls, or of reasoning."""

    tool_parser: type[ToolParser] | None = None
    reasoning_tags: tuple[str, str] | None = None

    @classmethod
    def chosen(cls, choice: ParserChoice, template: str) -> "AnswerFormat":
        """Return the format by the settings, or by the template's text for auto."""
        name: str = choice.tool_parser
        if name == "auto":
            name = next((one for one, signs in _SIGNS if all(sign in template for sign in signs)), "none")
        is_thinking = all(tag in template for tag in choice.reasoning_tags)
        if choice.reasoning_parser != "auto":
            is_thinking = choice.reasoning_parser == "think"
        return cls(TOOL_PARSERS.get(name), choice.reasoning_tags if is_thinking else None)

    def parser(self, chat: Chat, prompt_end: str, *, has_grammar: bool = False) -> AnswerParser:
        """Return a parser for one answer. prompt_end: the end of the prompt, which may have opened the reasoning.

        has_grammar: a grammar constrains the answer from its first token on, so it has no reasoning, and no calls except
        those of the grammar.
        """
        if chat.tool_choice.is_forced:
            return AnswerParser(
                calls=ForcedCallsParser(chat.tool_choice.name, self.tool_parser or ToolParser)
            )
        if has_grammar:
            return AnswerParser()
        calls = self.tool_parser(chat.tools) if self.tool_parser and chat.tools else None
        reasoning = None
        if self.reasoning_tags:
            opening, closing = self.reasoning_tags
            # Some templates end the prompt within the reasoning, so that the answer has only the closing tag.
            is_open = prompt_end.rstrip().endswith(opening)
            reasoning = ReasoningParser(opening, closing, is_reasoning=is_open)
        limit = None if chat.parallel_tool_calls else 1
        return AnswerParser(reasoning, calls, max_calls=limit, allowed=chat.tool_choice.allowed)
