"""Harmony, the format of gpt-oss: an answer is a sequence of messages, each with a header and a channel.

``<|channel|>analysis<|message|>REASONING<|end|>``
``<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>``
``<|start|>assistant<|channel|>final<|message|>ANSWER<|return|>``

The prompt ends with ``<|start|>assistant``. The recipient may also precede the channel. The end of the answer, or the header
of another message, ends a message as well.
"""

import re
from collections.abc import Sequence

from text.parsing.parser import Reasoning, ToolParser
from text.parsing.reader import Steps
from text.tools import Tool

_START = "<|start|>"
_CHANNEL = "<|channel|>"
_MESSAGE = "<|message|>"
_CONSTRAIN = "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_BODY_ENDS = (*_ENDS, _START, _CHANNEL)
_WORD = re.compile(r"[\w.:/-]+")
_FUNCTIONS = "functions."
_REASONING = "analysis"


class HarmonyParser(ToolParser):
    """Separates reasoning, calls and the answer by the channels of an answer's messages."""

    tags = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)
    is_envelope = True
    reasoning_tags = (f"{_CHANNEL}{_REASONING}{_MESSAGE}", _ENDS[0])

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__(tools)
        self._has_reasoning = False

    def _read(self) -> Steps[None]:
        reader = self._reader
        found: str | None = ""
        while found is not None:
            reader.hold()
            header = yield from self._read_header()
            if header is None:
                self._give_back()
                found = yield from reader.copy_until([_START, _CHANNEL], self._content, trim="")
            else:
                reader.release()
                found = yield from self._read_message(*header)

    def _read_header(self) -> Steps[tuple[str, str] | None]:
        """Read a message's header; return its channel and recipient, or None if there is no header."""
        reader = self._reader
        yield from reader.skip_space()
        if (yield from reader.skip(_START)):
            yield from reader.read_all(_WORD)
        else:
            yield from reader.skip("assistant")
        recipient = yield from self._read_recipient()
        if not (yield from reader.skip(_CHANNEL)):
            return None
        yield from reader.skip_space()
        channel = yield from reader.read_all(_WORD)
        recipient = (yield from self._read_recipient()) or recipient
        yield from reader.skip(_CONSTRAIN)
        yield from reader.skip_space()
        yield from reader.read_all(_WORD)
        yield from reader.skip_space()
        return (channel, recipient) if (yield from reader.skip(_MESSAGE)) else None

    def _read_recipient(self) -> Steps[str]:
        """Read a recipient and the white space around it; return an empty text if there is none."""
        yield from self._reader.skip_space()
        recipient = ""
        if (yield from self._reader.skip("to=")):
            recipient = yield from self._reader.read_all(_WORD)
            yield from self._reader.skip_space()
        return recipient

    def _read_message(self, channel: str, recipient: str) -> Steps[str | None]:
        """Read a message behind its header, with its own end; return the tag that ends it, None if the answer ends it."""
        reader = self._reader
        name = recipient.removeprefix(_FUNCTIONS)
        if self._tools and (name != recipient or name in self._tools):
            end = yield from self._read_call(name)
        elif channel == _REASONING:
            self.is_reasoning = True
            self._space = "\n" if self._has_reasoning else ""
            end = yield from reader.copy_until(_BODY_ENDS, self._reasoning, trim="")
            self.is_reasoning = False
        else:
            self._space = "\n"
            end = yield from reader.copy_until(_BODY_ENDS, self._content, trim="")
        if end in _ENDS:
            yield from reader.skip(end)
        return end

    def _read_call(self, name: str) -> Steps[str | None]:
        """Read the arguments of a call; none are an empty object."""
        self._begin(name)
        yield from self._reader.skip_space()
        is_empty = True

        def write(text: str) -> None:
            nonlocal is_empty
            is_empty = is_empty and not text
            self._arguments(text)

        end = yield from self._reader.copy_until(_BODY_ENDS, write)
        if end is not None:
            if is_empty:
                self._arguments("{}")
            yield from self._reader.skip_space()
        return end

    def _reasoning(self, text: str) -> None:
        """Emit text of the reasoning; messages of it are separated by a line."""
        if text:
            self._emit(Reasoning(self._space + text))
            self._space = ""
            self._has_reasoning = True
