"""The format of a model's calls and reasoning, chosen by settings or found in its chat template.

The parsers of an answer work in sequence: the reasoning is separated first, and the rest is searched for calls.
"""

import re
from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

from msgspec import structs

from text.chat import Chat
from text.parsing.call_formats import (
    ErnieParser,
    GraniteParser,
    HermesParser,
    HunyuanParser,
    Llama3Parser,
    MistralParser,
    NemotronParser,
    PhiParser,
)
from text.parsing.forced import ForcedCallsParser
from text.parsing.harmony import HarmonyParser
from text.parsing.parser import (
    CallArguments,
    CallBegin,
    Content,
    Piece,
    Reasoning,
    TextParser,
    ToolParser,
    append,
)
from text.parsing.pythonic import GemmaParser, PythonicParser
from text.parsing.reader import Steps
from text.parsing.tagged import (
    DeepseekParser,
    DsmlParser,
    GlmParser,
    Hy3Parser,
    Hy3PreviewParser,
    KimiParser,
    MinimaxParser,
    QwenParser,
    SeedParser,
)

ToolParserName = Literal[
    "auto",
    "none",
    "deepseek",
    "dsml",
    "ernie",
    "gemma",
    "glm",
    "granite",
    "harmony",
    "hermes",
    "hunyuan",
    "hy3",
    "hy3preview",
    "kimi",
    "llama3",
    "minimax",
    "mistral",
    "nemotron",
    "phi4",
    "pythonic",
    "qwen",
    "seed_oss",
]
ReasoningParserName = Literal["auto", "none", "think"]
TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "deepseek": DeepseekParser,
    "dsml": DsmlParser,
    "ernie": ErnieParser,
    "gemma": GemmaParser,
    "glm": GlmParser,
    "granite": GraniteParser,
    "harmony": HarmonyParser,
    "hermes": HermesParser,
    "hunyuan": HunyuanParser,
    "hy3": Hy3Parser,
    "hy3preview": Hy3PreviewParser,
    "kimi": KimiParser,
    "llama3": Llama3Parser,
    "minimax": MinimaxParser,
    "mistral": MistralParser,
    "nemotron": NemotronParser,
    "phi4": PhiParser,
    "pythonic": PythonicParser,
    "qwen": QwenParser,
    "seed_oss": SeedParser,
}
# (parser, texts that a template contains if the model writes calls in that parser's format). The first match is used, so
# a format whose signs contain those of another one stands before it.
_SIGNS = (
    ("harmony", ("<|start|>", "<|channel|>", "<|message|>")),
    ("kimi", ("<|tool_calls_section_begin|>",)),
    ("dsml", ("｜DSML｜",)),
    ("deepseek", ("<｜tool▁calls▁begin｜>",)),
    ("minimax", ("<minimax:tool_call>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("gemma", ("<|tool_call>", "<tool_call|>")),
    ("phi4", ("<|tool|>", "<|/tool|>")),
    ("phi4", ("functools[",)),
    ("granite", ("<|tool_call|>",)),
    ("hy3", ("<tool_sep:opensource>",)),
    ("hy3preview", ("<tool_sep>", "<arg_key>")),
    ("nemotron", ("<TOOLCALL>",)),
    # MiniMax's next version nests tags in a form of its own.
    ("none", ("<tool_call>", "]<]minimax[>[")),
    ("hunyuan", ("<tool_calls>[",)),
    ("pythonic", ("<|tool_call_start|>",)),
    ("pythonic", ("<|tool_list_start|>",)),
    ("pythonic", ("<|im_start|>", "List of tools: [")),
    ("pythonic", ("<function_calls>",)),
    ("pythonic", ("<|python_start|>",)),
    ("pythonic", ("[func_name1(",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("qwen", ("<tool_call>", "<function=", "<parameter=")),
    ("llama3", ("<|python_tag|>",)),
    ("llama3", ('{"name": function name, "parameters":',)),
    ("glm", ("<tool_call>", "<arg_key>")),
    ("ernie", ("<tool_call>", "<response>", "think_mode")),
    ("hermes", ("<tool_call>", "arguments")),
)
# Tags of families that do not have those of the setting. Gemma writes a channel's name behind its first token.
_REASONING_TAGS = (
    ("<seed:think>", "</seed:think>"),
    ("<think:opensource>", "</think:opensource>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),
)


# Hy3's template writes its tags with a suffix: '<think{}>'.format(…).
_SUFFIX = re.compile(r"set \w+ = '(:\w+)'")


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

    max_calls: further calls are dropped. allowed: calls of other functions are dropped; None: none are. separates_reasoning:
    reasoning that ``calls`` finds is reasoning; otherwise it is content.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        calls: ToolParser | None = None,
        *,
        max_calls: int | None = None,
        allowed: Set[str] | None = None,
        separates_reasoning: bool = True,
    ) -> None:
        self._separates_reasoning = separates_reasoning
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
            *(map(_token_of, self._reasoning.tags) if self._reasoning else ()),
            *(self._calls.tags if self._calls else ()),
        )

    @property
    def is_plain(self) -> bool:
        """True if there are no parsers, so that all text is content."""
        return self._reasoning is None and self._calls is None

    @property
    def is_reasoning(self) -> bool:
        """True while the text is in the reasoning."""
        if self._calls is not None and self._calls.is_reasoning:
            return self._separates_reasoning
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
                is_text = isinstance(piece, Reasoning) and not self._separates_reasoning
                append(kept, Content(piece.text) if is_text else piece)
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
        if suffix := _SUFFIX.search(template):
            template = template.replace("{}", suffix[1])
        name: str = choice.tool_parser
        if name == "auto":
            name = next((one for one, signs in _SIGNS if all(sign in template for sign in signs)), "none")
        parser = TOOL_PARSERS.get(name)
        found = parser.reasoning_tags if parser else None
        for tags in (choice.reasoning_tags, *_REASONING_TAGS):
            if found is None and all(_token_of(tag) in template for tag in tags):
                found = tags
        match choice.reasoning_parser:
            case "none":
                return cls(parser)
            case "think":
                return cls(parser, found or choice.reasoning_tags)
            case _:
                return cls(parser, found)

    def parser(self, chat: Chat, prompt_end: str, *, has_grammar: bool = False) -> AnswerParser:
        """Return a parser for one answer. prompt_end: the end of the prompt, which may have opened the reasoning.

        has_grammar: a grammar constrains the answer from its first token on, so it has no reasoning, and no calls except
        those of the grammar.
        """
        parser = self.tool_parser
        if chat.tool_choice.is_forced:
            forced = ForcedCallsParser(
                chat.tool_choice.name, parser or ToolParser, num_earlier_calls=_num_calls(chat)
            )
            return AnswerParser(calls=forced)
        if has_grammar:
            return AnswerParser()
        calls = parser(chat.tools) if parser and (chat.tools or parser.is_envelope) else None
        reasoning = None
        if self.reasoning_tags and not (parser and parser.reasoning_tags):
            opening, closing = self.reasoning_tags
            # Some templates end the prompt within the reasoning, so that the answer has only the closing tag.
            is_open = prompt_end.rstrip().endswith(opening)
            reasoning = ReasoningParser(opening, closing, is_reasoning=is_open)
        return AnswerParser(
            reasoning,
            calls,
            max_calls=None if chat.parallel_tool_calls else 1,
            allowed=chat.tool_choice.allowed,
            separates_reasoning=self.reasoning_tags is not None,
        )


def _token_of(tag: str) -> str:
    """Return the part of a tag that may be a special token: up to its bracket."""
    return tag[: tag.find(">") + 1] or tag


def _num_calls(chat: Chat) -> int:
    """Return the number of calls in the conversation."""
    return sum(len(message.get("tool_calls") or ()) for message in chat.messages)
