"""The format of a model's calls and reasoning, chosen by settings or found in its chat template."""

from dataclasses import dataclass
from typing import Literal

from text.chat import Chat
from text.parsing.answer import AnswerParser
from text.parsing.forced import ForcedCallsParser
from text.parsing.hermes import HermesParser
from text.parsing.llama3 import Llama3Parser
from text.parsing.mistral import MistralParser
from text.parsing.parser import ToolParser
from text.parsing.qwen import QwenParser
from text.parsing.reasoning import ReasoningParser

ToolParserName = Literal["auto", "none", "hermes", "llama3", "mistral", "qwen"]
ReasoningParserName = Literal["auto", "none", "think"]
TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
    "qwen": QwenParser,
}
_SIGNS = (
    ("mistral", ("[TOOL_CALLS]",)),
    ("qwen", ("<tool_call>", "<function=", "<parameter=")),
    ("llama3", ("<|python_tag|>",)),
    ("llama3", ('{"name": function name, "parameters":',)),
    ("none", ("<tool_call>", "<arg_key>")),
    ("hermes", ("<tool_call>", "arguments")),
)
"""(parser, texts that a template contains if the model writes calls in that parser's format); the first match is used."""


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
        name = _found(template) if choice.tool_parser == "auto" else choice.tool_parser
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
            is_open = prompt_end.rstrip().endswith(opening)
            reasoning = ReasoningParser(opening, closing, is_reasoning=is_open)
        limit = None if chat.parallel_tool_calls else 1
        return AnswerParser(reasoning, calls, max_calls=limit, allowed=chat.tool_choice.allowed)


def _found(template: str) -> str:
    return next((name for name, signs in _SIGNS if all(sign in template for sign in signs)), "none")
