"""How a model writes what is no plain text: chosen by settings, or found in the text of its chat template."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from contract.errors import SettingError
from text.parsing.answer import AnswerParser
from text.parsing.hermes import HermesParser
from text.parsing.llama3 import Llama3Parser
from text.parsing.mistral import MistralParser
from text.parsing.parser import ToolParser
from text.parsing.qwen import QwenParser
from text.parsing.reasoning import ReasoningParser
from text.tools import Tool

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
"""(parser, what a template says all of, if the model writes calls as that parser reads them), the first that fits."""


@dataclass(frozen=True)
class ParserChoice:
    """What the settings say. reasoning_tags: the opening and the closing one, separated by a space."""

    tool_parser: ToolParserName = "auto"
    reasoning_parser: ReasoningParserName = "auto"
    reasoning_tags: str = "<think> </think>"

    def check(self) -> None:
        """Raise SettingError for tags that cannot be told apart."""
        tags = self.reasoning_tags.split()
        if len(tags) != 2 or tags[0] == tags[1]:
            raise SettingError(
                f"reasoning_tags is {self.reasoning_tags!r}; it must be two different tags, separated by a space",
                param="reasoning_tags",
            )


@dataclass(frozen=True)
class AnswerFormat:
    """One model's way. None: it writes no calls, or no reasoning, that anybody here could read."""

    tool_parser: type[ToolParser] | None = None
    reasoning_tags: tuple[str, str] | None = None

    @classmethod
    def chosen(cls, choice: ParserChoice, template: str) -> "AnswerFormat":
        """By the settings, and the template's text where they say auto. Raises SettingError."""
        choice.check()
        opening, closing = choice.reasoning_tags.split()
        name = _found(template) if choice.tool_parser == "auto" else choice.tool_parser
        is_thinking = opening in template and closing in template
        if choice.reasoning_parser != "auto":
            is_thinking = choice.reasoning_parser == "think"
        return cls(TOOL_PARSERS.get(name), (opening, closing) if is_thinking else None)

    @property
    def tags(self) -> tuple[str, ...]:
        """Markup that the parsers must see, also where it is special tokens."""
        return (*(self.reasoning_tags or ()), *(self.tool_parser.tags if self.tool_parser else ()))

    def parser(self, prompt_end: str, tools: Sequence[Tool], *, parallel: bool) -> AnswerParser:
        """A parser for one answer.

        prompt_end: how the prompt ends; it may have opened the reasoning. tools: what the model may call; if none, calls
        are not looked for. parallel: it may call more than once.
        """
        calls = self.tool_parser(tools) if self.tool_parser and tools else None
        reasoning = None
        if self.reasoning_tags:
            opening, closing = self.reasoning_tags
            is_open = prompt_end.rstrip().endswith(opening)
            reasoning = ReasoningParser(opening, closing, is_reasoning=is_open)
        return AnswerParser(reasoning, calls, max_calls=None if parallel else 1)


def _found(template: str) -> str:
    return next((name for name, signs in _SIGNS if all(sign in template for sign in signs)), "none")
