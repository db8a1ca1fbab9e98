"""The prompts of ``LLM.generate`` and ``LLM.chat``, in vLLM's formats."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from contract.errors import InvalidRequestError, KvbatonError
from text.chat import Chat, parse_messages
from text.tools import Tool, parse_tools


class TextPrompt(TypedDict, total=False):
    """A text prompt. cache_salt: prompts with different salts never share cached KV."""

    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt of token ids. cache_salt: as in ``TextPrompt``."""

    prompt_token_ids: Sequence[int]
    cache_salt: str


PromptType = str | TextPrompt | TokensPrompt | list[int]
"""One prompt: text, token ids, or an object with either."""


@dataclass(frozen=True)
class Prompt:
    """One checked prompt. others: further fields of the request."""

    content: str | tuple[int, ...] | Chat
    others: Mapping[str, Any] = field(default_factory=dict)


def parse_prompts(prompts: Any) -> list[Prompt]:
    """Check one prompt or a sequence of prompts. Raises InvalidRequestError that names the prompt at fault."""
    if _is_one(prompts):
        return [_parse(prompts, "prompts")]
    if not isinstance(prompts, list | tuple):
        raise InvalidRequestError(
            f"prompts is of type {type(prompts).__name__}; it must be a prompt or a list of prompts",
            param="prompts",
        )
    return [_parse(prompt, f"prompts[{index}]") for index, prompt in enumerate(prompts)]


def parse_conversations(messages: Any, tools: Any = None) -> list[Prompt]:
    """Check one conversation or a list. Raises InvalidRequestError that names the message, or the tool, at fault."""
    parsed_tools = parse_tools(tools)
    if isinstance(messages, list | tuple) and messages and isinstance(messages[0], list | tuple):
        chats = [_chat(one, parsed_tools, f"prompt {index}: ") for index, one in enumerate(messages)]
    else:
        chats = [_chat(messages, parsed_tools, "")]
    return [Prompt(chat) for chat in chats]


def named(error: KvbatonError, where: str) -> KvbatonError:
    """Return the error with its place at the beginning of its message."""
    return type(error)(f"{where}{error.message}", param=error.param)


def _is_one(prompts: Any) -> bool:
    return isinstance(prompts, str | dict) or (
        isinstance(prompts, list | tuple) and bool(prompts) and all(type(token) is int for token in prompts)
    )


def _chat(raw: Any, tools: tuple[Tool, ...], where: str) -> Chat:
    try:
        return Chat(messages=parse_messages(list(raw) if isinstance(raw, tuple) else raw), tools=tools)
    except InvalidRequestError as error:
        raise named(error, where) from error


def _parse(raw: Any, where: str) -> Prompt:
    if not isinstance(raw, dict):
        return Prompt(_content(raw, where))
    unknown = raw.keys() - {"prompt", "prompt_token_ids", "cache_salt"}
    given = raw.keys() & {"prompt", "prompt_token_ids"}
    if unknown or len(given) != 1:
        raise InvalidRequestError(
            f"{where} has {', '.join(map(repr, raw)) or 'nothing'}; it must have 'prompt' or 'prompt_token_ids', and may"
            " have 'cache_salt'",
            param=where,
        )
    name = given.pop()
    content = _content(raw[name], f"{where}[{name!r}]")
    if isinstance(content, str) != (name == "prompt"):
        raise InvalidRequestError(
            f"{where}[{name!r}] is {raw[name]!r:.60}; it must be {'a text' if name == 'prompt' else 'token ids'}",
            param=where,
        )
    return Prompt(content, {"cache_salt": raw.get("cache_salt")})


def _content(raw: Any, where: str) -> str | tuple[int, ...]:
    if isinstance(raw, str):
        return raw
    if isinstance(raw, list | tuple) and all(type(token) is int for token in raw):
        return tuple(raw)
    raise InvalidRequestError(
        f"{where} is {raw!r:.60}; it must be a text or a list of token ids", param=where
    )
